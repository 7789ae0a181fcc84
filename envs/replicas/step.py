"""The step of R replicas of a placement, whose gradients are reduced over all of them.

Every replica runs the placement on devices of its own; slot k is the k-th device of each. The
devices of a slot reduce its gradients, bucket by bucket, during the backward pass. A gradient is
ready when the last op that contributes to it has ended (with micro-batches, in the last of them)
and it has been sent to the device of its parameters; at the latest at the end of the step of one
replica, which excludes transfers that no op waits for. On pinned cores all gradients are ready at
the end of the backward pass, and slot 0 stands for the process of the replica that reduces them.
The optimizer runs after the reductions, even where a device would have had time for updates before:
all updates of a slot come after the pass and after its last bucket,

    T = max(step alone, max over slots k of end of last bucket + updates).

On pinned cores the process of the replica makes all updates, one after the other.

The model ignores contention between reductions and transfers within a replica, and between
reductions and ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from envs.collectives import AllReduce, Level
from envs.placement import Placement
from envs.problem import NO_QUEUE, Problem, nanoseconds
from envs.replicas.buckets import Buckets, buckets_of, busiest_ns, reduced_ns, serial_ns
from envs.replicas.topology import levels_of
from envs.replication import Replication
from envs.runtime import reduces_in_backward
from envs.simulator import Schedule, Simulator
from envs.simulator.micro_batches import OPTIMIZER, Pipeline
from graphs.gradients import Gradients, gradients_of
from graphs.graph import frozen

LONGEST_NS: Final = 1 << 53
"""Limit on the duration of a reduction, 104 days, so that sums stay within 63 bits."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplicaStep:
    """The simulated step of one replica: P gradients, D slots."""

    step_ns: int  # the pass, then all updates
    pass_ns: int  # end of the last op that is not an update
    slot: NDArray[np.int32]  # (P,) the device that holds the gradient
    size_bytes: NDArray[np.int64]  # (P,)
    ready_ns: NDArray[np.int64]  # (P,)
    update_ns: NDArray[np.int64]  # (D,) sum of the updates of a slot
    trained_bytes: NDArray[np.int64]  # (D,) parameters with a gradient
    peak_bytes: NDArray[np.int64]  # (D,)

    @classmethod
    def of(
        cls, problem: Problem, placement: Placement, gradients: Gradients | None = None
    ) -> ReplicaStep:
        """Simulate a placement once, see :meth:`ReplicaSimulator.step`."""
        return ReplicaSimulator(problem, gradients).step(placement)


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
        """Simulate the step of a replica with this placement.

        Raises:
            ValueError: it is not for this problem, or infeasible; says why.
        """
        problem, gradients = self.problem, self.gradients
        placement.check(problem.graph, problem.cluster)
        schedule, is_update, end_ns = self._run(placement)
        where = np.array(placement.devices, np.int32)
        rows = zip(
            gradients.home.tolist(), gradients.size_bytes.tolist(), gradients.makers, strict=True
        )
        ready = [_ready_ns(problem, where, end_ns, *row) for row in rows]
        ready_ns = np.minimum(np.array(ready, np.int64), schedule.step_ns)
        slot = where[gradients.home]
        pass_ns = int(schedule.end_ns[~is_update].max(initial=0))
        spent_ns = (schedule.end_ns - schedule.start_ns)[is_update]
        update_ns = _by_device(problem, schedule.devices[is_update], spent_ns)
        if not self.overlaps:
            slot, ready_ns = np.zeros_like(slot), np.full_like(ready_ns, pass_ns)
            update_ns[:] = update_ns.sum()
        last_ns = max(pass_ns, int(ready_ns.max(initial=0)))
        return ReplicaStep(
            step_ns=max(schedule.step_ns, last_ns + int(update_ns.max())),
            pass_ns=pass_ns,
            slot=frozen(slot),
            size_bytes=gradients.size_bytes,
            ready_ns=frozen(ready_ns),
            update_ns=frozen(update_ns),
            trained_bytes=frozen(_by_device(problem, slot, gradients.size_bytes)),
            peak_bytes=frozen(schedule.peak_bytes),
        )

    def _run(self, placement: Placement) -> tuple[Schedule, NDArray[np.bool_], NDArray[np.int64]]:
        # The schedule, a mask of its update ops, and the end of the last copy of each op.
        key = placement.micro_batches, placement.in_flight
        if key not in self._simulators:
            self._simulators[key] = self._made(*key)
        simulator, pipeline = self._simulators[key]
        devices, priority = placement.arrays()
        if pipeline is not None:
            devices, priority = pipeline.devices(devices), pipeline.priority(priority)
        is_update = simulator.problem.graph.phase == OPTIMIZER
        priority = np.where(is_update, priority - np.ptp(priority) - 1, priority)
        schedule = simulator.run(devices, priority, transfers=False)
        if not schedule.feasible:
            raise ValueError(schedule.why)
        if pipeline is None:
            return schedule, is_update, schedule.end_ns
        end_ns = np.zeros(self.problem.op_count, np.int64)
        copies = ~pipeline.is_gate
        np.maximum.at(end_ns, pipeline.origin[copies], schedule.end_ns[copies])
        return schedule, is_update, end_ns

    def _made(self, micro_batches: int, in_flight: int | None) -> tuple[Simulator, Pipeline | None]:
        if micro_batches == 1:
            return Simulator(self.problem), None
        pipeline = Pipeline.of(self.problem, micro_batches, in_flight=in_flight)
        return Simulator(pipeline.problem), pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotNetwork:
    """The network between the devices of one slot over all replicas."""

    levels: tuple[Level, ...]  # none for a single replica
    queues: frozenset[int]  # used by transfers between them

    def repeated(self, factor: int) -> SlotNetwork:
        """Return the network with ``factor`` times as many ranks at the outermost level."""
        *inner, outermost = self.levels
        larger = Level(
            ranks=outermost.ranks * factor,
            latency_s=outermost.latency_s,
            bandwidth_bytes_per_s=outermost.bandwidth_bytes_per_s,
            ports=outermost.ports,
        )
        return SlotNetwork(levels=(*inner, larger), queues=self.queues)


