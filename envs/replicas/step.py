"""The simulated step of one replica: when its gradients are ready, and what its updates take.

A gradient is ready when the last op that contributes to it has ended (with micro-batches, in the
last of them) and it has been sent to the device of its parameters; at the latest at the end of the
step of one replica, which excludes transfers that no op waits for. On pinned cores all gradients
are ready at the end of the backward pass, and slot 0 stands for the process of the replica, which
reduces them and makes all updates, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from envs.placement import Placement
from envs.problem import Problem, nanoseconds
from envs.runtime import reduces_in_backward
from envs.simulator import Schedule, Simulator
from envs.simulator.micro_batches import OPTIMIZER, Pipeline
from graphs.gradients import Gradients, gradients_of
from graphs.graph import frozen


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplicaStep:
    """The simulated step of one replica: P gradients, D slots."""

    step_ns: int  # the pass, then all updates
    pass_ns: int  # end of the last op that is not an update
    slot: NDArray[np.int32]  # (P,) the device that holds the gradient
    size_bytes: NDArray[np.int64]  # (P,)
    ready_ns: NDArray[np.int64]  # (P,)
    update_ns: NDArray[np.int64]  # (D,) sum of the updates of a slot
    peak_bytes: NDArray[np.int64]  # (D,)


class ReplicaSimulator:
    """Simulates one replica for placements of a problem.

    ``gradients`` are derived from the graph by default.
    """

    def __init__(self, problem: Problem, gradients: Gradients | None = None) -> None:
        self.problem = problem
        self.gradients = gradients_of(problem.graph) if gradients is None else gradients
        self.overlaps = reduces_in_backward(problem.cluster)
        self._simulators: dict[tuple[int, int | None], tuple[Simulator, Pipeline | None]] = {}

    def step(self, placement: Placement) -> ReplicaStep:
        """Simulate the step of a replica with this placement."""
        problem, gradients = self.problem, self.gradients
        placement.check(problem.graph, problem.cluster)
        schedule, is_update, end_ns = self._run(placement)
        devices = np.array(placement.devices, np.int32)
        rows = zip(
            gradients.home.tolist(), gradients.size_bytes.tolist(), gradients.makers, strict=True
        )
        ready = [_ready_ns(problem, devices, end_ns, *row) for row in rows]
        ready_ns = np.minimum(np.array(ready, np.int64), schedule.step_ns)
        slot = devices[gradients.home]
        hand_over_ns = nanoseconds(problem.graph.hand_over_s)
        pass_ns = int(schedule.end_ns[~is_update].max(initial=0)) + hand_over_ns
        update_ns = np.zeros(problem.device_count, np.int64)
        durations_ns = schedule.end_ns - schedule.start_ns
        np.add.at(update_ns, schedule.devices[is_update], durations_ns[is_update])
        if not self.overlaps:
            slot, ready_ns = np.zeros_like(slot), np.full_like(ready_ns, pass_ns)
            update_ns[:] = update_ns.sum()
        last_ns = max(pass_ns, int(ready_ns.max(initial=0)))
        return ReplicaStep(
            step_ns=max(schedule.step_ns + hand_over_ns, last_ns + int(update_ns.max())),
            pass_ns=pass_ns,
            slot=frozen(slot),
            size_bytes=gradients.size_bytes,
            ready_ns=frozen(ready_ns),
            update_ns=frozen(update_ns),
            peak_bytes=frozen(schedule.peak_bytes),
        )

    def _run(self, placement: Placement) -> tuple[Schedule, NDArray[np.bool_], NDArray[np.int64]]:
        # The schedule, a mask of its update ops, and the end of the last copy of each op.
        simulator, pipeline = self._simulator(placement.micro_batches, placement.in_flight)
        devices, priority = placement.arrays()
        if pipeline is not None:
            devices, priority = pipeline.devices(devices), pipeline.priority(priority)
        is_update = simulator.problem.graph.phase == OPTIMIZER
        priority = np.where(is_update, priority - np.ptp(priority) - 1, priority)
        schedule = simulator.run(devices, priority, transfers=False)
        if not schedule.feasible:
            raise ValueError(schedule.reason)
        if pipeline is None:
            return schedule, is_update, schedule.end_ns
        end_ns = np.zeros(self.problem.op_count, np.int64)
        copies = ~pipeline.is_gate
        np.maximum.at(end_ns, pipeline.origin[copies], schedule.end_ns[copies])
        return schedule, is_update, end_ns

    def _simulator(
        self, micro_batches: int, in_flight: int | None
    ) -> tuple[Simulator, Pipeline | None]:
        key = micro_batches, in_flight
        if key not in self._simulators:
            if micro_batches == 1:
                self._simulators[key] = Simulator(self.problem), None
            else:
                pipeline = Pipeline(self.problem, micro_batches, in_flight=in_flight)
                self._simulators[key] = Simulator(pipeline.problem), pipeline
        return self._simulators[key]


def _ready_ns(
    problem: Problem,
    devices: NDArray[np.int32],
    end_ns: NDArray[np.int64],
    home: int,
    size_bytes: int,
    makers: Sequence[int],
) -> int:
    ready_ns = 0
    for maker in makers:
        source, destination = int(devices[maker]), int(devices[home])
        sent_ns = (
            problem.transfer_ns(size_bytes, source, destination) if source != destination else 0
        )
        ready_ns = max(ready_ns, int(end_ns[maker]) + sent_ns)
    return ready_ns
