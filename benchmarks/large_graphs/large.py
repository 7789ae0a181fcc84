"""Search where it is hardest: large graphs, and unequal devices with known optima.

    python -m benchmarks large [--quick | --full] [--seeds N]

Large graphs have 2,500 to 10,000 ops of six families on 8 or 16 devices, with ``--full`` also up to
44,000. Devices are equal ("e"), of two speeds ("u"), or unrelated ("x"): every op has costs of its
own on every device. The step is compared with the best of {single device, HEFT, ETF}, and with a
lower bound that no placement may reach. Graphs with a planted optimum have 50 to 2,000 ops on 2 to
16 unequal devices. Everything is simulated, with the default policy, and runs on one core, except
"workers", where two workers on two cores are compared with one. What learning is worth on large
graphs, at equal decodes and in equal time, is measured by :mod:`benchmarks.large_graphs.learning`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import networkx as nx
import numpy as np

from benchmarks.instances import Machine
from benchmarks.large_graphs import learning
from benchmarks.quality import step_ns
from benchmarks.record import Effort, Part
from benchmarks.tables import Table, spread
from envs.hardware.cluster import Cluster
from envs.problem import Problem
from envs.simulator.bounds import lower_bound_ns
from graphs.graph import ANY_KIND, GraphArrays, new_graph
from graphs.synthetic import sketches
from graphs.synthetic.inception import inception
from graphs.synthetic.planted import Planted, planted
from graphs.synthetic.shapes import Weights, layered, sequence
from placer.policies import load
from placer.policies.pool import Exercise, exercise
from placer.search.compilation import load_compiled_code
from placer.search.portfolio import Portfolio
from placer.search.request import Budget, Placer, SearchRequest, SearchTrace

LARGE_S: Final = (1.0, 5.0)
PLANTED_S: Final = (1.0, 20.0)
WORKERS: Final = 2
WORKERS_S: Final = 5.0
OF_WORKERS: Final = {
    "evaluations": ".2f",
    "decodes per second": ".2f",
    "moves per second": ".2f",
    "step": ".4f",
}
SPREAD: Final = 0.5
"""Standard deviation of the logarithm of an op's cost on one of the unrelated devices."""
PREMIUM: Final = 0.5