def slot_networks(problem: Problem, groups: Sequence[Sequence[int]]) -> tuple[SlotNetwork, ...]:
    """Return the networks of all slots, for replicas on these groups of equal size.

    Raises:
        ValueError: devices of one slot have no link.
    """
    return tuple(_slot_network(problem, devices) for devices in zip(*groups, strict=True))


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplicatedStep:
    """A step of several replicas; ``alone_s`` is the step of a single one.

    ``communication_s`` is the largest sum of reductions that share queues. Its part ``exposed_s``
    makes the step longer, ``hidden_s`` does not. The step is at most ``no_overlap_s`` and at least
    ``full_overlap_s``.
    """

    alone_s: float
    step_s: float
    communication_s: float
    full_overlap_s: float
    reductions: tuple[tuple[int, AllReduce], ...]  # (bytes, all-reduce) of each bucket
    buckets: Buckets
    end_ns: NDArray[np.int64]  # (B,) end of each reduction within the step

    @cached_property
    def exposed_s(self) -> float:
        """Time by which the step is longer than that of one replica."""
        return self.step_s - self.alone_s

    @cached_property
    def hidden_s(self) -> float:
        """Communication that overlaps with the step."""
        return max(0.0, round(self.communication_s - self.exposed_s, 12))

    @cached_property
    def no_overlap_s(self) -> float:
        """Step time if reductions started after everything else."""
        return self.alone_s + self.communication_s


def replicated(
    step: ReplicaStep,
    networks: Sequence[SlotNetwork],
    replication: Replication | None = None,
) -> ReplicatedStep:
    """Compute the step of all replicas from the step of one and the networks of its slots.

    Args:
        step: the step of one replica.
        networks: one per slot, see :func:`slot_networks`.
        replication: how gradients are accumulated and reduced; its number of replicas is not used.
    """
    how = replication or Replication()
    before_ns = (how.accumulate - 1) * step.pass_ns
    slots, sizes, ready = step.slot, step.size_bytes, step.ready_ns + before_ns
    if how.average_every > 1:
        slots = np.flatnonzero(step.trained_bytes).astype(np.int32)
        sizes, ready = step.trained_bytes[slots], np.zeros(len(slots), np.int64)
    joined = np.array([bool(network.levels) for network in networks], np.bool_)[slots]
    cap = how.bucket_bytes if how.average_every == 1 else np.iinfo(np.int64).max
    buckets = buckets_of(slots[joined], sizes[joined], ready[joined], cap_bytes=int(cap))
    cost = cache(how.all_reduce)
    reductions = tuple(
        (size, cost(size, networks[slot].levels))
        for slot, size in zip(buckets.slot.tolist(), buckets.size_bytes.tolist(), strict=True)
    )
    duration_ns = np.array(
        [nanoseconds(found.seconds, LONGEST_NS) for _, found in reductions], np.int64
    )
    queues = [network.queues for network in networks]
    end_ns = reduced_ns(buckets, duration_ns, queues)
    alone_ns = before_ns + step.step_ns
    if how.average_every > 1:
        exposed = int(end_ns.max(initial=0)) / how.average_every
        step_ns, communication_ns, full_ns = alone_ns + exposed, exposed, float(alone_ns)
    else:
        after_ns = end_ns + step.update_ns[buckets.slot]
        step_ns = float(max(alone_ns, int(after_ns.max(initial=0))))
        communication_ns = float(serial_ns(buckets, duration_ns, queues))
        full_ns = float(max(alone_ns, busiest_ns(buckets, duration_ns, queues)))
    return ReplicatedStep(
        alone_s=alone_ns / 1e9,
        step_s=step_ns / 1e9,
        communication_s=communication_ns / 1e9,
        full_overlap_s=full_ns / 1e9,
        reductions=reductions,
        buckets=buckets,
        end_ns=end_ns,
    )


def _ready_ns(
    problem: Problem,
    where: NDArray[np.int32],
    end_ns: NDArray[np.int64],
    home: int,
    size: int,
    makers: Sequence[int],
) -> int:
    return max(
        int(end_ns[maker])
        + (
            problem.transfer_ns(size, int(where[maker]), int(where[home]))
            if where[maker] != where[home]
            else 0
        )
        for maker in makers
    )


def _by_device(
    problem: Problem, devices: NDArray[np.int32], amount: NDArray[np.int64]
) -> NDArray[np.int64]:
    total = np.zeros(problem.device_count, np.int64)
    np.add.at(total, devices, amount)
    return total


def _slot_network(problem: Problem, devices: Sequence[int]) -> SlotNetwork:
    pairs = np.ix_(devices, devices)
    queues = {*problem.queue[pairs].ravel().tolist(), *problem.second_queue[pairs].ravel().tolist()}
    return SlotNetwork(levels=levels_of(problem, devices), queues=frozenset(queues - {NO_QUEUE}))
