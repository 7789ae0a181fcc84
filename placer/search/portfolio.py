"""Default search: heuristics, policy, evolution, beam searches, annealing; and annealing alone.

Evolution adapts the decoder's 21 weights and finds good placements within a thousand decodes, the
second half of them in sight of the best so far, see :mod:`placer.search.list_scheduler.sight`.
Beam searches follow on unequal devices, see :mod:`placer.search.list_scheduler.beams`.
Annealing moves single ops, on large graphs also blocks, and is better at the end. The best of all
is kept, so the result is never worse than the heuristics.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Final

import numpy as np

from envs.placement import OBJECTIVES
from envs.problem import Floats, Longs
from envs.simulator import INFEASIBLE_NS
from envs.simulator.bounds import lower_bound_ns, missing_link
from envs.simulator.reasons import memory_shortfall
from placer.search.annealing.blocks import blocks_of
from placer.search.annealing.islands import anneal_islands, continue_from_best
from placer.search.annealing.max_load import minimize_max_load
from placer.search.annealing.step_time import (
    HOT,
    MOST_STARTS,
    StepTimeAnnealing,
    affordable_moves,
    initial_temperature,
    worthwhile_starts,
)
from placer.search.candidate import Candidate, Kind, distinct, ranked
from placer.search.compilation import load_compiled_beam, load_compiled_code
from placer.search.evaluator import Evaluator
from placer.search.evolution import POPULATION, SIGMA, Evolution
from placer.search.grouping import EVALUATIONS, has_levels, level_above
from placer.search.heuristics import heuristics
from placer.search.list_scheduler.beams import (
    BEAM_EVALUATIONS,
    BEAM_SHARE,
    affordable_width,
    beam_candidates,
    beams_suit,
)
from placer.search.list_scheduler.decoder import HEFT, WEIGHT_COUNT
from placer.search.list_scheduler.sight import ADVANTAGES, OF_PLAN, REPEATING, SIGHT_COUNT
from placer.search.request import MAX_LOAD, Budget, SearchRequest
from placer.search.sampling import Proposer
from placer.search.workers import Team, Workers

SAMPLES: Final = 32
SAMPLE_SHARE: Final = 0.25
"""Maximum share for samples of the policy; all shares are of the budget that heuristics leave."""
SAMPLE_SPREAD: Final = 1.5
"""Samples vary by this many standard deviations of the policy, but at least by SIGMA: training
narrows the deviations to what suits its own families, which is too little where the policy errs on
others."""
EVOLUTION_SHARE: Final = 0.6
"""Evolution stops at this share of the budget, or after EVOLUTION_DECODES; annealing follows."""
EVOLUTION_DECODES: Final = 1500
BLIND_SHARE: Final = 0.3
"""Until this share of the budget, or half of the decodes, evolution sees no plan."""
PAIRS_AT_ONCE: Final = 1 << 21
"""Pairs of an op and a device that take about 0.1 s to decode."""
FEWEST_OPS: Final = 2500
"""Graphs of this many ops are large: annealing has few moves for each, so it moves blocks, too."""
COOLER: Final = 0.3
SIGHT_SIGMA: Final = 0.3
LEAST_SPREAD: Final = 1e-3
SENDERS: Final = 0.3
"""Share of annealing moves for ops that may delay the transfers of the critical chain."""
LONG_S: Final = 1.0
LARGEST_BOUNDED: Final = 20_000
GROUPS_SHARE: Final = 0.2
"""Share of the budget that heuristics leave in which groups of ops are placed on large graphs."""


@dataclass(frozen=True, slots=True)
class Portfolio:
    """Heuristics, a policy if given, evolution, beam searches and annealing.

    Without a policy evolution starts from HEFT. For the objective max-load annealing runs alone.
    """

    policy: Proposer | None = None
    objectives: ClassVar[tuple[str, ...]] = OBJECTIVES

    def place(self, request: SearchRequest) -> list[Candidate]:
        """Return all heuristics and the best placement of each search, best first.

        The budget counts after compiled code is loaded, and the heuristics always run in full. The
        search also ends when its best step time reaches the lower bound.
        """
        if request.objective == MAX_LOAD:
            return minimize_max_load(request)
        request.report(0.0, "loading compiled code, which takes long the first time")
        load_compiled_code()
        if beams_suit(request.problem):
            load_compiled_beam()
        with Workers(request.workers) as workers:
            search = _Search(request, workers, bounded=_pays(request))
            search.begin()
            if request.problem.device_count > 1:
                if has_levels(request.problem):
                    search.begin_by_groups(self)
                search.evolve(self.policy)
                search.follow_beams()
                search.anneal()
            elif search.nothing_fits() and not memory_shortfall(request.problem):
                search.anneal()  # in another order it may fit
        request.report(1.0, "done")
        return search.candidates()


class _Search:
    """State of one search."""

    def __init__(self, request: SearchRequest, workers: Workers, *, bounded: bool) -> None:
        self.meter = request.meter()
        self.evaluator = Evaluator(request.problem)
        self.team = Team(self.evaluator, workers)
        self.workers = workers
        count = 2 + MOST_STARTS + workers.count
        self.seeds = np.random.SeedSequence(request.seed).generate_state(count).tolist()
        self.bound_ns = lower_bound_ns(request.problem) if bounded else 0
        self.began = 0.0  # share of the budget that the heuristics took
        self.known: list[Candidate] = []
        self.new: list[Candidate] = []
        self.chunk = 1
        self._is_large = request.problem.op_count >= FEWEST_OPS

    def begin(self) -> None:
        """Evaluate the heuristics."""
        self.known = heuristics(self.evaluator)
        self.meter.spend(len(self.known))
        self.began = self.meter.share()
        self._note("heuristics", ranked(self.known)[0].step_ns)
        start = self.meter.request.start
        if start is not None and start.step_ns < INFEASIBLE_NS:
            self._keep(start)

    def nothing_fits(self) -> bool:
        """Return whether no heuristic can run."""
        return ranked(self.known)[0].step_ns == INFEASIBLE_NS

    def begin_by_groups(self, placer: Portfolio) -> None:
        """Place groups of ops by a search of their own, and expand what it finds.

        With missing links there may be no placement that keeps the ops of a group together.
        """
        request = self.meter.request
        end = self.began + (1.0 - self.began) * GROUPS_SHARE

        def report(share: float, text: str) -> None:
            request.report(self.began + (end - self.began) * share, f"groups: {text}")

        if self._until(end) is None:
            return
        level = level_above(request.problem)
        budget = self._until(end)
        if budget is None or missing_link(level.problem):
            return
        of_ops = replace(request, budget=budget, progress=report, search_trace=None, start=None)
        found = placer.place(replace(of_ops, problem=level.problem))
        if budget.evaluations is not None:
            self.meter.spend(budget.evaluations)
        for start in level.starts(found, self.evaluator):
            self._keep(start)
            self.meter.spend(EVALUATIONS // 2)
        self.began = self.meter.share()

    def _until(self, share: float) -> Budget | None:
        """Return the budget that is left until ``share`` of it is spent; None if there is none."""
        budget, left = self.meter.request.budget, self.meter.left(share)
        if left is not None:
            return Budget(evaluations=left) if left > 0 else None
        assert budget.seconds is not None
        seconds = budget.seconds * share - self.meter.seconds()
        return Budget(seconds=seconds) if seconds > 0 else None

    def evolve(self, policy: Proposer | None) -> None:
        """Evolve weights from the policy's best ones or HEFT's, then in sight of the best plan."""
        weights, spread = (HEFT, None) if policy is None else self._proposed(policy)
        best = np.concatenate([weights, np.zeros(SIGHT_COUNT)])
        used = np.arange(WEIGHT_COUNT)
        if not self.evaluator.sight.equal_devices:
            used = np.concatenate([used, WEIGHT_COUNT + ADVANTAGES])
        if spread is not None:
            mean = np.exp(np.log(spread).mean())
            spread = np.concatenate([spread, np.full(len(used) - WEIGHT_COUNT, mean)])
        first, second = self.seeds[1], self.seeds[1] + 1
        evolution = Evolution(
            best[used], sigma=SIGMA, spread=spread, seed=first, population=POPULATION
        )
        best = self._evolve(evolution, best, used, BLIND_SHARE)

        best[WEIGHT_COUNT:] += REPEATING
        used = np.concatenate([used, WEIGHT_COUNT + OF_PLAN])
        evolution = Evolution(best[used], sigma=SIGHT_SIGMA, seed=second, population=POPULATION)
        self._evolve(evolution, best, used, EVOLUTION_SHARE, in_sight=True)

    def _evolve(
        self,
        evolution: Evolution,
        weights: Floats,
        used: Longs,
        share: float,
        *,
        in_sight: bool = False,
    ) -> Floats:
        """Evolve the ``used`` ones of the weights (29,) and return the best weights.

        If they are ``in_sight`` of a plan, it is the best so far, renewed after every generation.
        """
        best, least, seen = weights.copy(), INFEASIBLE_NS, None
        for _ in range(EVOLUTION_DECODES // 2 // POPULATION):
            plan = ranked(self.new + self.known)[0]
            if in_sight and plan is not seen and plan.step_ns < INFEASIBLE_NS:
                self.evaluator.look_at(plan)
                self.meter.spend(1)
                seen = plan
            rows = np.repeat(weights[None], POPULATION, axis=0)
            rows[:, used] = evolution.ask()
            costs = self._decode(Kind.EVOLUTION, rows, share)
            if len(costs) < len(rows):
                break
            evolution.tell(rows[:, used], costs)
            if costs.min() < least:
                best, least = rows[costs.argmin()].copy(), int(costs.min())
        return best

    def _proposed(self, policy: Proposer) -> tuple[Floats, Floats]:
        """Decode the proposals, then samples around the best; return the best weights, spreads."""
        means, deviations = policy.propose(self.evaluator, self.known)
        spreads = np.maximum(deviations, LEAST_SPREAD)
        costs = self._decode(Kind.POLICY, means, SAMPLE_SHARE)
        if len(costs) == 0:
            return means[0], spreads[0]
        first = int(costs.argmin())
        normal = np.random.default_rng(self.seeds[0]).standard_normal((SAMPLES, WEIGHT_COUNT))
        spread = np.maximum(SAMPLE_SPREAD * deviations[first], SIGMA)
        rows = (means[first] + spread * normal).round(9)
        sampled = self._decode(Kind.POLICY, rows, SAMPLE_SHARE)
        best = means[first]
        if len(sampled) and sampled.min() < costs[first]:
            best = rows[int(sampled.argmin())]
        [heft] = [c.cost for c in self.known if c.kind is Kind.HEFT]
        if heft < min(costs.min(), sampled.min(initial=INFEASIBLE_NS)):
            best = HEFT  # the policy errs on such graphs
        return best, spreads[first]

    def _decode(self, kind: Kind, rows: Floats, share: float) -> Longs:
        """Return costs of weights (B, 21 or 29), of those that are begun before ``share`` is spent.

        It is a share of the budget that the heuristics left.
        """
        end = self.began + (1.0 - self.began) * share
        costs: list[int] = []
        best: Candidate | None = None
        while len(costs) < len(rows) and not self.meter.over(end):
            left = self.meter.left()
            size = min(max(self.chunk, self.workers.count), len(rows) - len(costs))
            size = size if left is None else min(size, left)
            began = self.meter.seconds()
            devices, priority, new = self.team.decode(rows[len(costs) : len(costs) + size])
            costs += new.tolist()
            self.meter.spend(size)
            self.chunk = self._next_chunk(size, self.meter.seconds() - began)
            row = int(new.argmin())
            if best is None or new[row] < best.cost:
                best = self.evaluator.candidate(kind, devices[row], priority[row], int(new[row]))
        if best is not None:
            self._keep(best)
        return np.array(costs, np.int64)

    def _next_chunk(self, size: int, seconds: float) -> int:
        """Return how many decodes to make at once; of a budget in seconds the clock decides."""
        if self.meter.left() is None:
            return self.meter.next_chunk(self.chunk, size, seconds)
        problem = self.evaluator.problem
        pairs = problem.op_count * problem.device_count
        return min(2 * self.chunk, max(PAIRS_AT_ONCE // pairs, 1))

    def follow_beams(self) -> None:
        """Search by beams near the orders of the best placement and of HEFT, while that pays."""
        share = self.meter.share()
        width = affordable_width(self.evaluator, int(self.meter.spent / max(share, 1e-9)))
        end = share + (1.0 - share) * BEAM_SHARE
        if width == 0 or self.meter.over(end):
            return
        plans = ranked(self.new + self.known)[0], *(c for c in self.known if c.kind is Kind.HEFT)
        is_over = partial(self.meter.over, end)
        for candidate in beam_candidates(self.evaluator, plans, width, self.seeds[1], is_over):
            self.meter.spend(BEAM_EVALUATIONS * width)
            self._keep(candidate)

    def anneal(self) -> None:
        """Anneal from the best placement; with much time also from other good ones."""
        if self.meter.over():
            return
        best = distinct(ranked(self.new + self.known), MOST_STARTS)
        moves = affordable_moves(self.evaluator, best[0], self.meter)
        if self.meter.left() is None:
            moves *= self.workers.count
        self.meter.spend(1)
        # If there is time, also from the best heuristic and the next best placement.
        starts = distinct([best[0], *ranked(self.known), *best], worthwhile_starts(moves))
        count = -(-len(starts) // self.workers.count) * self.workers.count
        starts = [starts[k % len(starts)] for k in range(count)]
        hot = initial_temperature(moves // count, self.evaluator.problem.op_count)
        hot *= COOLER if self._is_large else 1.0
        self.anneal_from(starts, self.seeds[2:], hot=hot, senders=SENDERS)

    def anneal_from(
        self, starts: list[Candidate], seeds: list[int], *, hot: float, senders: float
    ) -> None:
        """Anneal from each of the placements for an equal share of the remaining budget.

        As many as there are workers are annealed at once, and continue from the best of them.
        """
        began, together = self.meter.share(), self.workers.count
        blocks = blocks_of(self.evaluator.problem) if self._is_large else None
        for number in range(0, len(starts), together):
            if self.meter.over():
                break
            chosen = starts[number : number + together]
            islands = [
                StepTimeAnnealing(evaluator, start, seed, hot=hot, senders=senders, blocks=blocks)
                for evaluator, start, seed in zip(
                    self.team.evaluators(len(chosen)), chosen, seeds[number:], strict=False
                )
            ]
            self.meter.spend(len(islands))
            end = began + (1.0 - began) * (number + len(chosen)) / len(starts)
            exchange = partial(continue_from_best, islands)
            for cost in anneal_islands(
                islands, self.meter, self.workers, end=end, exchange=exchange
            ):
                self._note(Kind.ANNEALING.value, cost)
            for island in islands:
                self._keep(island.best())

    def candidates(self) -> list[Candidate]:
        """Return all heuristics and the best new placement of each kind of search, best first."""
        everything = ranked(self.known + self.new)
        new = [c for c in distinct(everything, len(everything)) if c in self.new]
        best_of = {candidate.kind: candidate for candidate in reversed(new)}
        return ranked([*self.known, *best_of.values()])

    def _keep(self, candidate: Candidate) -> None:
        same = [c for c in self.new if c.kind is candidate.kind]
        others = [c for c in self.new if c.kind is not candidate.kind]
        self._note(candidate.kind.value, candidate.step_ns)
        self.new = others + distinct(ranked([*same, candidate]), MOST_STARTS)

    def _note(self, name: str, cost_ns: int) -> None:
        """Report a cost; stop if no placement can be better."""
        self.meter.note(name, cost_ns)
        if cost_ns <= self.bound_ns:
            self.meter.stopped = True


def _pays(request: SearchRequest) -> bool:
    """Return whether a lower bound is worth its time, about 0.05 s for 1,000 ops."""
    seconds = request.budget.seconds
    return (seconds is None or seconds >= LONG_S) and request.problem.op_count <= LARGEST_BOUNDED


@dataclass(frozen=True, slots=True)
class AnnealingPlacer:
    """Annealing from the best heuristic, repeated with other seeds if the budget allows.

    ``senders`` as in :class:`placer.search.annealing.step_time.StepTimeAnnealing`.
    """

    senders: float = 0.0
    objectives: ClassVar[tuple[str, ...]] = OBJECTIVES

    def place(self, request: SearchRequest) -> list[Candidate]:
        """Return all heuristics and the best annealed placement, best first."""
        if request.objective == MAX_LOAD:
            return minimize_max_load(request)
        load_compiled_code()  # before the budget starts
        with Workers(request.workers) as workers:
            search = _Search(request, workers, bounded=False)
            search.begin()
            start = ranked(search.new + search.known)[0]
            count = worthwhile_starts(affordable_moves(search.evaluator, start, search.meter))
            count = -(-count // workers.count) * workers.count
            search.anneal_from([start] * count, search.seeds, hot=HOT, senders=self.senders)
        annealed = [each for each in search.new if each.kind is Kind.ANNEALING]
        return ranked([*search.known, *annealed[:1]])
