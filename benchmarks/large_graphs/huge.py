"""Search of graphs with 100,000 and 1,000,000 ops: steps, time and memory.

    python -m benchmarks huge:graphs [--quick | --full] [--seeds N]
    python -m benchmarks huge:learning huge:evolved

The step is compared with the best of {single device, HEFT, ETF}, with HEFT, and with a lower bound
that no placement may reach. Everything is simulated, with the default policy, on one core. Seconds
are those of the whole search, its heuristics included; memory is the peak of the process until
then, so the problems come in the order of their sizes. With ``--quick`` one has 20,000 ops.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.instances import Machine
from benchmarks.large_graphs import learning
from benchmarks.large_graphs.problems import (
    Large,
    inceptions_graph,
    large,
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

SECONDS: Final = 30.0
QUICK_SECONDS: Final = 2.0
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


def _of(problem: Large, seconds: float = SECONDS) -> Huge:
    return Huge(problem.label, problem.problem, Budget(seconds=seconds))


PAIRS: Final = tuple(
    (problem, problem.resized(*sizes))
    for problem, sizes in (
        (large("layered", layered_graph, 11, 100_000, 64, 0.8, on="16u"), (111, 8000, 64, 0.8)),
        (large("transformer", transformer_graph, 223, 32, on="16e"), (20, 24)),
        (large("translation", nmt_graph, 6, 2780, on="16u"), (6, 220)),
        (large("mixture of experts", moe_graph, 6, 254, 64, on="16u"), (106, 20, 64)),
        (large("inception", inceptions_graph, 230, on="16u"), (20,)),
    )
)
"""Problems with smaller graphs of the same makers on the same devices."""
QUICK_PAIR: Final = PAIRS[2][0].resized(6, 560), PAIRS[2][0].resized(6, 100)
QUICK: Final = (_of(QUICK_PAIR[0], QUICK_SECONDS),)
HUGE: Final = (
    *(_of(problem) for problem, _ in PAIRS),
    _of(large("layered", layered_graph, 11, 100_000, 64, 0.8, on="64u")),
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
    """Return the parts: steps, time and memory; what learning is worth, also of evolved weights."""
    seeds = effort.seed_count(quick=1, normal=1, full=3)
    items: Sequence[Huge] = effort.pick(quick=QUICK, normal=HUGE, full=HUGE)
    pairs = effort.pick(quick=(QUICK_PAIR,), normal=PAIRS, full=PAIRS)
    amounts = (effort.pick(quick=QUICK_SECONDS, normal=SECONDS, full=SECONDS),)
    problems = [problem for problem, _ in pairs]

    def graphs(out: dict[str, Any]) -> Table:
        load_compiled_code()
        placer = Portfolio(load("generalist"))
        for item in items:
            out[item.name] = searched(placer, item, seeds)
        return huge_table(out)

    def by_problem(found: Mapping[float, Sequence[Scores]], out: dict[str, Any]) -> Table:
        learning.store(problems, found, out)
        names = [problem.label for problem in problems]
        return learning.table_by_problem("Learning, huge graphs", names, found[amounts[0]])

    def proposals(out: dict[str, Any]) -> Table:
        load_compiled_code()
        of = learning.proposers()
        return by_problem(learning.compared(of, problems, amounts, seeds, seconds=True), out)

    def evolved(out: dict[str, Any]) -> Table:
        load_compiled_code()
        return by_problem(learning.compared_with_evolved(pairs, amounts, seeds, seconds=True), out)

    return {"graphs": graphs, "learning": proposals, "evolved": evolved}
