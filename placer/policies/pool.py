"""Problems for training and testing: synthetic graphs on synthetic clusters, from a seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from envs.hardware.cluster import MOST_DEVICES, Cluster, Device, Link, LinkOrder, Sharing
from envs.problem import Problem
from envs.simulator import INFEASIBLE_NS
from graphs.graph import ANY_KIND, GraphArrays
from graphs.synthetic.families import FAMILIES, draw
from graphs.text import suggestion
from placer.policies.records import Items, Within, check_ranges
from placer.policies.reference import draw_reference
from placer.policies.summary import summarise
from placer.search.candidate import Candidate, Kind
from placer.search.evaluator import Evaluator
from placer.search.heuristics import heuristics

FASTEST: Final = "fast"
SLOWER: Final = "slow"
SHARINGS: Final[tuple[Sharing, ...]] = ("egress", "egress", "pair", "none")
ORDERS: Final[tuple[LinkOrder, ...]] = ("fifo", "priority")
NO_NEWS: Final = ("chain",)
"""Families without anything to learn: there one device is best."""
CANNOT_RUN: Final = 1e3
"""Ratio of an infeasible placement."""
REFERENCE: Final = "reference"
"""Family of the extracted reference models."""

REFERENCE_KINDS: Final = (Kind.SINGLE_DEVICE, Kind.HEFT, Kind.ETF)
"""Kinds of candidates whose best is the reference of an exercise."""

_Counts: TypeAlias = Annotated[tuple[Annotated[int, Within(2, MOST_DEVICES)], ...], Items(1, 1000)]
_Latencies: TypeAlias = Annotated[tuple[Annotated[float, Within(0.0, 1.0)], ...], Items(1, 1000)]
_Bandwidth: TypeAlias = Annotated[float, Within(1.0, 1e15)]
_Ratio: TypeAlias = Annotated[float, Within(1e-6, 1e6)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clusters:
    """Distribution of clusters; one link joins all devices.

    Slower devices are 1.5 to 4 times slower; unrelated costs are drawn for every op and device.
    ``comm_ratio``, if given, determines the bandwidth: the time to send every output once, over the
    time of all ops.
    """

    devices: _Counts = (2, 2, 3, 4, 5, 6, 8)  # one of these numbers
    unequal_share: Annotated[float, Within(0.0, 1.0)] = 0.25  # share with slower devices
    unrelated_share: Annotated[float, Within(0.0, 1.0)] = 0.0  # with costs per op and device
    latencies_s: _Latencies = (5e-6, 15e-6, 30e-6)  # one of these
    bandwidth_bytes_per_s: tuple[_Bandwidth, _Bandwidth] = (8e9, 50e9)  # log-uniform
    comm_ratio: tuple[_Ratio, _Ratio] | None = None  # log-uniform

    def __post_init__(self) -> None:
        check_ranges(self)
        for name in ("bandwidth_bytes_per_s", "comm_ratio"):
            low, high = getattr(self, name) or (1.0, 1.0)
            if low > high:
                raise ValueError(f"{name} is {low:g} .. {high:g}: the smaller one comes first")

    def draw(self, rng: np.random.Generator, graph: GraphArrays) -> tuple[GraphArrays, Cluster]:
        """Draw a cluster; return it with ``graph``, with costs for the kinds of its devices."""
        count = int(rng.choice(self.devices))
        kinds = [FASTEST] * count
        cost = graph.costs_for(ANY_KIND)
        if rng.random() < self.unequal_share:
            slow = int(rng.integers(1, count))
            kinds[:slow] = [SLOWER] * slow
            factor = float(rng.uniform(1.5, 4.0))
            graph = replace(graph, cost_s={FASTEST: cost, SLOWER: cost * factor})
        if self.unrelated_share and rng.random() < self.unrelated_share:
            kinds = [f"kind {d}" for d in range(count)]
            deviation = float(rng.uniform(0.2, 0.8))
            factors = np.exp(deviation * rng.standard_normal((count, len(graph))))
            graph = replace(graph, cost_s=dict(zip(kinds, cost * factors, strict=True)))
        devices = tuple(
            Device(name=f"device:{i}", kind=kind, memory_bytes=1 << 45)
            for i, kind in enumerate(kinds)
        )
        link = Link(
            between=tuple(device.name for device in devices),
            latency_s=float(rng.choice(self.latencies_s)),
            bandwidth_bytes_per_s=self._bandwidth(rng, graph, float(cost.sum())),
            sharing=SHARINGS[int(rng.integers(len(SHARINGS)))],
            order=ORDERS[int(rng.integers(len(ORDERS)))],
        )
        return graph, Cluster(name=f"{count}-devices", devices=devices, links=(link,))

    def _bandwidth(self, rng: np.random.Generator, graph: GraphArrays, work_s: float) -> float:
        if self.comm_ratio is None:
            return math.exp(rng.uniform(*np.log(self.bandwidth_bytes_per_s)))
        ratio = math.exp(rng.uniform(*np.log(self.comm_ratio)))
        sent = graph.output_bytes[np.diff(graph.successor_start) > 0].sum()
        return max(float(sent), 1.0) / (ratio * max(work_s, 1e-9))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exercise:
    """A problem with its heuristics, its summary and the reference to beat."""

    family: str
    evaluator: Evaluator
    known: list[Candidate]
    summary: NDArray[np.float64]  # (F,) of summary.FEATURES
    reference_ns: int  # the best of single device, HEFT and ETF

    def ratio(self, cost: int) -> float:
        """Return a cost relative to the reference."""
        return cost / self.reference_ns


def families(chosen: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the families to draw from: the chosen ones, or all useful synthetic ones."""
    known = (*FAMILIES, REFERENCE)
    for name in chosen or ():
        if name not in known:
            hint = suggestion(name, known)
            raise ValueError(f"there is no family {name!r}; there are {', '.join(known)}{hint}")
    return tuple(chosen) if chosen else tuple(name for name in FAMILIES if name not in NO_NEWS)


def draw_exercise(
    rng: np.random.Generator, family: str, max_ops: int, clusters: Clusters | None = None
) -> Exercise:
    """Draw a graph of a family on a random cluster."""
    drawn = draw_reference if family == REFERENCE else partial(draw, family=family)
    graph, cluster = (clusters or Clusters()).draw(
        rng, GraphArrays.from_graph(drawn(rng, max_ops=max_ops))
    )
    return exercise(Problem.of(graph, cluster), family)


def exercise(problem: Problem, family: str = "") -> Exercise:
    """Prepare a problem for training or testing.

    Raises:
        ValueError: no heuristic placement can run, so there is nothing to compare with.
    """
    evaluator = Evaluator(problem)
    known = heuristics(evaluator)
    reference = min(c.step_ns for c in known if is_reference(c))
    if reference == INFEASIBLE_NS:
        raise ValueError("no heuristic placement fits into memory: add a device")
    return Exercise(
        family=family,
        evaluator=evaluator,
        known=known,
        summary=summarise(evaluator, known),
        reference_ns=max(reference, 1),
    )


def is_reference(candidate: Candidate) -> bool:
    """Return whether a heuristic is one of those to beat: single device, HEFT and ETF."""
    return candidate.kind in REFERENCE_KINDS


def draw_pool(
    seed: int,
    count: int,
    max_ops: int,
    chosen: Sequence[str] | None = None,
    clusters: Clusters | None = None,
) -> list[Exercise]:
    """Draw ``count`` exercises, with the families in turn."""
    rng = np.random.default_rng(seed)
    turn = families(chosen)
    return [draw_exercise(rng, turn[i % len(turn)], max_ops, clusters) for i in range(count)]
