"""A machine on which placements take set times, and candidates to run on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envs.backend import StepResult
from envs.hardware.cluster import Device
from envs.measurement import Measurement
from envs.placement import Placement
from envs.problem import Problem, toy_problem
from placer.search.candidate import Candidate, Kind, Prediction

SINGLE, HEFT, ANNEALING, POLICY = Kind.SINGLE_DEVICE, Kind.HEFT, Kind.ANNEALING, Kind.POLICY
PROBLEM = toy_problem()
COUNT = PROBLEM.op_count
DEVICES = {
    SINGLE: np.zeros(COUNT, np.int32),
    HEFT: np.arange(COUNT, dtype=np.int32) % 2,
    ANNEALING: (np.arange(COUNT, dtype=np.int32) // 2) % 2,
    POLICY: (np.arange(COUNT, dtype=np.int32) // 3) % 2,
}
KIND_OF = {devices.tobytes(): kind for kind, devices in DEVICES.items()}
FIRST_S = {SINGLE: 2.0, HEFT: 1.2, ANNEALING: 1.0, POLICY: 1.4}
JOINED = Device(name="core:0-1", kind="core", memory_bytes=1 << 34)
AGAIN_S = {SINGLE: 2.0, ANNEALING: 1.3}


class Machine:
    """A runtime on which placements take other set times whenever it starts workers."""

    def __init__(
        self,
        *times_s: Mapping[Kind, float],
        error: Exception | None = None,
        busy: bool = False,
        fails: Kind | None = None,
        done: Sequence[int] = (),
    ) -> None:
        self.times_s = times_s
        self.done = done  # rounds that each start has time for
        self.error = error
        self.busy = busy
        self.fails = fails
        self.rounds: list[int] = []
        self.seconds: list[float] = []
        self.interrupted = False

    def final_rounds(self, step_s: Sequence[float]) -> int:
        return 10

    def backend(
        self, problem: Problem, predicted_s: Sequence[float], rounds: int | None, seconds: float
    ) -> Workers:
        assert problem is PROBLEM
        is_final = bool(self.rounds)
        self.rounds.append(rounds or 3)
        self.seconds.append(seconds)
        done = self.done[len(self.rounds) - 1] if self.done else self.rounds[-1]
        if is_final and self.error is not None:
            raise self.error
        return Workers(
            self.times_s[min(len(self.rounds), len(self.times_s)) - 1],
            done,
            interrupted=self.interrupted,
            clock=1.5 if is_final and self.busy else 1.0,
            fails=self.fails if is_final else None,
        )


class Workers:
    def __init__(
        self,
        times_s: Mapping[Kind, float],
        rounds: int,
        *,
        interrupted: bool,
        clock: float,
        fails: Kind | None,
    ) -> None:
        self.times_s = times_s
        self.rounds = rounds
        self.interrupted = interrupted
        self.clock = clock
        self.fails = fails

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def evaluate(self, placements: Sequence[Placement], progress: Any) -> list[StepResult]:
        results = []
        for placement in placements:
            kind = KIND_OF[placement.arrays()[0].astype(np.int32).tobytes()]
            runs_s = self.times_s[kind] * np.linspace(0.999, 1.001, self.rounds)
            failure = "the worker died" if kind is self.fails else ""
            runs = Measurement(wall_s=runs_s, cpu_clock_s=runs_s / self.clock, failure=failure)
            results.append(StepResult.of_measurement(runs, {}))
        return results


def candidates() -> list[Candidate]:
    priority = -np.arange(COUNT, dtype=float)
    return [
        Candidate(
            kind=kind,
            name=kind.value,
            devices=devices,
            priority=priority,
            step_ns=0,
            prediction=Prediction(
                placement=Placement.of(PROBLEM.graph, PROBLEM.cluster, devices, priority),
                objective_s=FIRST_S[kind],
                peak_memory_bytes={},
            ),
        )
        for kind, devices in DEVICES.items()
    ]