Make = Callable[[], "nx.DiGraph[str]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Large:
    """A large graph on devices that are equal (e), of two speeds (u) or unrelated (x)."""

    name: str
    make: Make
    devices: int
    kinds: str
    bandwidth_bytes_per_s: float = 25e9

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


def _large(name: str, make: Callable[..., Any], *sizes: Any, on: str) -> Large:
    return Large(
        name=name, make=functools.partial(make, *sizes), devices=int(on[:-1]), kinds=on[-1]
    )


LARGE: Final = (
    _large("nmt", nmt_graph, 6, 220, on="8e"),
    _large("nmt", nmt_graph, 4, 100, on="16u"),
    _large("transformer", transformer_graph, 24, 20, on="8e"),
    _large("transformer", transformer_graph, 12, 16, on="16u"),
    _large("moe", moe_graph, 5, 48, 32, on="8e"),
    _large("moe", moe_graph, 6, 16, 32, on="16u"),
    _large("inception", inceptions_graph, 8, on="8u"),
    _large("inception", inceptions_graph, 16, on="16e"),
    _large("layered", layered_graph, 3, 10_000, 20, 0.8, on="8e"),
    _large("layered", layered_graph, 4, 5000, 32, 0.4, on="16u"),
    _large("layered", layered_graph, 5, 3000, 40, 0.5, on="8x"),
    _large("nmt", nmt_graph, 4, 140, on="16x"),
    _large("transformer", transformer_graph, 16, 12, on="8x"),
)
QUICK: Final = (1, 3, 6, 10)
LARGER: Final = (
    _large("transformer", transformer_graph, 96, 32, on="8e"),
    _large("layered", layered_graph, 6, 30_000, 100, 0.5, on="16u"),
)
SCARCE: Final = (  # besides those above: other numbers of devices, and another family
    _large("sequence", _sequence, 7, 4, 300, on="8e"),
    _large("sequence", _sequence, 8, 3, 500, on="4u"),
    _large("transformer", transformer_graph, 24, 10, on="32e"),
    _large("moe", moe_graph, 9, 16, 32, on="32u"),
    _large("layered", layered_graph, 10, 6000, 24, 0.6, on="4e"),
)
LARGEST: Final = (
    _large("layered", layered_graph, 11, 100_000, 64, 0.8, on="8e"),
    _large("transformer", transformer_graph, 200, 36, on="8u"),
)
UNSEEN: Final = (  # no policy and no search was chosen by these
    _large("nmt", nmt_graph, 5, 160, on="16e"),
    _large("transformer", transformer_graph, 20, 14, on="8u"),
    _large("moe", moe_graph, 21, 20, 24, on="8x"),
    _large("inception", inceptions_graph, 12, on="4u"),
    _large("layered", layered_graph, 22, 8000, 28, 0.6, on="32e"),
    _large("sequence", _sequence, 23, 5, 350, on="16x"),
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
        machine = Machine(
            devices=devices,
            bandwidth_bytes_per_s=made.largest_bytes / made.gap_s,
            latency_s=0.0,
            sharing="none",
            order="fifo",
        )
        cluster = each_of_its_kind(machine.cluster(), "device:")
        problem = Problem.of(GraphArrays.from_graph(made.graph), cluster)
        found.append((exercise(problem, f"{devices} x {each} ops"), made))
    return found


def large_scores(
    placer: Placer, items: Sequence[Large], budgets: Sequence[Budget], seeds: int
) -> dict[str, dict[str, Any]]:
    """Return, by problem, the reference over the lower bound and the ratios for every budget."""
    found: dict[str, dict[str, Any]] = {}
    for large in items:
        item = large.exercise()
        bound_ns = lower_bound_ns(item.evaluator.problem)
        found[item.family] = {
            "reference / bound": item.reference_ns / bound_ns,
            **{
                str(budget): sorted(
                    item.ratio(step_ns(placer, item, budget, seed)) for seed in range(seeds)
                )
                for budget in budgets
            },
        }
    return found


def large_table(found: Mapping[str, Mapping[str, Any]], budgets: Sequence[Budget]) -> Table:
    """Return a row for each problem, and the geometric means."""
    rows = [
        (
            name,
            *(spread(scores[str(budget)], ".3f") for budget in budgets),
            f"{1.0 / scores['reference / bound']:.3f}",
        )
        for name, scores in found.items()
    ]
    means = [
        np.exp(np.mean([np.log(scores[str(budget)]).mean() for scores in found.values()]))
        for budget in budgets
    ]
    rows.append(("geometric mean", *(f"{mean:.3f}" for mean in means), ""))
    note = "step / best of {single device, HEFT, ETF}, and what no placement beats"
    return Table(
        "Search, large graphs", note, ("problem", *map(str, budgets), "bound"), tuple(rows)
    )


def of_workers(
    placer: Placer, items: Sequence[Exercise], budget: Budget, seeds: int
) -> dict[str, dict[str, list[float]]]:
    """Return, by problem, the figures of WORKERS workers over those of one.

    Both search by turns, so that a busy machine affects both.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for item in items:
        of = found[item.family] = {name: [] for name in OF_WORKERS}
        for seed in range(seeds):
            figures = []
            for workers in (1, WORKERS):
                trace = SearchTrace()
                request = SearchRequest(
                    item.evaluator.problem, budget, seed=seed, workers=workers, search_trace=trace
                )
                step_ns = placer.place(request)[0].step_ns
                figures.append((*_speeds(trace), step_ns))
            for name, one, several in zip(OF_WORKERS, *figures, strict=True):
                of[name].append(several / one)
    return found


def _speeds(trace: SearchTrace) -> tuple[int, float, float]:
    """Return the evaluations of a search, and those per second of evolution and of annealing."""
    parts = list(trace.parts.values())
    evolution, annealing = (
        (part.evaluations - before.evaluations) / (part.seconds - before.seconds)
        for before, part in pairwise(parts[-3:])
    )
    return parts[-1].evaluations, evolution, annealing


def workers_table(found: Mapping[str, Mapping[str, Sequence[float]]], budget: Budget) -> Table:
    """Return a row for each problem, and the geometric means."""
    rows = [
        (name, *(spread(sorted(of[key]), form) for key, form in OF_WORKERS.items()))
        for name, of in found.items()
    ]
    means = (
        format(np.exp(np.mean([np.log(of[key]).mean() for of in found.values()])), form)
        for key, form in OF_WORKERS.items()
    )
    rows.append(("geometric mean", *means))
    note = f"{WORKERS} workers over one, {budget} each"
    return Table("Search, workers", note, ("problem", *OF_WORKERS), tuple(rows))


def parts(effort: Effort) -> dict[str, Part]:
    """Return the parts: large graphs, planted optima on unequal devices, and several workers."""
    seeds = effort.seed_count(quick=1, normal=1, full=3)

    def graphs(out: dict[str, Any]) -> Table:
        load_compiled_code()
        quick = tuple(LARGE[k] for k in QUICK)
        items = effort.pick(quick=quick, normal=LARGE, full=(*LARGE, *LARGER))
        budgets = [Budget(seconds=s) for s in LARGE_S[: effort.pick(quick=1, normal=2, full=2)]]
        found = large_scores(Portfolio(load("generalist")), items, budgets, seeds)
        out["scores"] = found
        return large_table(found, budgets)

    def optima(out: dict[str, Any]) -> Table:
        load_compiled_code()
        budgets = [Budget(seconds=s) for s in PLANTED_S[: effort.pick(quick=1, normal=2, full=2)]]
        placer = Portfolio(load("generalist"))
        ratios = {
            item.family: {
                str(budget): sorted(
                    step_ns(placer, item, budget, seed) / (made.step_s * 1e9)
                    for seed in range(seeds)
                )
                for budget in budgets
            }
            for item, made in planted_unequal(effort.pick(quick=4, normal=8, full=8))
        }
        out["ratios"] = ratios
        rows = [
            (name, *(spread(of[str(budget)], ".3f") for budget in budgets))
            for name, of in ratios.items()
        ]
        everything = [[of[str(budget)] for of in ratios.values()] for budget in budgets]
        rows.append(("mean", *(f"{np.mean(values):.3f}" for values in everything)))
        rows.append(("worst", *(f"{np.max(values):.3f}" for values in everything)))
        note = "step / optimum known by construction"
        title = "Search, unequal devices"
        return Table(title, note, ("problem", *map(str, budgets)), tuple(rows))

    def workers(out: dict[str, Any]) -> Table:
        load_compiled_code()
        placer = Portfolio(load("generalist"))
        items = [LARGE[k].exercise() for k in QUICK]
        items += [item for item, _ in planted_unequal()[1::4]]
        seconds = effort.pick(quick=1.0, normal=WORKERS_S, full=2 * WORKERS_S)
        out["ratios"] = ratios = of_workers(placer, items, Budget(seconds=seconds), seeds)
        return workers_table(ratios, Budget(seconds=seconds))

    regime = effort.pick(
        quick=SCARCE[2:4], normal=(*LARGE, *SCARCE), full=(*LARGE, *SCARCE, *LARGEST)
    )
    unseen = effort.pick(quick=UNSEEN[:1], normal=UNSEEN, full=UNSEEN)
    return {
        "graphs": graphs,
        "optima": optima,
        "workers": workers,
        **learning.parts(effort, regime, unseen),
    }
