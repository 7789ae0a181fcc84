"""Search where it is hardest: large graphs, and unequal devices with known optima.

    python -m benchmarks large [--quick | --full] [--seeds N]

Large graphs have 2,500 to 10,000 ops of six families on 8 or 16 devices, with ``--full`` also up to
44,000. The step is compared with the best of {single device, HEFT, ETF}, and with a lower bound
that no placement may reach. Everything is simulated, with the default policy, and runs on one core,
except "10000", ten graphs of about 10,000 ops by two workers, and "workers", where two workers are
compared with one. "decoder" compares a decode with a simulation of its placement. What learning is
worth on large graphs is measured by :mod:`benchmarks.large_graphs.learning`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

import numpy as np

from benchmarks.large_graphs import learning
from benchmarks.large_graphs.problems import (
    FOREIGN,
    LARGE,
    LARGER,
    LARGEST,
    QUICK,
    QUICK_PAIRS,
    SCARCE,
    SIBLING_PAIRS,
    TEN_THOUSAND,
    UNSEEN,
    Large,
    planted_unequal,
)
from benchmarks.quality import step_ns
from benchmarks.record import Effort, Part
from benchmarks.tables import Table, spread
from envs.simulator.bounds import lower_bound_ns
from placer.policies import load
from placer.policies.pool import Exercise
from placer.search.candidate import Kind
from placer.search.compilation import load_compiled_code
from placer.search.list_scheduler.decoder import HEFT, decode_batch
from placer.search.portfolio import Portfolio
from placer.search.request import Budget, Placer, SearchRequest, SearchTrace
from placer.search.sampling import Proposer

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
OF_TEN_THOUSAND: Final = (0, 3, 4, 8)
OF_DECODER: Final = {"HEFT, ns/pair": ".0f", "policy, ns/pair": ".0f", "in simulations": ".1f"}


def large_scores(
    placer: Placer,
    items: Sequence[Large],
    budgets: Sequence[Budget],
    seeds: int,
    *,
    workers: int = 1,
) -> dict[str, dict[str, Any]]:
    """Return, by problem, the reference over the lower bound and the ratios for every budget."""
    found: dict[str, dict[str, Any]] = {}
    for each in items:
        item = each.exercise()
        bound_ns = lower_bound_ns(item.evaluator.problem)
        found[item.family] = {
            "reference / bound": item.reference_ns / bound_ns,
            **{
                str(budget): sorted(
                    item.ratio(step_ns(placer, item, budget, seed, workers=workers))
                    for seed in range(seeds)
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
    before = {part.name: earlier for earlier, part in pairwise(parts)}

    def rate(kind: Kind) -> float:
        part, earlier = trace.parts[kind.value], before[kind.value]
        return (part.evaluations - earlier.evaluations) / (part.seconds - earlier.seconds)

    return parts[-1].evaluations, rate(Kind.EVOLUTION), rate(Kind.ANNEALING)


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


def decoder_speeds(item: Exercise, policy: Proposer, repeats: int) -> dict[str, list[float]]:
    """Return nanoseconds per pair of op and device of decodes, and decodes in simulations.

    Of each repeat: with the weights of HEFT, which need no siblings, and with a proposal of the
    policy.
    """
    evaluator = item.evaluator
    arrays, problem = evaluator.scheduling, evaluator.problem
    pairs = problem.op_count * problem.device_count
    [proposal, *_], _ = policy.propose(evaluator, item.known)
    found: dict[str, list[float]] = {name: [] for name in OF_DECODER}
    plans = decode_batch(arrays, proposal[None])
    for _ in range(repeats):
        heft_s = _timed(lambda: decode_batch(arrays, HEFT[None]))
        policy_s = _timed(lambda: decode_batch(arrays, proposal[None]))
        simulation_s = _timed(lambda: evaluator.costs(*plans))
        values = heft_s / pairs * 1e9, policy_s / pairs * 1e9, policy_s / simulation_s
        for name, value in zip(OF_DECODER, values, strict=True):
            found[name].append(value)
    return found


def _timed(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def decoder_table(found: Mapping[str, Mapping[str, Sequence[float]]]) -> Table:
    """Return a row for each problem."""
    rows = tuple(
        (name, *(spread(of[key], form) for key, form in OF_DECODER.items()))
        for name, of in found.items()
    )
    return Table("Search, decoder", "one decode on one core", ("problem", *OF_DECODER), rows)


def parts(effort: Effort) -> dict[str, Part]:
    """Return the parts: large graphs, planted optima, several workers, the decoder, learning."""
    seeds = effort.seed_count(quick=1, normal=1, full=3)

    def graphs(out: dict[str, Any]) -> Table:
        load_compiled_code()
        quick = tuple(LARGE[k] for k in QUICK)
        items = effort.pick(quick=quick, normal=LARGE, full=(*LARGE, *LARGER))
        budgets = [Budget(seconds=s) for s in LARGE_S[: effort.pick(quick=1, normal=2, full=2)]]
        found = large_scores(Portfolio(load("generalist")), items, budgets, seeds)
        out["scores"] = found
        return large_table(found, budgets)

    def ten_thousand(out: dict[str, Any]) -> Table:
        load_compiled_code()
        items = TEN_THOUSAND[: effort.pick(quick=1, normal=10, full=10)]
        count = effort.seed_count(quick=1, normal=5, full=5)
        placer, budgets = Portfolio(load("generalist")), [Budget(seconds=LARGE_S[-1])]
        found = large_scores(placer, items, budgets, count, workers=WORKERS)
        out["scores"] = found
        return replace(large_table(found, budgets), title="Search, 10,000 ops, two workers")

    def decoder(out: dict[str, Any]) -> Table:
        load_compiled_code()
        policy = load("generalist")
        repeats = effort.pick(quick=3, normal=25, full=25)
        items = [
            TEN_THOUSAND[k].exercise()
            for k in OF_TEN_THOUSAND[: effort.pick(quick=1, normal=4, full=4)]
        ]
        out["speeds"] = found = {
            item.family: decoder_speeds(item, policy, repeats) for item in items
        }
        return decoder_table(found)

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
    pairs = effort.pick(quick=QUICK_PAIRS, normal=SIBLING_PAIRS, full=SIBLING_PAIRS)
    foreign = effort.pick(quick=FOREIGN[7:8], normal=FOREIGN, full=FOREIGN)
    return {
        "graphs": graphs,
        "optima": optima,
        "10000": ten_thousand,
        "workers": workers,
        "decoder": decoder,
        **learning.parts(effort, regime, unseen, pairs, foreign),
    }
