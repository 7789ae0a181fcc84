"""Search of graphs with 100,000 and 1,000,000 ops: steps, time and memory.

    python -m benchmarks huge:graphs [--quick | --full] [--seeds N]
    python -m benchmarks huge:learning

The step is compared with the best of {single device, HEFT, ETF}, with HEFT, and with a lower bound
that no placement may reach. Everything is simulated, with the default policy, on one core. Seconds
are those of the whole search, its heuristics included; memory is the peak of the process until
then, so the problems come in the order of their sizes. With ``--quick`` one has 20,000 ops.
"""

from __future__ import annotations

import functools
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from benchmarks.instances import Machine
from benchmarks.large_graphs.learning import proposers, table_by_problem
from benchmarks.large_graphs.problems import (
    Large,
    inceptions_graph,
    layered_graph,
    moe_graph,
    nmt_graph,
    transformer_graph,
)
from benchmarks.quality import Scores
from benchmarks.record import Effort, Part
from benchmarks.simulator import flat_layered
from benchmarks.tables import Table, spread
from envs.problem import Problem
from envs.simulator.bounds import lower_bound_ns
from placer.policies import load
from placer.search.candidate import Kind
from placer.search.compilation import load_compiled_code
from placer.search.portfolio import Portfolio
from placer.search.request import Budget, Placer, SearchRequest

LEARNING: Final = 5
"""The first of HUGE, on which proposals are compared."""
COLUMNS: Final = ("problem", "of best", "of HEFT", "bound of best", "s", "GB")


@dataclass(frozen=True, slots=True)
class Huge:
    """A problem that is made when it is searched, and the budget."""

    name: str
    problem: Callable[[], Problem]
    budget: Budget


def _million() -> Problem:
    machine = Machine(devices=8, bandwidth_bytes_per_s=10e9)
    return Problem.of(flat_layered(1_000_000, 64, 1), machine.cluster())


def _of(name: str, make: Callable[..., Any], *sizes: Any, on: str, seconds: float = 30.0) -> Huge:
    make = functools.partial(make, *sizes)
    large = Large(name=name, make=make, devices=int(on[:-1]), kinds=on[-1])
    return Huge(f"{name}, {on}", large.problem, Budget(seconds=seconds))


QUICK: Final = (_of("translation", nmt_graph, 6, 560, on="16u", seconds=2.0),)
HUGE: Final = (
    _of("layered", layered_graph, 11, 100_000, 64, 0.8, on="16u"),
    _of("transformer", transformer_graph, 223, 32, on="16e"),
    _of("translation", nmt_graph, 6, 2780, on="16u"),
    _of("mixture of experts", moe_graph, 6, 254, 64, on="16u"),
    _of("inception", inceptions_graph, 230, on="16u"),
    _of("layered", layered_graph, 11, 100_000, 64, 0.8, on="64u"),
    Huge("layered, 8e", _million, Budget(seconds=120.0)),
)


def step_ratios(placer: Placer, problem: Problem, budget: Budget, seed: int) -> tuple[float, ...]:
    """Return the step over the best of {single device, HEFT, ETF}, over HEFT, and best, in ns."""
    candidates = placer.place(SearchRequest(problem, budget, seed=seed))
    of_kind = {candidate.kind: candidate.step_ns for candidate in reversed(candidates)}
    best = min(of_kind[kind] for kind in (Kind.SINGLE_DEVICE, Kind.HEFT, Kind.ETF))
    step_ns = candidates[0].step_ns
    return step_ns / best, step_ns / of_kind[Kind.HEFT], best


def searched(placer: Placer, huge: Huge, seeds: int) -> dict[str, Any]:
    """Return the size of a problem, its bound, and the figures of every seed."""
    problem = huge.problem()
    found: dict[str, Any] = {"ops": problem.op_count, "steps": [], "of_heft": [], "seconds": []}
    best = 0.0
    for seed in range(seeds):
        began = time.perf_counter()
        of_best, of_heft, best = step_ratios(placer, problem, huge.budget, seed)
        found["seconds"].append(time.perf_counter() - began)
        found["steps"].append(of_best)
        found["of_heft"].append(of_heft)
    found["bound"] = lower_bound_ns(problem) / best
    found["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found


def huge_table(found: dict[str, dict[str, Any]]) -> Table:
    """Return a row for each problem."""
    rows = tuple(
        (
            f"{name}, {of['ops']:,} ops",
            spread(sorted(of["steps"]), ".3f"),
            spread(sorted(of["of_heft"]), ".3f"),
            f"{of['bound']:.3f}",
            f"{max(of['seconds']):.0f}",
            f"{of['peak_bytes'] / 1e9:.1f}",
        )
        for name, of in found.items()
    )
    note = "step / best of {single device, HEFT, ETF} and / HEFT; whole search; peak so far"
    return Table("Search, huge graphs", note, COLUMNS, rows)


def parts(effort: Effort) -> dict[str, Part]:
    """Return the parts: steps, time and memory; and what learning is worth."""
    seeds = effort.seed_count(quick=1, normal=1, full=3)
    items: Sequence[Huge] = effort.pick(quick=QUICK, normal=HUGE, full=HUGE)

    def graphs(out: dict[str, Any]) -> Table:
        load_compiled_code()
        placer = Portfolio(load("generalist"))
        for item in items:
            out[item.name] = searched(placer, item, seeds)
        return huge_table(out)

    def learning(out: dict[str, Any]) -> Table:
        load_compiled_code()
        of, equal = proposers(), items[:LEARNING]
        for item in equal:
            problem = item.problem()  # one at a time: it takes much memory
            for kind, proposer in of.items():
                placer = Portfolio(proposer)
                out.setdefault(kind, {})[item.name] = [
                    step_ratios(placer, problem, item.budget, seed)[0] for seed in range(seeds)
                ]
        found = [Scores(kind, np.array([*out[kind].values()]).T) for kind in of]
        return table_by_problem("Learning, huge graphs", [item.name for item in equal], found)

    return {"graphs": graphs, "learning": learning}
