"""Idle times of the devices in a simulated step, and what they wait for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from envs.problem import Problem
from envs.simulator.arrays import INFEASIBLE_NS
from envs.simulator.critical import Holder, Sent
from envs.simulator.schedule import Schedule

Waiting: TypeAlias = Literal["producer", "link busy", "transfer", "nothing left"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """A time in which a device runs nothing, for one reason.

    It waits for the output of ``producer`` on another device, which its next op, ``reader``, needs:
    until it is made ("producer"), until the transfer of ``holder`` leaves its link ("link busy"),
    or while it is sent ("transfer"). After the last op of the device nothing is left; then there is
    neither producer nor reader.
    """

    device: int
    start_ns: int
    end_ns: int
    waiting: Waiting
    producer: int = -1
    reader: int = -1
    holder: Holder | None = None


def idle_times(problem: Problem, schedule: Schedule) -> list[Idle]:
    """Return all idle times by device, then time; with the ops they fill the step of every device.

    Empty for a placement that cannot run.
    """
    if schedule.step_ns == INFEASIBLE_NS:
        return []
    sent = Sent(problem, schedule)
    found: list[Idle] = []
    free_ns = [0] * problem.device_count
    by_device: list[list[Idle]] = [[] for _ in free_ns]
    for i in np.lexsort((schedule.end_ns, schedule.start_ns)).tolist():
        d, start_ns = int(schedule.devices[i]), int(schedule.start_ns[i])
        if start_ns > free_ns[d]:
            by_device[d] += _gap(schedule, sent, i, free_ns[d])
        free_ns[d] = int(schedule.end_ns[i])
    for d, own in enumerate(by_device):
        found += own
        if free_ns[d] < schedule.step_ns:
            found.append(
                Idle(
                    device=d,
                    start_ns=free_ns[d],
                    end_ns=schedule.step_ns,
                    waiting="nothing left",
                )
            )
    return found


def _gap(schedule: Schedule, sent: Sent, reader: int, begin_ns: int) -> list[Idle]:
    """Split the gap before an op that started when a transfer ended, by what it waited for."""
    while schedule.devices[schedule.cause[reader]] == schedule.devices[reader]:
        reader = int(schedule.cause[reader])  # skip ops that took no time
    found: list[Idle] = []
    for part in sent.stretches(int(schedule.cause[reader]), reader):
        if not found and part.start_ns > begin_ns:
            found.append(_idle(schedule, reader, "producer", begin_ns, part.start_ns))
        if part.end_ns > begin_ns:
            waiting: Waiting = "transfer" if part.kind == "transfer" else "link busy"
            start_ns = max(begin_ns, part.start_ns)
            found.append(_idle(schedule, reader, waiting, start_ns, part.end_ns, part.holder))
    return [idle for idle in found if idle.end_ns > idle.start_ns]


def _idle(
    schedule: Schedule,
    reader: int,
    waiting: Waiting,
    start_ns: int,
    end_ns: int,
    holder: Holder | None = None,
) -> Idle:
    return Idle(
        device=int(schedule.devices[reader]),
        start_ns=start_ns,
        end_ns=end_ns,
        waiting=waiting,
        producer=int(schedule.cause[reader]),
        reader=reader,
        holder=holder,
    )
