"""The answer of ``placer.optimize`` for a model, ready to be measured again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from benchmarks.steps.models import MODELS
from envs.backend import StepResult
from envs.hardware.discover import discover
from envs.measured import Failure, LoadedStep, TimedStep
from envs.placement import Placement
from envs.problem import Problem
from envs.runtime import Runtime, costed_problem, runtime_for
from graphs.extract import Extraction
from placer.api import optimize
from placer.result import Result
from placer.search.candidate import Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result for one model, and the problem of its cores, whatever was chosen."""

    name: str
    result: Result
    extraction: Extraction
    runtime: Runtime
    problem: Problem

    @property
    def placed(self) -> Candidate:
        """Return the fastest placement that was run, the answer itself if it places the model."""
        result = self.result
        if not result.best.is_unplaced:
            return result.best
        ran = [
            each
            for each in result.candidates
            if each.measurement is not None
            and each.can_run
            and not (each.is_unplaced or each.eliminated)
        ]
        return min(ran, key=result.step_s)

    @property
    def unplaced(self) -> Candidate:
        """Return the unplaced model."""
        unplaced = self.result.unplaced
        if unplaced is None or not unplaced.can_run:
            raise RuntimeError(f"{self.name} was not run unplaced: two cores are needed")
        return unplaced

    @property
    def one_core(self) -> Candidate:
        """Return the placement of all ops on one core, which need not have been run."""
        return next(each for each in self.result.candidates if each.is_single)

    def measured(
        self, placements: Sequence[Placement], step_s: float, rounds: int | None = None
    ) -> list[StepResult]:
        """Run placements in new workers, by default as often as ``optimize`` does."""
        with self.runtime.backend(self.problem, [step_s], rounds=rounds) as backend:
            results = backend.evaluate(placements)
        for result in results:
            if not result.feasible:
                raise RuntimeError(f"a placement of {self.name} cannot run: {result.why}")
        return results

    @contextmanager
    def turns(self, placements: Sequence[Placement]) -> Iterator[list[Callable[[], TimedStep]]]:
        """Load placements in new workers; give a function for each that measures a turn of it."""
        with self.runtime.backend(self.problem, rounds=1) as backend, ExitStack() as loaded:
            steps = [backend.executor.load(placement) for placement in placements]
            for step in steps:
                if not isinstance(step, Failure):
                    loaded.callback(step.close)
            yield [partial(self._turn, step) for step in steps]

    def _turn(self, step: LoadedStep | Failure) -> TimedStep:
        """Measure a turn of a step.

        Raises:
            RuntimeError: it cannot run.
        """
        done = step if isinstance(step, Failure) else step.run()
        if isinstance(done, Failure):
            raise RuntimeError(f"a placement of {self.name} cannot run: {done.reason}")
        return done


class Answers:
    """The answers of searches with one budget; the last one is kept."""

    def __init__(self, budget: str) -> None:
        self.budget = budget
        self._last: Answer | None = None

    def of(self, name: str) -> Answer:
        """Return the answer for a model.

        Raises:
            PlacementError: every candidate failed when it was run.
        """
        if self._last is None or self._last.name != name:
            self._last = None  # its memory is free for the next one
            self._last = self._made(name)
        return self._last

    def _made(self, name: str) -> Answer:
        devices = ",".join(f"core:{core}" for core in sorted(os.sched_getaffinity(0))[:2])
        result = optimize(MODELS[name](), devices=devices, budget=self.budget, progress=False)
        extraction = result.extraction
        assert extraction is not None, "it was extracted from a model"
        cluster = discover(devices)
        runtime = runtime_for(extraction, cluster)
        is_placed = not result.best.is_unplaced
        problem = result.problem if is_placed else costed_problem(runtime, cluster)
        return Answer(
            name=name, result=result, extraction=extraction, runtime=runtime, problem=problem
        )
