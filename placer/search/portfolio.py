"""Default search: heuristics, then the policy, then evolution and annealing.

Evolution adapts the decoder's 21 weights and finds good placements within a thousand decodes;
annealing moves single ops and is better at the end. The best of all is kept, so the result is never
worse than the heuristics.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from envs.problem import Problem
from envs.simulator.bounds import lower_bound_ns
from placer.milliseconds import milliseconds
from placer.search.annealing.step_time import (
    MOST_STARTS,
    Annealing,
    affordable_moves,
    anneal,
    initial_temperature,
    worthwhile_starts,
)
from placer.search.budget import Budget
from placer.search.candidate import Candidate, Kind, distinct, ranked
from placer.search.compilation import load_compiled_code
from placer.search.evaluator import Evaluator
from placer.search.evolution import Evolution
from placer.search.heuristics import heuristics
from placer.search.list_scheduler.decoder import HEFT, WEIGHT_COUNT
from placer.search.request import SearchRequest

SAMPLES: Final = 32
SAMPLE_SHARE: Final = 0.25
"""Maximum share of the budget for samples of the policy."""
SAMPLE_SPREAD: Final = 1.5
"""Samples vary by this many standard deviations of the policy, but at least by SIGMA: training
narrows the deviations to what suits its own families, which is too little where the policy errs on
others."""
EVOLUTION_SHARE: Final = 0.6
"""Evolution stops at this share of the budget, or after EVOLUTION_DECODES; annealing follows."""
EVOLUTION_DECODES: Final = 1500
POPULATION: Final = 10
SIGMA: Final = 0.5
LEAST_SPREAD: Final = 1e-3
SENDERS: Final = 0.3
"""Share of annealing moves for ops that may delay the transfers of the critical chain."""
LONG_S: Final = 1.0
LARGEST_BOUNDED: Final = 20_000


class Proposer(Protocol):
    """A learned policy: proposes decoder weights for a problem."""

    def propose(
        self, evaluator: Evaluator, known: list[Candidate]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return means (M, 21) and standard deviations (M, 21) of weights.

        ``known`` are the candidates of the heuristics. All means are tried in order, then samples
        around the best of them.
        """
        ...


def search(request: SearchRequest, policy: Proposer | None = None) -> list[Candidate]:
    """Search for a placement with a short step time.

    The budget counts after compiled code is loaded, and the heuristics always run in full.
    ``should_stop`` is polled about every 0.05 s (never more often than one evaluation takes). The
    search also ends when its best step time reaches the lower bound.

    Args:
        request: what to search, and how long.
        policy: proposes decoder weights; without one evolution starts from HEFT.

    Returns:
        All heuristics, and the best placement of each of "policy", "evolution" and "annealing", the
            shortest step first; infeasible ones come last with INFEASIBLE_NS.
    """
    request.report(0.0, "loading compiled code, which takes long the first time")
    load_compiled_code()  # before the budget starts
    run = _Search(request)
    run.begin()
    if request.problem.device_count > 1:
        run.evolve(run.learned(policy) if policy else _Beginning(HEFT))
        run.anneal()
    run.report(1.0, "done")
    return run.candidates()


class _Beginning(NamedTuple):
    """Start of the evolution: decoder weights (21,) and their standard deviations, if known."""

    weights: NDArray[np.float64]
    spread: NDArray[np.float64] | None = None


