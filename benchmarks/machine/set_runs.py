"""Runs of schedules in which ops take one core or both at once, beside the unplaced model.

Each core has a worker, and so has the set of both, whose ops run on two threads. A worker that
follows another one on a core waits for a value of it, so that an op of the set and ops of its cores
never run at the same time. Waiting workers poll before they sleep
(:data:`envs.executors.cores.compiled_list.SPIN_NS`), and so do the threads of the set, on cores
that others need by then: this is a part of what a change costs here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.steps.loops import rounds_of
from envs.executors.cores.arena import load_example
from envs.executors.cores.hand_over import HandOver
from envs.executors.cores.instruction_lists import Instruction, InstructionLists, updates_last
from envs.executors.cores.pool import WorkerPool
from envs.executors.process_settings import end_idle_threads
from envs.executors.unplaced import UnplacedModel
from envs.hardware.cluster import Device
from envs.hardware.discover import core_set, cores_of
from envs.measured import TimedStep, turn
from graphs.extract import Extraction
from graphs.extract.program import StepProgram
from graphs.workload import Workload, step_copy

BOTH: Final = 2
"""Index of the worker of both cores, after those of the cores."""
RECENT: Final = 40
"""A wait is for the smallest of so many values that were made last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The place of each op, a core or ``BOTH``, and all ops in order of their starts."""

    place: NDArray[np.int32]
    order: NDArray[np.int32]


class SetLists(InstructionLists):
    """Builds the lists of the workers of two cores and of the set of both."""

    def __init__(self, program: StepProgram, place: Sequence[int]) -> None:
        super().__init__(program, place, BOTH + 1)
        self._user: dict[int, int] = {}  # the worker of a core's last op
        self._made: list[list[int]] = [[] for _ in self.lists]

    def run(self, op: int) -> None:
        """Add an op after waits for the workers whose ops come before it on its cores."""
        device = self.devices[op]
        cores = range(BOTH) if device == BOTH else [device]
        for user in sorted({self._user.get(core, device) for core in cores} - {device}):
            self._wait(user, device)
        self._user.update(dict.fromkeys(cores, device))
        super().run(op)
        made = self.program.calls[self.call_of_op[op]].made
        self._made[device] += [value for value in made if self.program.values[value].root == value]

    def _wait(self, user: int, device: int) -> None:
        recent = self._made[user][-RECENT:]
        if not recent:
            raise ValueError("no op that the wait could be for has made a tensor")
        value = min(recent, key=lambda made: self.program.values[made].numel)
        self.send(value, user, (device,))
        self.receive(value, user, device)


class SetPool(WorkerPool):
    """Workers of two cores, and one of the set of both."""

    def _check_apart(self, devices: Sequence[Device]) -> None:
        """Leave out that every core belongs to one device: the lists see to it."""


def measured_s(
    extraction: Extraction, cores: Sequence[Device], plans: Mapping[str, Plan], rounds: int
) -> dict[str, float]:
    """Return the median seconds of each plan's turns, and of the "unplaced" model's.

    All have a turn in each round. Times of plans are those of ``placed.step``.
    """
    numbers = sorted(core for device in cores for core in cores_of(device.name))
    devices = [*cores, replace(cores[0], name=core_set(numbers))]
    unplaced, twin = step_copy(extraction.step), step_copy(extraction.step)
    model = UnplacedModel(replace(extraction, step=unplaced), numbers)
    turns = {"unplaced": partial(_unplaced_turn, model, unplaced)}
    with ExitStack() as opened:
        pool = opened.enter_context(SetPool(extraction.program, devices))
        load_example(pool.arena, extraction.step)
        handed = HandOver(pool.arena, twin, extraction.outputs)
        handed.share()
        for name, plan in plans.items():
            number = pool.load(lists_of(extraction.program, plan))
            turns[name] = partial(turn, partial(_placed_step, handed, twin, pool, number))
        rounds_s = rounds_of(list(turns.values()), rounds)
    medians_s = map(statistics.median, zip(*rounds_s, strict=True))
    return dict(zip(turns, medians_s, strict=True))


def lists_of(program: StepProgram, plan: Plan) -> list[list[Instruction]]:
    """Return the instruction lists of both cores and of the set."""
    order = updates_last(program, plan.order.tolist())
    return SetLists(program, plan.place.tolist()).build(order)


def _placed_step(handed: HandOver, step: Workload, pool: WorkerPool, number: int) -> TimedStep:
    step.model.zero_grad()
    start_s = time.perf_counter()
    handed.step(lambda: pool.run(number), step.step_inputs, step.keywords)
    return TimedStep(wall_s=time.perf_counter() - start_s)


def _unplaced_turn(model: UnplacedModel, step: Workload) -> TimedStep:
    def once() -> TimedStep:
        step.model.zero_grad()
        start_s = time.perf_counter()
        model.step(*step.step_inputs, **step.keywords)
        return TimedStep(wall_s=time.perf_counter() - start_s)

    done = turn(once)
    end_idle_threads()
    return done
