"""The simulator for arrays of placements, and the simulated backend."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from typing import Final

import numpy as np

from envs.backend import ProgressCallback, StepResult
from envs.placement import Placement
from envs.problem import HORIZON_NS, Floats, Ints, Longs, Problem, device_rows, priority_rows
from envs.simulator.kernel.arrays import (
    IGNORE_MEMORY,
    INFEASIBLE_NS,
    NO_LIMIT_NS,
    RECORD_MEMORY,
    SENT,
    STOP_WHEN_FULL,
    Workspace,
)
from envs.simulator.kernel.step import simulate_batch
from envs.simulator.kernel.tables import arrays_of, workspace_for
from envs.simulator.micro_batches import Pipeline
from envs.simulator.reasons import blocked_reason, overfull_reason
from envs.simulator.schedule import Schedule, Transfers, busy_ns, in_nanoseconds
from envs.simulator.time_units import LARGEST_UNIT_NS, in_units, unit_for

BLOCKS_PER_THREAD: Final = 32
"""Average number of blocks of a batch per thread: some placements take longer than others."""


class Simulator:
    """Simulates placements of one problem. Not thread-safe: make one for each thread.

    With ``memory`` False, no placement is infeasible for want of memory, and simulation is faster.
    A batch is spread over ``threads`` threads, each with a workspace of its own; the results are
    the same. Batches of less than about a millisecond of work get no faster.

    Every placement is simulated from the start. After a change only what happened before it could
    be reused, half on average, at the price of storing states; stopping at a limit, as
    :func:`simulate_core` does for searches, saves more. Loads are updated incrementally, see
    :mod:`envs.simulator.max_load`.

    Steps of 550 s and more are simulated again in longer units, see
    :mod:`envs.simulator.time_units`.
    """

    def __init__(self, problem: Problem, *, memory: bool = True, threads: int = 1) -> None:
        if threads < 1:
            raise ValueError(f"threads is {threads}, below 1")
        self.problem = problem
        self.memory = memory
        self.threads = threads
        self.arrays = arrays_of(problem)
        self.work = workspace_for(problem)
        self._works = [self.work]
        self._by_unit: dict[int, Simulator] = {}

    def step_ns(self, devices: Ints, priority: Floats) -> Longs:
        """Simulate a batch of placements and return their step times.

        Args:
            devices: (B, N) or (N,), device of every op.
            priority: the same shape; the ready op of highest priority runs first, ties by
                index.

        Returns:
            Nanoseconds (B,), B is 1 for (N,); ``INFEASIBLE_NS`` for a placement that does not
            fit into memory, has an op where it may not run, or needs a link that is not there.

        Raises:
            ValueError: a wrong shape, a device that does not exist, a priority that is not
                finite, or a step of 174 years and more.
        """
        devices, priority = self._checked(devices, priority)
        steps = np.empty(len(devices), np.int64)
        memory = STOP_WHEN_FULL if self.memory else IGNORE_MEMORY
        threads = min(self.threads, len(devices))
        if threads < 2:
            beyond = self._simulate(self.work, devices, priority, memory, steps)
        else:
            beyond = self._spread(devices, priority, memory, steps, threads)
        for row in sorted(beyond):
            rows = devices[row : row + 1], priority[row : row + 1]
            where = f"placement {row} of {len(devices)}: " if len(devices) > 1 else ""
            unit_ns, simulator = self._in_longer_units(*rows, where)
            steps[row] = simulator.step_ns(*rows)[0]
            if steps[row] != INFEASIBLE_NS:
                steps[row] *= unit_ns
        return steps

    def _simulate(
        self, work: Workspace, devices: Ints, priority: Floats, memory: int, steps: Longs
    ) -> list[int]:
        """Simulate all rows; return those that are beyond the horizon, without their steps."""
        beyond: list[int] = []
        first = 0
        while first < len(devices):
            rows = slice(first, None)
            stopped = simulate_batch(
                self.arrays, work, devices[rows], priority[rows], NO_LIMIT_NS, memory, steps[rows]
            )
            if stopped < 0:
                break
            beyond.append(first + stopped)
            first += stopped + 1
        return beyond

    def _in_longer_units(
        self, devices: Ints, priority: Floats, where: str = ""
    ) -> tuple[int, Simulator]:
        """Return the smallest unit that counts the step of a placement, (1, N) each.

        With it comes the simulator that counts in this unit.
        """
        cost_ns = self.problem.cost_ns[np.arange(self.problem.op_count), devices[0]]
        busy_ns = np.zeros(self.problem.device_count, np.int64)
        np.add.at(busy_ns, devices[0], cost_ns)
        unit_ns = max(unit_for(int(busy_ns.max())), 10)
        while unit_ns <= LARGEST_UNIT_NS:
            if unit_ns not in self._by_unit:
                longer = in_units(self.problem, unit_ns)
                self._by_unit[unit_ns] = Simulator(longer, memory=self.memory)
            simulator, steps = self._by_unit[unit_ns], np.empty(1, np.int64)
            if not simulator._simulate(simulator.work, devices, priority, RECORD_MEMORY, steps):
                return unit_ns, simulator
            unit_ns *= 10
        raise ValueError(where + _too_long(self.problem))

    def _spread(
        self, devices: Ints, priority: Floats, memory: int, steps: Longs, threads: int
    ) -> list[int]:
        """Simulate blocks on whichever thread is free; compiled code runs without the GIL."""
        while len(self._works) < threads:
            self._works.append(workspace_for(self.problem))
        size = max(len(devices) // (BLOCKS_PER_THREAD * threads), 1)
        blocks = iter(range(0, len(devices), size))

        def run(work: Workspace) -> list[int]:
            beyond = []
            for first in blocks:
                rows = slice(first, first + size)
                stopped = self._simulate(work, devices[rows], priority[rows], memory, steps[rows])
                beyond += [first + row for row in stopped]
            return beyond

        with ThreadPoolExecutor(threads) as pool:
            return list(chain.from_iterable(pool.map(run, self._works[:threads])))

    def run(self, devices: Ints, priority: Floats, *, transfers: bool = True) -> Schedule:
        """Simulate one placement, (N,) each; faster if its transfers are not listed.

        Raises:
            ValueError: as for :meth:`step_ns`.
        """
        devices, priority = self._checked(devices, priority)
        if len(devices) != 1:
            raise ValueError(f"run takes one placement, not {len(devices)}")
        where = devices[0].copy()  # a copy: the caller may change its array
        steps = np.empty(1, np.int64)
        if self._simulate(self.work, devices, priority, RECORD_MEMORY, steps):
            unit_ns, simulator = self._in_longer_units(devices, priority)
            schedule = simulator.run(devices, priority, transfers=transfers)
            blocked = schedule.step_ns == INFEASIBLE_NS
            return schedule if blocked else in_nanoseconds(schedule, unit_ns)
        start_ns, cause = self.work.start_ns.copy(), self.work.cause.copy()
        if self.problem.load is None:
            end_ns = start_ns + self.problem.cost_ns[np.arange(len(where)), where]
        else:
            end_ns = self.work.end_ns.copy()
        peak_bytes = self.work.devices["peak_bytes"].copy()
        sent = int(self.work.counts[SENT]) if transfers else 0
        if steps[0] == INFEASIBLE_NS:
            reason, sent = blocked_reason(self.problem, where), 0
            cause[:] = -1
            for array in (start_ns, end_ns, peak_bytes):
                array[:] = 0
        else:
            reason = overfull_reason(self.problem, where, peak_bytes) if self.memory else ""
        return Schedule(
            devices=where,
            step_ns=int(steps[0]),
            start_ns=start_ns,
            end_ns=end_ns,
            cause=cause,
            peak_bytes=peak_bytes,
            transfers=self._transfers(where, end_ns, sent),
            feasible=not reason,
            reason=reason,
            issued=self.work.issued.astype(np.int32) if self.problem.hosts is not None else None,
        )

    def _checked(self, devices: Ints, priority: Floats) -> tuple[Ints, Floats]:
        shapes = np.shape(devices), np.shape(priority)
        if shapes[0] != shapes[1]:
            raise ValueError(f"devices {shapes[0]} and priority {shapes[1]} differ in shape")
        return device_rows(self.problem, devices), priority_rows(self.problem, priority)

    def _transfers(self, devices: Ints, end_ns: Longs, count: int) -> Transfers:
        work, arrays = self.work, self.arrays
        edge = work.sent[:count].astype(np.int32)
        producer = arrays.edges["source"][edge].astype(np.int32)
        destination = devices[arrays.edges["target"][edge]]
        sent = work.transfers[edge]
        order = np.lexsort((edge, destination, producer, sent["start_ns"]))
        producer, destination, sent = producer[order], destination[order], sent[order]
        return Transfers(
            edge=edge[order],
            producer=producer,
            source=devices[producer],
            destination=destination,
            request_ns=end_ns[producer],
            start_ns=sent["start_ns"],
            end_ns=sent["start_ns"] + sent["duration_ns"],
            bytes=work.copies["size"][len(devices) + edge[order]],
        )


class Simulated:
    """The simulated backend: deterministic, and the same on every machine.

    ``parts`` of a result are ``compute``, the ops of the critical chain, and ``transfer``, its
    transfers and waits for their links, or for the thread of a host, and, where workers run the
    step, ``hand_over``; they add up to the step.

    A placement in m micro-batches is a step that runs the graph m times, see
    :mod:`envs.simulator.micro_batches`. Its period is (step of 2 m - step of m) / m: filling and
    draining the pipeline cost both the same, while the end of a single step would show the drain
    alone. With few micro-batches the two steps may still fill it differently. The period is
    therefore never less than the work of the busiest device or link for a further micro-batch,
    which no steady state can undercut; the optimizer, which runs once per step, is no part of it.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.simulator = Simulator(problem)
        self._pipelines: dict[tuple[int, int | None], tuple[Pipeline, Simulator]] = {}

    def evaluate(
        self, placements: Sequence[Placement], progress: ProgressCallback | None = None
    ) -> list[StepResult]:
        """Evaluate every placement, in order; one that is not for this problem is infeasible."""
        results = []
        for placement in placements:
            try:
                results.append(self.result(placement)[0])
            except ValueError as error:
                results.append(StepResult.infeasible(str(error), {}))
        if progress is not None:
            progress(len(placements), len(placements))
        return results

    def run(self, placement: Placement) -> tuple[Problem, Schedule]:
        """Simulate a placement; return its problem (of all micro-batches, if several) and schedule.

        Raises:
            ValueError: the placement is not for this problem, or as for :meth:`Simulator.run`.
        """
        return self._run(placement, transfers=True)

    def _run(self, placement: Placement, *, transfers: bool) -> tuple[Problem, Schedule]:
        placement.check(self.problem.graph, self.problem.cluster)
        if placement.micro_batches == 1:
            schedule = self.simulator.run(*placement.arrays(), transfers=transfers)
            return self.problem, schedule
        pipeline, simulator = self._pipelined(placement.micro_batches, placement.in_flight)
        devices, priority = placement.arrays()
        schedule = simulator.run(pipeline.devices(devices), pipeline.priority(priority))
        return pipeline.problem, schedule

    def _pipelined(self, micro_batches: int, in_flight: int | None) -> tuple[Pipeline, Simulator]:
        key = (micro_batches, in_flight)
        if key not in self._pipelines:
            pipeline = Pipeline(self.problem, micro_batches, in_flight=in_flight)
            self._pipelines[key] = pipeline, Simulator(pipeline.problem)
        return self._pipelines[key]

    def result(
        self, placement: Placement, schedule: Schedule | None = None
    ) -> tuple[StepResult, Schedule]:
        """Return the result of a placement and its schedule.

        A known ``schedule``, of a placement without micro-batches, is not simulated again.
        """
        problem = self.problem
        if schedule is None:
            problem, schedule = self._run(placement, transfers=placement.micro_batches > 1)
        peaks = dict(zip(problem.cluster.names, schedule.peak_bytes.tolist(), strict=True))
        if not schedule.feasible:
            return StepResult.infeasible(schedule.reason, peaks), schedule
        critical = schedule.critical_chain()
        compute_ns = int((schedule.end_ns - schedule.start_ns)[critical].sum())
        hand_over_s = problem.graph.hand_over_s
        period_s, no_period_reason = self._period_s(placement, problem, schedule)
        step = StepResult(
            step_s=schedule.step_ns / 1e9 + hand_over_s,
            peak_memory_bytes=peaks,
            parts={
                "compute": compute_ns / 1e9,
                "transfer": (schedule.step_ns - compute_ns) / 1e9,
                **({"hand_over": hand_over_s} if hand_over_s else {}),
            },
            period_s=period_s,
            no_period_reason=no_period_reason,
        )
        return step, schedule

    def _period_s(
        self, placement: Placement, problem: Problem, schedule: Schedule
    ) -> tuple[float | None, str]:
        """Return the period, or None and the reason why there is none."""
        m = placement.micro_batches
        if m == 1:
            return None, ""
        try:
            doubled, twice = self.run(replace(placement, micro_batches=2 * m))
        except ValueError as error:
            return None, f"{2 * m} micro-batches cannot be simulated: {error}"
        if INFEASIBLE_NS in (schedule.step_ns, twice.step_ns):
            return None, f"{2 * m} micro-batches cannot run: {twice.reason}"
        more_ns = busy_ns(doubled, twice) - busy_ns(problem, schedule)
        return max(twice.step_ns - schedule.step_ns, int(more_ns.max())) / m / 1e9, ""


def _too_long(problem: Problem) -> str:
    longest_s = HORIZON_NS * LARGEST_UNIT_NS / 1e9
    return (
        f"a step of {problem.graph.name!r} takes more than {longest_s:.2g} s, the most that the "
        "simulator counts; scale all costs and transfers down"
    )
