"""The backend that runs placements on real devices, and times them in interleaved rounds.

In each round every candidate has a turn, and each round starts with another one, so that neither
changes of the machine's load nor the position in a round favours one of them; each is judged by the
median of its turns. Besides the wall time, the CPU-clock time of a step counts where devices have
CPU clocks. Their ratio is the contention: above ``CONTENDED`` other processes used the cores, and
the CPU-clock time is more accurate. How a step is run is up to an :class:`Executor`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import numpy as np

from envs.backend import ProgressCallback, StepResult
from envs.hardware.cluster import Cluster
from envs.measurement import Measurement, MemoryExcess, contended, larger
from envs.placement import Placement
from envs.problem import Problem
from envs.simulator import Simulator

FEWEST_ROUNDS: Final = 3
TURN_S: Final = 0.06
"""Time of the counted steps of a turn."""
LONG_STEP_S: Final = 0.15
"""A step that takes so long is a turn, since what ran before hardly matters for it."""
STARTING_S: Final = 0.8
"""Time in which workers start and get the example."""
UNCOUNTED_RUNS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """The time of a step, or of a turn of several, and the peak memory of devices that report it.

    ``cpu_clock_s`` is None where there is no CPU clock. ``reserved_memory_bytes`` are peaks with
    the gaps between tensors, see :class:`envs.measurement.Measurement`.
    """

    wall_s: float
    cpu_clock_s: float | None = None
    peak_memory_bytes: Mapping[str, int] = field(default_factory=dict)
    reserved_memory_bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The reason why a step cannot be run; ``overfull`` if memory did not suffice."""

    reason: str
    overfull: bool = False
    excess: MemoryExcess | None = None
    peak_memory_bytes: Mapping[str, int] = field(default_factory=dict)
    reserved_memory_bytes: Mapping[str, int] = field(default_factory=dict)


class DevicesLostError(RuntimeError):
    """No placement can be run any more."""


class LoadedStep(Protocol):
    """A step that devices are ready to run."""

    def warm_up(self) -> Failure | None:
        """Run it, uncounted, as often as turns need that count; return why it cannot be run."""
        ...

    def run(self) -> TimedStep | Failure:
        """Run it, as often as its turn in a round takes."""
        ...

    def close(self) -> None:
        """Release what it holds."""
        ...


class Executor(Protocol):
    """Runs the placed steps of one problem on its devices.

    Placements may also be on the one device of ``joined``, all devices together, if there is one.
    """

    problem: Problem
    joined: Cluster | None

    def load(self, placement: Placement) -> LoadedStep | Failure:
        """Return the step as placed, or why it cannot be run."""
        ...

    def close(self) -> None:
        """Release the devices."""
        ...


class Measured:
    """Times placements on the devices of an executor. Use as a context manager.

    ``interrupted`` tells whether Ctrl-C ended the last evaluation early.

    Args:
        executor: runs the steps; it is closed with the backend.
        rounds: counted turns of every candidate.
        warm_up: uncounted rounds.
        seconds: wall time of an evaluation: after ``FEWEST_ROUNDS`` no round begins that would end
            later if it took as long as the round before.
        clock: returns the wall time in seconds.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        rounds: int = 7,
        warm_up: int = 1,
        seconds: float = math.inf,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.executor = executor
        self.problem = executor.problem
        self.rounds = rounds
        self.warm_up = warm_up
        self.seconds = seconds
        self._clock = clock
        self.interrupted = False
        self._simulator = Simulator(self.problem)

    def __enter__(self) -> Measured:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the devices."""
        self.executor.close()

    def evaluate(
        self, placements: Sequence[Placement], progress: ProgressCallback | None = None
    ) -> list[StepResult]:
        """Run placements in turn, at most ``rounds`` times each after the warm-up.

        ``progress`` is called with (runs done, total runs). A placement that cannot be run, or that
        belongs to another graph or cluster, is recorded as a failure; the others continue. If the
        devices are lost, the rounds completed so far count, and placements without a completed run
        are failures. Ctrl-C also ends the measurement early: ``interrupted`` is set, and incomplete
        rounds do not count.
        """
        end_s = self._clock() + self.seconds
        with ExitStack() as loaded:
            steps = [self._loaded(placement) for placement in placements]
            for step in steps:
                if not isinstance(step, Failure):
                    loaded.callback(step.close)
            runs = self._run_rounds(steps, end_s, progress)
        complete = min((len(each.steps) for each in runs if not each.failure), default=self.rounds)
        measurements = [each.measurement(complete) for each in runs]
        is_contended = contended(measurements)
        return [
            StepResult.of_measurement(
                measurement,
                self._simulated_peaks(placement) if measurement.ok else {},
                contended=is_contended,
            )
            for placement, measurement in zip(placements, measurements, strict=True)
        ]

    def _simulated_peaks(self, placement: Placement) -> dict[str, int]:
        if placement.device_names != self.problem.cluster.names:
            return {}
        return simulated_peaks(self._simulator, placement)

    def _cluster_of(self, placement: Placement) -> Cluster:
        joined = self.executor.joined
        if joined is not None and placement.device_names == joined.names:
            return joined
        return self.problem.cluster

    def _loaded(self, placement: Placement) -> LoadedStep | Failure:
        try:
            placement.check(self.problem.graph, self._cluster_of(placement))
        except ValueError as error:
            return Failure(reason=str(error))
        if placement.micro_batches != 1:
            count = placement.micro_batches
            return Failure(reason=f"whole steps are run, not {count} micro-batches")
        return self.executor.load(placement)

    def _run_rounds(
        self,
        steps: Sequence[LoadedStep | Failure],
        end_s: float,
        progress: ProgressCallback | None,
    ) -> list[_Runs]:
        """Run steps in turn, until all rounds are done or time, Ctrl-C or lost devices end it."""
        runs = [_Runs(step) for step in steps]
        rounds, round_s = self.warm_up + self.rounds, 0.0
        self.interrupted = False
        try:
            for number in range(rounds):
                began_s = self._clock()
                if number >= self.warm_up + FEWEST_ROUNDS and began_s + round_s > end_s:
                    break
                for turn in range(len(runs)):
                    runs[(turn + number) % len(runs)].run(counted=number >= self.warm_up)
                    if progress is not None:
                        progress(number * len(runs) + turn + 1, rounds * len(runs))
                round_s = self._clock() - began_s
        except KeyboardInterrupt:
            self.interrupted = True
        except DevicesLostError as error:
            for each in runs:
                if not each.failure and not each.steps:
                    each.failure = Failure(reason=str(error))
        return runs


