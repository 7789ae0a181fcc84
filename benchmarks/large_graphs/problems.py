"""Large graphs, and unequal devices with known optima, as problems of a search.

Devices are equal ("e"), of two speeds ("u"), or unrelated ("x"): every op has costs of its own on
every device. Graphs with a planted optimum have 50 to 2,000 ops on 2 to 16 unequal devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import networkx as nx
import numpy as np

from benchmarks.instances import Machine, planted_machine
from benchmarks.large_graphs.foreign import PROBLEMS
from benchmarks.large_graphs.foreign_tape import ForeignOp
from envs.hardware.cluster import Cluster
from envs.problem import Problem
from graphs.graph import ANY_KIND, GraphArrays, add_edge, add_op, new_graph
from graphs.synthetic import sketches
from graphs.synthetic.inception import inception
from graphs.synthetic.planted import Planted, planted
from graphs.synthetic.shapes import Weights, layered, sequence
from placer.policies.pool import Exercise, exercise

SPREAD: Final = 0.5
"""Standard deviation of the logarithm of an op's cost on one of the unrelated devices."""
PREMIUM: Final = 0.5

Make = functools.partial["nx.DiGraph[str]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Large:
    """A large graph on devices that are equal (e), of two speeds (u) or unrelated (x)."""

    name: str
    make: Make
    devices: int
    kinds: str
    bandwidth_bytes_per_s: float = 25e9

    @property
    def label(self) -> str:
        """Return the name with the devices, such as "nmt, 8e"."""
        return f"{self.name}, {self.devices}{self.kinds}"

    def resized(self, *sizes: Any) -> Large:
        """Return another graph of the same maker on the same devices."""
        return replace(self, make=functools.partial(self.make.func, *sizes))

    def problem(self) -> Problem:
        """Return the problem; the unrelated costs are always the same."""
        slow = self.devices // 2 if self.kinds == "u" else 0
        machine = Machine(
            devices=self.devices,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s,
            slow=slow,
            factor=2.5,
        )
        graph = self.make()
        return _unrelated(graph, machine) if self.kinds == "x" else machine.problem(graph)

    def exercise(self) -> Exercise:
        """Return the problem with its heuristics."""
        problem = self.problem()
        return exercise(problem, f"{self.name}, {problem.op_count:,}, {self.devices}{self.kinds}")


def _unrelated(graph: nx.DiGraph[str], machine: Machine) -> Problem:
    """Return a problem where an op's costs on the devices are drawn independently."""
    arrays = GraphArrays.from_graph(graph)
    rng = np.random.default_rng(len(arrays))
    factor = np.exp(SPREAD * rng.standard_normal((machine.devices, len(arrays))))
    cost = arrays.costs_for(ANY_KIND)
    arrays = replace(arrays, cost_s={f"kind {d}": cost * factor[d] for d in range(machine.devices)})
    return Problem.of(arrays, each_of_its_kind(machine.cluster(), "kind "))


def each_of_its_kind(cluster: Cluster, prefix: str) -> Cluster:
    """Return the cluster with device d of kind ``prefix`` + d."""
    devices = [replace(device, kind=f"{prefix}{d}") for d, device in enumerate(cluster.devices)]
    return replace(cluster, devices=tuple(devices))


def inceptions_graph(count: int) -> nx.DiGraph[str]:
    """Return networks that are trained side by side, with unequal batches."""
    together = new_graph("inceptions")
    for k in range(count):
        graph = inception(batch=16 + 4 * k)
        together.update(nx.relabel_nodes(graph, {node: f"{k}.{node}" for node in graph}))
    return together


def layered_graph(seed: int, ops: int, width: int, ratio: float) -> nx.DiGraph[str]:
    return layered(np.random.default_rng(seed), ops=ops, width=width, weights=Weights(ratio=ratio))


def moe_graph(seed: int, layers: int, experts: int) -> nx.DiGraph[str]:
    rng = np.random.default_rng(seed)
    return sketches.moe(rng, layers=layers, experts=experts, tokens=4096)


def transformer_graph(layers: int, micro_batches: int) -> nx.DiGraph[str]:
    return sketches.transformer(layers=layers, micro_batches=micro_batches, tokens=512)


def nmt_graph(layers: int, steps: int) -> nx.DiGraph[str]:
    return sketches.nmt(layers=layers, steps=steps, batch=128)


def _sequence(seed: int, layers: int, steps: int) -> nx.DiGraph[str]:
    weights = Weights(ratio=0.8, backward=True)
    return sequence(np.random.default_rng(seed), layers=layers, steps=steps, weights=weights)


def large(name: str, make: Callable[..., Any], *sizes: Any, on: str) -> Large:
    """Return a problem of ``make(*sizes)``, ``on`` so many devices of a kind, as in "8e"."""
    return Large(
        name=name, make=functools.partial(make, *sizes), devices=int(on[:-1]), kinds=on[-1]
    )


def foreign_graph(build: Callable[[], list[ForeignOp]]) -> nx.DiGraph[str]:
    """Return the graph of a training step from a generator that knows nothing of this project."""
    graph = new_graph("foreign", {ANY_KIND: "roofline of an H100"})
    ops = build()
    for op in ops:
        add_op(
            graph,
            op.name,
            op=op.kind,
            module=op.module,
            phase=op.phase,
            cost_s={ANY_KIND: op.cost_s},
            output_bytes=op.output_bytes,
            parameter_bytes=op.parameter_bytes,
        )
        for number in op.inputs:
            add_edge(graph, ops[number].name, op.name)
    return graph


LARGE: Final = (
    large("nmt", nmt_graph, 6, 220, on="8e"),
    large("nmt", nmt_graph, 4, 100, on="16u"),
    large("transformer", transformer_graph, 24, 20, on="8e"),
    large("transformer", transformer_graph, 12, 16, on="16u"),
    large("moe", moe_graph, 5, 48, 32, on="8e"),
    large("moe", moe_graph, 6, 16, 32, on="16u"),
    large("inception", inceptions_graph, 8, on="8u"),
    large("inception", inceptions_graph, 16, on="16e"),
    large("layered", layered_graph, 3, 10_000, 20, 0.8, on="8e"),
    large("layered", layered_graph, 4, 5000, 32, 0.4, on="16u"),
    large("layered", layered_graph, 5, 3000, 40, 0.5, on="8x"),
    large("nmt", nmt_graph, 4, 140, on="16x"),
    large("transformer", transformer_graph, 16, 12, on="8x"),
)
QUICK: Final = (1, 3, 6, 10)
LARGER: Final = (
    large("transformer", transformer_graph, 96, 32, on="8e"),
    large("layered", layered_graph, 6, 30_000, 100, 0.5, on="16u"),
)
SCARCE: Final = (  # besides those above: other numbers of devices, and another family
    large("sequence", _sequence, 7, 4, 300, on="8e"),
    large("sequence", _sequence, 8, 3, 500, on="4u"),
    large("transformer", transformer_graph, 24, 10, on="32e"),
    large("moe", moe_graph, 9, 16, 32, on="32u"),
    large("layered", layered_graph, 10, 6000, 24, 0.6, on="4e"),
)
TEN_THOUSAND: Final = (  # about as many ops each
    large("nmt", nmt_graph, 6, 276, on="8e"),
    large("nmt", nmt_graph, 6, 276, on="16u"),
    large("transformer", transformer_graph, 24, 28, on="8u"),
    large("transformer", transformer_graph, 24, 28, on="16e"),
    large("moe", moe_graph, 5, 48, 32, on="8e"),
    large("moe", moe_graph, 5, 48, 32, on="16u"),
    large("inception", inceptions_graph, 23, on="8u"),
    large("inception", inceptions_graph, 23, on="16e"),
    large("layered", layered_graph, 3, 10_000, 20, 0.8, on="8e"),
    large("layered", layered_graph, 3, 10_000, 20, 0.8, on="16u"),
)
LARGEST: Final = (
    large("layered", layered_graph, 11, 100_000, 64, 0.8, on="8e"),
    large("transformer", transformer_graph, 200, 36, on="8u"),
)
UNSEEN: Final = (  # for the end: two trainings that gained nothing here did not ship
    large("nmt", nmt_graph, 5, 160, on="16e"),
    large("transformer", transformer_graph, 20, 14, on="8u"),
    large("moe", moe_graph, 21, 20, 24, on="8x"),
    large("inception", inceptions_graph, 12, on="4u"),
    large("layered", layered_graph, 22, 8000, 28, 0.6, on="32e"),
    large("sequence", _sequence, 23, 5, 350, on="16x"),
)
_SIBLING_SIZES: Final = (
    (4, 80),
    (3, 70),
    (12, 12),
    (8, 10),
    (105, 16, 32),
    (106, 8, 32),
    (4,),
    (6,),
    (103, 3000, 20, 0.8),
    (104, 2000, 32, 0.4),
    (105, 1500, 40, 0.5),
    (3, 80),
    (8, 10),
    (107, 3, 150),
    (108, 3, 200),
    (12, 8),
    (109, 8, 32),
    (110, 2500, 24, 0.6),
)
SIBLING_PAIRS: Final = tuple(
    (problem, problem.resized(*sizes))
    for problem, sizes in zip((*LARGE, *SCARCE), _SIBLING_SIZES, strict=True)
)
"""Problems with their siblings: smaller graphs of the same makers on the same devices."""
QUICK_PAIRS: Final = SIBLING_PAIRS[15:17]
FOREIGN: Final = tuple(
    large(name, foreign_graph, build, on=f"{devices}{kinds}")
    for name, build, devices, kinds in PROBLEMS
)
PLANTED_UNEQUAL: Final = (  # devices, ops of each, inputs of an op
    (2, 25, 2.0),
    (2, 250, 2.0),
    (4, 25, 2.0),
    (4, 250, 1.5),
    (8, 25, 2.0),
    (8, 100, 2.0),
    (16, 25, 2.0),
    (16, 125, 2.0),
)


def planted_unequal(count: int = len(PLANTED_UNEQUAL)) -> list[tuple[Exercise, Planted]]:
    """Return problems with unequal devices and the schedules that they were cut out of.

    In every other problem devices differ in speed alone; in the rest also by op.
    """
    found = []
    for seed, (devices, each, degree) in enumerate(PLANTED_UNEQUAL[:count]):
        rng = np.random.default_rng(200 + seed)
        made = planted(
            rng,
            devices=devices,
            ops_per_device=each,
            degree=degree,
            step_s=each * 100e-6,
            prices=np.exp(rng.uniform(0.0, np.log(3.0), devices)).tolist(),
            premium=PREMIUM * (seed % 2),
            recent=2 * devices,
        )
        cluster = each_of_its_kind(planted_machine(made, devices).cluster(), "device:")
        problem = Problem.of(GraphArrays.from_graph(made.graph), cluster)
        found.append((exercise(problem, f"{devices} x {each} ops"), made))
    return found
