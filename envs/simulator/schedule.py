"""The full schedule of one simulated step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from envs.hardware.link_tables import NO_QUEUE
from envs.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Transfers:
    """T transfers between devices, by start, then producer, destination and edge; all (T,)."""

    edge: NDArray[np.int32]  # first edge of the graph that it serves
    producer: NDArray[np.int32]  # op whose output is sent
    source: NDArray[np.int32]  # device
    destination: NDArray[np.int32]  # device
    request_ns: NDArray[np.int64]  # from here to start_ns it waits for its link
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    bytes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.producer)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """The schedule of one step of N ops on D devices; times are from the start of the step.

    A placement that does not fit into memory is not ``feasible``, yet has its times and peaks. One
    that cannot run at all (see ``reason``) has ``step_ns`` ``INFEASIBLE_NS``, times and peaks of 0,
    causes of -1 and no transfers.
    """

    devices: NDArray[np.int32]  # (N,)
    step_ns: int
    start_ns: NDArray[np.int64]  # (N,)
    end_ns: NDArray[np.int64]  # (N,)
    cause: NDArray[np.int32]  # (N,) the op that determined its start; -1 for a start at 0
    peak_bytes: NDArray[np.int64]  # (D,)
    transfers: Transfers
    feasible: bool
    reason: str = ""
    issued: NDArray[np.int32] | None = None  # (N,) with hosts: ops in the order of issue

    def critical_chain(self) -> list[int]:
        """Return ops from the start of the step to its end, each the cause of the next.

        Between two of them there is no gap, or a transfer (and what it waited for), or, with hosts,
        the time that their thread took to issue ops and copies.
        """
        cause = self.cause.tolist()
        i = int(np.argmax(self.end_ns))
        chain = [i]
        while (i := cause[i]) >= 0:
            chain.append(i)
        return chain[::-1]


def in_nanoseconds(schedule: Schedule, unit_ns: int) -> Schedule:
    """Return a schedule that was counted in units of ``unit_ns`` nanoseconds."""
    sent = schedule.transfers
    return replace(
        schedule,
        step_ns=schedule.step_ns * unit_ns,
        start_ns=schedule.start_ns * unit_ns,
        end_ns=schedule.end_ns * unit_ns,
        transfers=replace(
            sent,
            request_ns=sent.request_ns * unit_ns,
            start_ns=sent.start_ns * unit_ns,
            end_ns=sent.end_ns * unit_ns,
        ),
    )


def busy_ns(problem: Problem, schedule: Schedule) -> NDArray[np.int64]:
    """Return the nanoseconds that every device, then every queue, is occupied, (D + Q,)."""
    sent = schedule.transfers
    busy = np.zeros(problem.device_count + problem.queue_count + 1, np.int64)
    np.add.at(busy, schedule.devices, schedule.end_ns - schedule.start_ns)
    for queue in (problem.queue, problem.second_queue):  # the last entry is that of NO_QUEUE
        numbers = queue[sent.source, sent.destination]
        at = np.where(numbers == NO_QUEUE, len(busy) - 1, problem.device_count + numbers)
        np.add.at(busy, at, sent.end_ns - sent.start_ns)
    return busy[:-1]


def repeats(problem: Problem, schedule: Schedule, priority: NDArray[np.float64]) -> bool:
    """Return whether priorities (N,) are certain to give the same schedule.

    They are if they order the ops of each device by start, no two of which are the same, and no
    link serves transfers by priority. With hosts they are if they give the order of issue.
    """
    if schedule.issued is not None:
        return bool((np.diff(priority[schedule.issued]) < 0).all())
    if any(link.order == "priority" for link in problem.cluster.links):
        return False
    order = np.lexsort((-priority, schedule.devices))
    device, start_ns = schedule.devices[order], schedule.start_ns[order]
    return bool(((np.diff(start_ns) > 0) | (np.diff(device) != 0)).all())


def issue_order(problem: Problem, schedule: Schedule) -> list[int]:
    """Return all ops as the threads of hosts issue them, without hosts by simulated start."""
    if schedule.issued is None:
        return run_order(problem, schedule.start_ns, schedule.end_ns)
    issued: list[int] = schedule.issued.tolist()
    return issued


def run_order(
    problem: Problem, start_ns: NDArray[np.int64], end_ns: NDArray[np.int64]
) -> list[int]:
    """Return all ops by simulated start.

    At one instant those that take no time come first: another one that starts on their device then
    may have started after them, never before. Of several, producers come before their readers.
    """
    rank = np.empty(problem.op_count, np.int64)
    rank[problem.graph.topological] = np.arange(problem.op_count)
    order: list[int] = np.lexsort((rank, end_ns > start_ns, start_ns)).tolist()
    return order
