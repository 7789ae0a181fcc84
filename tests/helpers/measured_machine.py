"""Devices whose step times differ from the simulated ones, here and on nodes of a Ray cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from numpy.typing import NDArray

from envs.backend import StepResult
from envs.measurement import Measurement
from envs.placement import Placement
from envs.problem import Problem
from envs.simulator import Simulator
from envs.simulator.schedule import issue_order
from placer.ray_cluster.node_step import Runs

HANGS = "hangs"
"""File that is written when a step hangs."""


class Machine:
    """A backend whose devices are slower than simulated, by a factor each, with some noise."""

    interrupted = False

    def __init__(self, problem: Problem, factors: Sequence[float], noise: float = 1e-3) -> None:
        slower = np.rint(problem.cost_ns * np.array(factors)).astype(np.int64)
        self.simulator = Simulator(replace(problem, cost_ns=slower), memory=False)
        self.noise = noise
        self.broken = False
        self.spoilt: Callable[[Placement], bool] = lambda _: False
        self.times_spoilt: Callable[[NDArray[np.float64]], NDArray[np.float64]] | None = None
        self.batches: list[int] = []
        self.rng = np.random.default_rng(0)

    def evaluate(self, placements: Sequence[Placement], progress: Any = None) -> list[StepResult]:
        """Return nine rounds of each."""
        self.batches.append(len(placements))
        spoilt = [self.spoilt(own) for own in placements]
        if self.broken or (any(spoilt) and self.times_spoilt is None):
            nothing = np.array([])
            failed = Measurement(wall_s=nothing, cpu_clock_s=nothing, failure="it died")
            return [StepResult.of_measurement(failed, {})] * len(placements)
        steps = [self.simulator.step_ns(*own.arrays())[0] / 1e9 for own in placements]
        runs = [step * self.rng.normal(1.0, self.noise, 9) for step in steps]
        if self.times_spoilt is not None:
            runs = [
                self.times_spoilt(run) if bad else run
                for run, bad in zip(runs, spoilt, strict=True)
            ]
        return [
            StepResult.of_measurement(Measurement(wall_s=run, cpu_clock_s=run), {}) for run in runs
        ]

    def close(self) -> None:
        """Do nothing."""


class Order:
    """The order of ops on such a machine."""

    order = staticmethod(issue_order)


@dataclass(frozen=True)
class TimedStep:
    """A step whose times have no noise; on the doomed node it hangs ``after`` so many groups."""

    problem: Problem
    factors: tuple[float, ...]
    folder: Path
    doomed: str = ""
    after: int = 1  # groups that have run on all nodes

    def loaded(self, names: Sequence[str]) -> Timed:
        assert len(names) == len(self.factors)
        return Timed(self)


class Timed:
    """The step in a process of a node."""

    def __init__(self, step: TimedStep) -> None:
        self.step = step
        self.machine = Machine(step.problem, step.factors, noise=0.0)

    def measure(self, placements: Sequence[Placement], runs: Runs) -> list[Measurement]:
        """Run placements, or wait to be killed."""
        ray: Any = pytest.importorskip("ray")
        folder, own = self.step.folder, ray.get_runtime_context().get_node_id()
        if own == self.step.doomed and len([*folder.glob("group-*")]) >= self.step.after:
            (folder / HANGS).touch()
            time.sleep(600.0)
        results = self.machine.evaluate(placements)
        (folder / f"group-{uuid4()}").touch()
        return [each.measurement for each in results if each.measurement is not None]

    def close(self) -> None:
        """Do nothing."""