class _Search:
    """State of one search."""

    def __init__(self, request: SearchRequest) -> None:
        problem = request.problem
        self.meter = request.meter()
        self.evaluator = Evaluator(problem)
        self.seeds = np.random.SeedSequence(request.seed).generate_state(2 + MOST_STARTS).tolist()
        self.report = request.report
        self.bound_ns = lower_bound_ns(problem) if _pays(problem, request.budget) else 0
        self.known: list[Candidate] = []
        self.found: list[Candidate] = []
        self.chunk = 1

    def begin(self) -> None:
        self.known = heuristics(self.evaluator)
        self.meter.spend(len(self.known))
        self._settle(min(c.step_ns for c in self.known))
        self.meter.note("heuristics", min(c.step_ns for c in self.known))
        self.report(self.meter.share(), "heuristics")

    def learned(self, policy: Proposer) -> _Beginning:
        """Decode the policy's proposals, then samples around the best; return the best weights."""
        means, deviations = policy.propose(self.evaluator, self.known)
        spreads = np.maximum(deviations, LEAST_SPREAD)
        costs = self.decode(Kind.POLICY, means, SAMPLE_SHARE)
        if len(costs) == 0:
            return _Beginning(means[0], spreads[0])
        first = int(costs.argmin())
        normal = np.random.default_rng(self.seeds[0]).standard_normal((SAMPLES, WEIGHT_COUNT))
        spread = np.maximum(SAMPLE_SPREAD * deviations[first], SIGMA)
        rows = (means[first] + spread * normal).round(9)
        sampled = self.decode(Kind.POLICY, rows, SAMPLE_SHARE)
        if len(sampled) and sampled.min() < costs[first]:
            return _Beginning(rows[int(sampled.argmin())], spreads[first])
        return _Beginning(means[first], spreads[first])

    def evolve(self, beginning: _Beginning) -> None:
        evolution = Evolution(
            beginning.weights,
            sigma=SIGMA,
            spread=beginning.spread,
            seed=self.seeds[1],
            population=POPULATION,
        )
        for _ in range(EVOLUTION_DECODES // POPULATION):
            rows = evolution.ask()
            costs = self.decode(Kind.EVOLUTION, rows, EVOLUTION_SHARE)
            if len(costs) < len(rows):
                break
            evolution.tell(rows, costs)

    def decode(self, kind: Kind, rows: NDArray[np.float64], share: float) -> NDArray[np.int64]:
        """Return costs of weights (B, 21), of fewer if ``share`` of the budget is spent first."""
        costs: list[int] = []
        best: Candidate | None = None
        while len(costs) < len(rows) and not self.meter.over(share):
            left = self.meter.left()
            size = min(self.chunk, len(rows) - len(costs))
            size = size if left is None else min(size, left)
            began = self.meter.seconds()
            devices, priority, new = self.evaluator.decode(rows[len(costs) : len(costs) + size])
            costs += new.tolist()
            self.meter.spend(size)
            self.chunk = self.meter.next_chunk(self.chunk, size, self.meter.seconds() - began)
            row = int(new.argmin())
            if best is None or new[row] < best.step_ns:
                best = self.evaluator.candidate(kind, devices[row], priority[row], int(new[row]))
        self.report(self.meter.share(), kind.value)
        if best is not None:
            self._keep(best)
        return np.array(costs, np.int64)

    def anneal(self) -> None:
        if self.meter.over():
            return
        best = distinct(ranked(self.found + self.known), MOST_STARTS)
        moves = affordable_moves(self.evaluator, best[0], self.meter)
        self.meter.spend(1)
        # The best placement; if there is time also the best heuristic and the next best placement.
        starts = distinct([best[0], *ranked(self.known), *best], worthwhile_starts(moves))
        hot = initial_temperature(moves // len(starts), self.evaluator.problem.op_count)
        began = self.meter.share()
        for number, start in enumerate(starts):
            annealing = Annealing(
                self.evaluator, start, self.seeds[2 + number], hot=hot, senders=SENDERS
            )
            self.meter.spend(1)
            end = began + (1.0 - began) * (number + 1) / len(starts)
            anneal(annealing, self.meter, end, self._report_annealing)
            self._keep(annealing.best())
            if self.meter.over():
                break

    def _report_annealing(self, cost: int) -> None:
        self._settle(cost)
        self.meter.note(Kind.ANNEALING.value, cost)
        self.report(self.meter.share(), f"annealing, {milliseconds(cost / 1e9)} ms")

    def candidates(self) -> list[Candidate]:
        """Return all heuristics and the best new placement of each kind of search, best first."""
        everything = ranked(self.known + self.found)
        new = [c for c in distinct(everything, len(everything)) if c in self.found]
        best_of = {candidate.kind: candidate for candidate in reversed(new)}
        return ranked([*self.known, *best_of.values()])

    def _keep(self, candidate: Candidate) -> None:
        same = [c for c in self.found if c.kind is candidate.kind]
        others = [c for c in self.found if c.kind is not candidate.kind]
        self._settle(candidate.step_ns)
        self.meter.note(candidate.kind.value, candidate.step_ns)
        self.found = others + distinct(ranked([*same, candidate]), MOST_STARTS)

    def _settle(self, cost: int) -> None:
        if cost <= self.bound_ns:
            self.meter.stopped = True


def _pays(problem: Problem, budget: Budget) -> bool:
    """Return whether a lower bound is worth its time, about 0.05 s for 1,000 ops."""
    long = budget.seconds is None or budget.seconds >= LONG_S
    return long and problem.op_count <= LARGEST_BOUNDED
