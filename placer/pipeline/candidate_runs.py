"""The runs of an optimization: candidates that are run in turn on a backend."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from envs.backend import Backend, evaluated, measurements
from envs.executors.cores.errors import WorkerError
from envs.measured import FEWEST_ROUNDS, DevicesLostError, runs_s
from envs.problem import Problem
from placer.choose import (
    MEASURED_CANDIDATES,
    choose,
    finalists,
    has_headroom,
    runs_contended,
    with_one_baseline,
    without_slower_singles,
    worth_running,
)
from placer.interrupt import Interrupt
from placer.messages.remarks import long_runs
from placer.pipeline.node_runs import NodeRuns
from placer.progress import Progress, counter
from placer.search.candidate import Candidate, Kind

if TYPE_CHECKING:
    from envs.runtime import Runtime


FINAL_STARTS: Final = 2
"""Number of times that workers are started for the last runs."""


@dataclass(slots=True, kw_only=True)
class CandidateRuns:
    """Runs candidates on the devices of a runtime, or on the user's own backend.

    Its runs take ``seconds`` of wall time, unless a baseline and one placement need more for one
    round. ``unconfirmed`` tells whether few rounds decided, for want of time. With ``nodes`` of a
    cluster more placements run there first, and the fastest of them here.
    """

    backend: Runtime | Backend
    interrupt: Interrupt
    progress: Progress
    seconds: float = math.inf
    nodes: NodeRuns | None = None
    unconfirmed: bool = False
    _spent_s: float = 0.0

    @property
    def left_s(self) -> float:
        """Return the rest of the wall time."""
        return self.seconds - self._spent_s

    def best(
        self, problem: Problem, candidates: Sequence[Candidate], lower_bound_s: float = 0.0
    ) -> list[Candidate]:
        """Run the best candidates and the best single devices; return all with measurements.

        Half of the time is left for :meth:`final`, if there is one. Where the lower bound leaves no
        headroom over a single device, only the baselines are run. Where time is short, fewer
        candidates are run, then all in one round, then only the best placement and baseline.
        """
        if self.nodes is not None and has_headroom(candidates, lower_bound_s):
            candidates = self._preselected(self.nodes, problem, candidates)
        candidates = [each for each in candidates if not each.spare]
        chosen, rounds = self._plan(problem, candidates, lower_bound_s)
        if not chosen:
            return list(candidates)
        steps_s = [candidates[i].predicted_s for i in chosen]
        needed_s = runs_s(steps_s, rounds)
        if needed_s > self.left_s:
            self.progress.remark(long_runs(needed_s, max(self.left_s, 0.0)))
        if rounds == 1:
            return self._run(problem, candidates, chosen, rounds)
        most_s = self.left_s / 2 if self._final_rounds(steps_s) else self.left_s
        return self._run(problem, candidates, chosen, seconds=most_s)

    def _plan(
        self, problem: Problem, candidates: Sequence[Candidate], lower_bound_s: float
    ) -> tuple[list[int], int]:
        """Return which candidates to run, and in how many rounds at least: what time allows."""
        counts = range(MEASURED_CANDIDATES, 0, -1)
        if not has_headroom(candidates, lower_bound_s):
            counts = range(1)
        options = [worth_running(candidates, problem.cluster, count) for count in counts]
        options.append(without_slower_singles(candidates, options[-1]))
        fewest = with_one_baseline(candidates, options[-1])
        plans = [(chosen, FEWEST_ROUNDS, self.left_s / 2) for chosen in options]
        plans.append((options[-1], FEWEST_ROUNDS, self.left_s))
        plans += [(chosen, 1, self.left_s) for chosen in (options[-1], fewest)]
        for chosen, rounds, seconds in plans:
            if runs_s([candidates[i].predicted_s for i in chosen], rounds) <= seconds:
                break
        return chosen, rounds

    def _preselected(
        self, nodes: NodeRuns, problem: Problem, candidates: Sequence[Candidate]
    ) -> list[Candidate]:
        """Run placements on nodes, in a third of the time; return all, the slower eliminated."""
        before_s = nodes.measuring_s
        found = nodes.preselected(problem, candidates, self.left_s / 3)
        if (spent_s := nodes.measuring_s - before_s) > 0.0:
            self._spent_s += spent_s
            self.progress.stage("Running the best for real")
        return found

    def has_time_for_further(self, before: Sequence[Candidate]) -> bool:
        """Return whether one more placement could run beside the best of those that ran."""
        kept = _kept(before)
        steps_s = [each.predicted_s for each in kept]
        return self._fit([*steps_s, min(steps_s, default=0.0)])

    def further(
        self, problem: Problem, before: list[Candidate], found: Sequence[Candidate]
    ) -> list[Candidate]:
        """Run the best of a second search beside the best of the first and the baselines.

        Runs are only compared with runs of the same rounds: if these do not end, those of
        ``before``, the candidates of the first search, count.
        """
        kept = _kept(before)
        both = [*(replace(each, name=f"{each.name}, fitted") for each in found), *kept]
        if not self._fit([each.predicted_s for each in both]):
            return before
        try:
            after = self._run(problem, both, range(len(both)), seconds=self.left_s / 2)
        except (WorkerError, DevicesLostError, OSError):
            return before
        if self.interrupt.requested:
            return before
        others = [each for each in before if each not in kept]
        others = [
            replace(each, measurement=None) if each.can_run and not each.eliminated else each
            for each in others
        ]
        return sorted([*after, *others], key=lambda each: each.predicted_s)

    def final(self, problem: Problem, before: list[Candidate]) -> list[Candidate]:
        """Run the fastest placement and the baselines once more, in more rounds and new workers.

        The fastest of several candidates was also the luckiest: its times in new rounds are not
        biased. Workers differ from those started before them by more than rounds do, since their
        memory lies elsewhere: each half of the rounds has workers of its own. Where time is short,
        rounds are fewer, then workers start once only, then nothing runs again. With one start, the
        only placement was not chosen by luck: its first rounds are the first half.
        Only runs of these rounds are compared; the other candidates are eliminated. The
        rounds of ``before`` count if the new ones do not end, other processes disturb them, or a
        candidate fails in them. A user's own backend runs nothing again.
        """
        if isinstance(self.backend, Backend) or self.interrupt.requested:
            return before
        kept = finalists(before)
        steps_s = [each.ranking_s(contended=False) for each in kept]
        rounds = -(-self._final_rounds(steps_s) // FINAL_STARTS)
        starts = self._final_starts(steps_s) if kept and rounds else 0
        if not starts:
            once = any(_rounds(each) == 1 for each in before if each.can_run)
            self.unconfirmed = once or any(_rounds(each) <= FEWEST_ROUNDS for each in kept)
            return before
        self.progress.stage("Running the fastest once more")
        again: dict[Candidate, Candidate] = {}
        if starts < FINAL_STARTS and len(_placements_that_ran(before)) == 1:
            again = dict(zip(kept, kept, strict=True))
        for left in range(starts, 0, -1):
            seconds = self.left_s / left
            try:
                after = self._run(problem, kept, range(len(kept)), rounds, seconds=seconds)
            except (WorkerError, DevicesLostError, OSError):
                return before
            if self.interrupt.requested or runs_contended(after):
                return before
            for each, new in zip(kept, after, strict=True):
                again[each] = _joined(again[each], new) if each in again else new
            rounds = min([rounds, *(_rounds(each) for each in after if each.can_run)])
        self.unconfirmed = any(_rounds(each) <= FEWEST_ROUNDS for each in again.values())
        if failed := {each: again[each] for each in kept if again[each].failure}:
            return [failed.get(each, each) for each in before]
        return [
            again[each] if each in again else replace(each, eliminated=each.measurement is not None)
            for each in before
        ]

    def _final_rounds(self, steps_s: Sequence[float]) -> int:
        return 0 if isinstance(self.backend, Backend) else self.backend.final_rounds(steps_s)

    def _final_starts(self, steps_s: Sequence[float]) -> int:
        """Return how often workers start for the last runs: as often as the fewest rounds fit."""
        needed_s = runs_s(steps_s, FEWEST_ROUNDS)
        return next((n for n in range(FINAL_STARTS, 0, -1) if n * needed_s <= self.left_s), 0)

    def _fit(self, steps_s: Sequence[float]) -> bool:
        """Return whether the fewest rounds take half of the rest of the time at most."""
        return runs_s(steps_s, FEWEST_ROUNDS) <= self.left_s / 2

    def _run(
        self,
        problem: Problem,
        candidates: Sequence[Candidate],
        chosen: Sequence[int],
        rounds: int | None = None,
        *,
        seconds: float = math.inf,
    ) -> list[Candidate]:
        """Run the chosen ones of some candidates in turn, within ``seconds`` if possible."""
        began = time.perf_counter()
        placements = [candidates[i].placement for i in chosen]
        advance = counter(self.progress)
        if isinstance(self.backend, Backend):
            results = evaluated(self.backend, placements, advance)
            if any(result.step_s == 0.0 for result in results):
                raise ValueError(
                    "the backend gave a step time of 0, and candidates are compared by ratios"
                )
            interrupted = getattr(self.backend, "interrupted", False)
        else:
            predicted_s = [candidates[i].predicted_s for i in chosen]
            with self.backend.backend(
                problem, predicted_s, rounds=rounds, seconds=seconds
            ) as measured:
                results = measured.evaluate(placements, advance)
                interrupted = measured.interrupted
        self.interrupt.requested |= interrupted
        self._spent_s += time.perf_counter() - began
        after = list(candidates)
        for i, measurement in zip(chosen, measurements(results), strict=True):
            if measurement.counts:
                after[i] = replace(candidates[i], measurement=measurement)
        return after


def _kept(before: Sequence[Candidate]) -> list[Candidate]:
    """Return what runs again beside a second search: the best placement and the baselines."""
    ran = [each for each in before if each.measurement and each.can_run and not each.eliminated]
    several = [each for each in ran if not (each.is_single or each.is_unplaced)]
    best = choose(several or ran)
    always = (Kind.UNPLACED, Kind.WARM_START)
    return [each for each in ran if each is best or each.is_single or each.kind in always]


def _rounds(candidate: Candidate) -> int:
    return 0 if candidate.measurement is None else len(candidate.measurement.wall_s)


def _placements_that_ran(candidates: Sequence[Candidate]) -> list[Candidate]:
    ran = [each for each in candidates if each.measurement is not None and not each.eliminated]
    return [each for each in ran if not (each.is_single or each.is_unplaced)]


def _joined(candidate: Candidate, again: Candidate) -> Candidate:
    """Return a candidate with the runs of both."""
    first, second = candidate.measurement, again.measurement
    if first is None or second is None:
        return again if first is None else candidate
    return replace(candidate, measurement=first.joined(second))