def turn(run: Callable[[], TimedStep]) -> TimedStep:
    """Run steps for a turn; return their median time.

    The first step, which finds the caches as another candidate left them, does not count, so that
    each is measured as in a loop. A step of ``LONG_STEP_S`` or more is a turn by itself.
    """
    steps = [run()]
    if steps[0].wall_s >= LONG_STEP_S:
        return steps[0]
    steps = [run()]
    while sum(step.wall_s for step in steps) < TURN_S:
        steps.append(run())
    clocks_s = [step.wall_s if step.cpu_clock_s is None else step.cpu_clock_s for step in steps]
    return replace(
        steps[-1],
        wall_s=float(np.median([step.wall_s for step in steps])),
        cpu_clock_s=None if steps[-1].cpu_clock_s is None else float(np.median(clocks_s)),
    )


def turn_s(step_s: float) -> float:
    """Return the seconds of a turn of steps of this length."""
    return step_s if step_s >= LONG_STEP_S else step_s + max(step_s, TURN_S)


def runs_s(steps_s: Sequence[float], rounds: int) -> float:
    """Return about how long runs of steps take, with the start and the uncounted runs."""
    return STARTING_S + sum(UNCOUNTED_RUNS * step_s + rounds * turn_s(step_s) for step_s in steps_s)


class _Runs:
    """The counted turns of one candidate, or the reason why it cannot be run."""

    def __init__(self, step: LoadedStep | Failure) -> None:
        self.step = step
        self.failure = step if isinstance(step, Failure) else None
        self.steps: list[TimedStep] = []
        self.peak_memory_bytes: dict[str, int] = {}
        self.reserved_memory_bytes: dict[str, int] = {}

    def run(self, *, counted: bool) -> None:
        """Run it once, unless it failed before."""
        if self.failure or isinstance(self.step, Failure):
            return
        done = self.step.run() if counted else self.step.warm_up()
        if isinstance(done, Failure):
            self.failure = done
        elif done is not None:
            self.steps.append(done)
        else:
            return
        self.peak_memory_bytes = larger(self.peak_memory_bytes, done.peak_memory_bytes)
        self.reserved_memory_bytes = larger(self.reserved_memory_bytes, done.reserved_memory_bytes)

    def measurement(self, rounds: int) -> Measurement:
        steps, failure = self.steps[:rounds], self.failure or Failure(reason="")
        return Measurement(
            wall_s=np.array([step.wall_s for step in steps]),
            cpu_clock_s=np.array([step.cpu_clock_s or step.wall_s for step in steps]),
            failure=failure.reason,
            peak_memory_bytes=self.peak_memory_bytes,
            reserved_memory_bytes=self.reserved_memory_bytes,
            overfull=failure.overfull,
            excess=failure.excess,
        )


def simulated_peaks(simulator: Simulator, placement: Placement) -> dict[str, int]:
    """Return the simulated peak memory in bytes by device name; {} if the step is too long."""
    try:
        peaks = simulator.run(*placement.arrays()).peak_bytes.tolist()
    except ValueError:  # a step longer than the simulator counts
        return {}
    return dict(zip(simulator.problem.cluster.names, peaks, strict=True))
