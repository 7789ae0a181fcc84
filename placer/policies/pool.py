"""Problems to train and to test on: made-up graphs on made-up clusters, from a seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from envs.cluster import Cluster, Device, Link, LinkOrder, Sharing
from envs.problem import Problem
from graphs.graph import ANY_KIND, GraphArrays
from graphs.synthetic import FAMILIES, draw
from placer.policies.summary import summarise
from placer.search.candidate import Candidate
from placer.search.heuristics import ETF_NAME, HEFT_NAME, SINGLE, heuristics
from placer.search.judge import Judge

FASTEST: Final = "fast"
SLOWER: Final = "slow"
UNEQUAL_SHARE: Final = 0.25
DEVICE_COUNTS: Final = (2, 2, 3, 4, 5, 6, 8)
LATENCIES_S: Final = (5e-6, 15e-6, 30e-6)
BANDWIDTHS: Final = (8e9, 50e9)  # bytes/s, log-uniform
SHARINGS: Final[tuple[Sharing, ...]] = ("egress", "egress", "pair")
ORDERS: Final[tuple[LinkOrder, ...]] = ("fifo", "priority")
NO_NEWS: Final = ("chain",)
"""Families that teach nothing: one device is the best there."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exercise:
    """A problem with what a policy sees of it and what it has to beat."""

    family: str
    judge: Judge
    known: list[Candidate]
    summary: NDArray[np.float64]  # (22,)
    reference_ns: int  # the best of single device, HEFT and ETF

    def ratio(self, cost: int) -> float:
        """A cost relative to the reference."""
        return cost / self.reference_ns


def families(chosen: Sequence[str] | None = None) -> tuple[str, ...]:
    """The families to draw from: those chosen, or all that are worth it.

    Raises:
        ValueError: there is no such family; the message lists those there are.
    """
    for name in chosen or ():
        if name not in FAMILIES:
            raise ValueError(f"there is no family {name!r}; there are {', '.join(FAMILIES)}")
    return tuple(chosen) if chosen else tuple(name for name in FAMILIES if name not in NO_NEWS)


def draw_exercise(rng: np.random.Generator, family: str, max_ops: int) -> Exercise:
    """A graph of a family on a random cluster of 2 to 8 devices, a quarter of them unequal."""
    graph = GraphArrays.from_graph(draw(rng, family, max_ops=max_ops))
    count = int(rng.choice(DEVICE_COUNTS))
    kinds = [FASTEST] * count
    if rng.random() < UNEQUAL_SHARE:
        slow = int(rng.integers(1, count))
        kinds[:slow] = [SLOWER] * slow
        factor = float(rng.uniform(1.5, 4.0))
        cost = graph.costs_for(ANY_KIND)
        graph = replace(graph, cost_s={FASTEST: cost, SLOWER: cost * factor})
    devices = tuple(
        Device(name=f"device:{i}", kind=kind, memory_bytes=1 << 45) for i, kind in enumerate(kinds)
    )
    link = Link(
        between=tuple(device.name for device in devices),
        latency_s=float(rng.choice(LATENCIES_S)),
        bandwidth_bytes_per_s=math.exp(rng.uniform(*np.log(BANDWIDTHS))),
        sharing=SHARINGS[int(rng.integers(len(SHARINGS)))],
        order=ORDERS[int(rng.integers(len(ORDERS)))],
    )
    cluster = Cluster(name=f"{count}-devices", devices=devices, links=(link,))
    return exercise(Problem.of(graph, cluster), family)


def exercise(problem: Problem, family: str = "") -> Exercise:
    """Prepare any problem for training or testing."""
    judge = Judge(problem)
    known = heuristics(judge)
    reference = min(
        c.step_ns for c in known if c.name in (HEFT_NAME, ETF_NAME) or c.name.startswith(SINGLE)
    )
    return Exercise(
        family=family,
        judge=judge,
        known=known,
        summary=summarise(judge, known),
        reference_ns=max(reference, 1),
    )


def draw_pool(
    seed: int, count: int, max_ops: int, chosen: Sequence[str] | None = None
) -> list[Exercise]:
    """``count`` exercises, the families taking turns.

    Raises:
        ValueError: a family does not exist.
    """
    rng = np.random.default_rng(seed)
    turn = families(chosen)
    return [draw_exercise(rng, turn[i % len(turn)], max_ops) for i in range(count)]
