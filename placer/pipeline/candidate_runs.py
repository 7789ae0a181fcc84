"""The runs of an optimization: candidates that are run in turn on a backend."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from envs.backend import Backend, measurements
from envs.executors.cores.errors import WorkerError
from envs.measured import FEWEST_ROUNDS, DevicesLostError, turn_s
from envs.problem import Problem
from placer.choose import (
    MEASURED_CANDIDATES,
    choose,
    finalists,
    has_headroom,
    runs_contended,
    worth_running,
)
from placer.interrupt import Interrupt
from placer.messages import long_runs
from placer.progress import Progress, counter
from placer.search.candidate import Candidate, Kind

if TYPE_CHECKING:
    from envs.runtime import Runtime


FINAL_STARTS: Final = 2
"""Number of times that workers are started for the last runs."""
STARTING_S: Final = 0.8
"""Time in which workers start and get the example."""
UNCOUNTED_RUNS: Final = 2


@dataclass(slots=True, kw_only=True)
class CandidateRuns:
    """Runs candidates on the devices of a runtime, or on the user's own backend.

    Its runs take ``seconds`` of wall time, at most twice as long, unless the baselines and one
    placement need more.
    """

    backend: Runtime | Backend
    interrupt: Interrupt
    progress: Progress
    seconds: float = math.inf
    _spent_s: float = 0.0

    @property
    def left_s(self) -> float:
        """Return the rest of the wall time."""
        return self.seconds - self._spent_s

    def best(
        self, problem: Problem, candidates: Sequence[Candidate], lower_bound_s: float = 0.0
    ) -> list[Candidate]:
        """Run the best candidates and the best single devices; return all with measurements.

        Half of the time is left for :meth:`final`. Where the lower bound leaves no headroom over a
        single device, only the baselines are run.
        """
        counts = range(MEASURED_CANDIDATES, 0, -1)
        if not has_headroom(candidates, lower_bound_s):
            counts = range(1)
        for count in counts:
            chosen = worth_running(candidates, problem.cluster, count)
            steps_s = [candidates[i].predicted_s for i in chosen]
            needed_s = _run_s(steps_s, FEWEST_ROUNDS)
            if needed_s <= self.left_s / 2:
                break
        else:
            if chosen and needed_s - STARTING_S > self.left_s / 2:
                self.progress.remark(long_runs(needed_s, self.seconds))
        return self._run(problem, candidates, chosen) if chosen else list(candidates)

    def further(
        self, problem: Problem, before: list[Candidate], found: Sequence[Candidate]
    ) -> list[Candidate]:
        """Run the best of a second search beside the best of the first and the baselines.

        Runs are only compared with runs of the same rounds: if these do not end, those of
        ``before``, the candidates of the first search, count.
        """
        ran = [each for each in before if each.measurement and each.can_run]
        several = [each for each in ran if not (each.is_single or each.is_unplaced)]
        best = choose(several or ran)
        always = (Kind.UNPLACED, Kind.WARM_START)
        kept = [each for each in ran if each is best or each.is_single or each.kind in always]
        both = [*(replace(each, name=f"{each.name}, fitted") for each in found), *kept]
        if _run_s([each.predicted_s for each in both], FEWEST_ROUNDS) > self.left_s / 2:
            return before
        try:
            after = self._run(problem, both, range(len(both)))
        except (WorkerError, DevicesLostError, OSError):
            return before
        if self.interrupt.requested:
            return before
        others = [each for each in before if each not in kept]
        others = [replace(each, measurement=None) if each in ran else each for each in others]
        return sorted([*after, *others], key=lambda each: each.predicted_s)

    def final(self, problem: Problem, before: list[Candidate]) -> list[Candidate]:
        """Run the fastest placement and the baselines once more, in more rounds and new workers.

        The fastest of several candidates was also the luckiest: its times in new rounds are not
        biased. Workers differ from those started before them by more than rounds do, since their
        memory lies elsewhere: each half of the rounds has workers of its own. Where time is short,
        the only placement was not chosen by luck: its first rounds are the first half.
        Only runs of these rounds are compared; the other candidates are eliminated. The
        rounds of ``before`` count if the new ones do not end, other processes disturb them, or a
        candidate fails in them. A user's own backend runs nothing again.
        """
        if isinstance(self.backend, Backend) or self.interrupt.requested:
            return before
        kept = finalists(before)
        steps_s = [each.ranking_s(contended=False) for each in kept]
        rounds = self.backend.final_rounds(steps_s, self.left_s - FINAL_STARTS * _run_s(steps_s, 0))
        if not kept or not rounds:
            return before
        starts, rounds = self._final_starts(steps_s, -(-rounds // FINAL_STARTS))
        if not starts:
            return before
        self.progress.stage("Running the fastest once more")
        again: dict[Candidate, Candidate] = {}
        if starts < FINAL_STARTS and len(_placements_that_ran(before)) == 1:
            again = dict(zip(kept, kept, strict=True))
        for _ in range(starts):
            try:
                after = self._run(problem, kept, range(len(kept)), rounds)
            except (WorkerError, DevicesLostError, OSError):
                return before
            if self.interrupt.requested or runs_contended(after):
                return before
            for each, new in zip(kept, after, strict=True):
                again[each] = _joined(again[each], new) if each in again else new
        if failed := {each: again[each] for each in kept if again[each].failure}:
            return [failed.get(each, each) for each in before]
        return [
            again[each] if each in again else replace(each, eliminated=each.measurement is not None)
            for each in before
        ]

    def _final_starts(self, steps_s: Sequence[float], rounds: int) -> tuple[int, int]:
        """Return how often workers start for the last runs, in how many rounds each time.

        Fewer than ``FINAL_STARTS`` where these would take 1.5 times the time of all runs, and none
        where a few rounds alone would take that time.
        """
        if FINAL_STARTS * _run_s(steps_s, rounds) <= self.left_s + self.seconds / 2:
            return FINAL_STARTS, rounds
        return int(_run_s(steps_s, FEWEST_ROUNDS) <= self.seconds), FEWEST_ROUNDS

    def _run(
        self,
        problem: Problem,
        candidates: Sequence[Candidate],
        chosen: Sequence[int],
        rounds: int | None = None,
    ) -> list[Candidate]:
        """Run the chosen ones of some candidates in turn."""
        began = time.perf_counter()
        placements = [candidates[i].placement for i in chosen]
        advance = counter(self.progress)
        if isinstance(self.backend, Backend):
            results = self.backend.evaluate(placements, advance)
            interrupted = getattr(self.backend, "interrupted", False)
        else:
            predicted_s = [candidates[i].predicted_s for i in chosen]
            with self.backend.backend(problem, predicted_s, rounds=rounds) as measured:
                results = measured.evaluate(placements, advance)
                interrupted = measured.interrupted
        self.interrupt.requested |= interrupted
        self._spent_s += time.perf_counter() - began
        after = list(candidates)
        for i, measurement in zip(chosen, measurements(results), strict=True):
            if measurement.counts:
                after[i] = replace(candidates[i], measurement=measurement)
        return after


def _run_s(steps_s: Sequence[float], rounds: int) -> float:
    """Return about how long runs of steps take, with the start and the uncounted runs."""
    return STARTING_S + sum(UNCOUNTED_RUNS * step_s + rounds * turn_s(step_s) for step_s in steps_s)


def _placements_that_ran(candidates: Sequence[Candidate]) -> list[Candidate]:
    ran = [each for each in candidates if each.measurement is not None and not each.eliminated]
    return [each for each in ran if not (each.is_single or each.is_unplaced)]


def _joined(candidate: Candidate, again: Candidate) -> Candidate:
    """Return a candidate with the runs of both."""
    first, second = candidate.measurement, again.measurement
    if first is None or second is None:
        return again if first is None else candidate
    return replace(candidate, measurement=first.joined(second))
