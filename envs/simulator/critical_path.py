"""The critical path of a simulated step, and the idle times of its devices.

The path has no gaps from the start of the step to its end; an idle time says what the device waits
for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from envs.hardware.link_tables import NO_QUEUE
from envs.problem import Longs, Problem
from envs.simulator.kernel.arrays import INFEASIBLE_NS
from envs.simulator.schedule import Schedule

Kind: TypeAlias = Literal["compute", "transfer", "link busy", "host busy"]
Reason: TypeAlias = Literal["start", "input", "transfer", "device busy", "link busy", "host busy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The op that kept a device busy, or the op whose output's transfer kept a link busy."""

    op: int
    source: int  # device
    destination: int  # device; equal to source for an op


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """One segment of the critical path: an op, a transfer of its output, or a wait for the link.

    "host busy" is the time in which the thread of a host issues ops and copies before this one.
    ``after`` names what it had to wait for: the start of the step, an input made on the same
    device, a transfer, or a busy device or link. ``holder`` is what kept that busy: the previous op
    on the device, or the last transfer on the link during a wait for it.
    """

    kind: Kind
    op: int  # the op that runs, or whose output is sent
    source: int  # device
    destination: int  # device; equal to source for an op
    start_ns: int
    end_ns: int
    after: Reason
    holder: Holder | None = None


def critical_path(problem: Problem, schedule: Schedule) -> list[Stretch]:
    """Return the segments from 0 to the end of the step; each begins where the last one ends.

    They alone determine the step time: make one shorter, or avoid what it waits for. Empty for a
    placement that cannot run. Linear in ops and edges (times log, for transfers).
    """
    if schedule.step_ns == INFEASIBLE_NS:
        return []
    path: list[Stretch] = []
    sent = Sent(problem, schedule)
    cause = -1
    for i in schedule.critical_chain():
        device = int(schedule.devices[i])
        after: Reason = "start"
        holder = None
        if problem.hosts is not None and not sent.brings(cause, i):
            since_ns = int(schedule.end_ns[cause]) if cause >= 0 else 0
            waits = _host_busy(schedule, i, since_ns, "start" if cause < 0 else "device busy")
            path += waits
            after = "host busy" if waits else "start" if cause < 0 else "device busy"
        elif cause >= 0 and schedule.devices[cause] != device:
            path += sent.stretches(cause, i)
            after = "transfer"
        elif cause >= 0 and cause in _inputs(problem, i):
            after = "input"
        elif cause >= 0:
            after = "device busy"
            holder = Holder(op=cause, source=device, destination=device)
        path.append(
            Stretch(
                kind="compute",
                op=i,
                source=device,
                destination=device,
                start_ns=int(schedule.start_ns[i]),
                end_ns=int(schedule.end_ns[i]),
                after=after,
                holder=holder,
            )
        )
        cause = i
    return path


def _host_busy(schedule: Schedule, i: int, since_ns: int, after: Reason) -> list[Stretch]:
    """Return the time until the thread of a host lets op i start, if there is any."""
    device, start_ns = int(schedule.devices[i]), int(schedule.start_ns[i])
    wait = Stretch(
        kind="host busy",
        op=i,
        source=device,
        destination=device,
        start_ns=since_ns,
        end_ns=start_ns,
        after=after,
    )
    return [wait] if start_ns > since_ns else []


def critical_path_to_list(problem: Problem, path: list[Stretch]) -> list[dict[str, Any]]:
    """Return the path as plain data for JSON, with names and seconds."""
    names, ids = problem.cluster.names, problem.graph.ids

    def place(part: Stretch | Holder) -> dict[str, str]:
        if part.source == part.destination:
            return {"op": ids[part.op], "device": names[part.source]}
        return {"op": ids[part.op], "from": names[part.source], "to": names[part.destination]}

    return [
        {
            "kind": part.kind,
            **place(part),
            "start_s": part.start_ns / 1e9,
            "end_s": part.end_ns / 1e9,
            "after": part.after,
            **({"behind": place(part.holder)} if part.holder is not None else {}),
        }
        for part in path
    ]


class Sent:
    """The transfers of a schedule, by the edges that they serve and by the queues they occupy."""

    def __init__(self, problem: Problem, schedule: Schedule) -> None:
        self.problem, self.schedule = problem, schedule
        sent = schedule.transfers
        self.of_edge = np.full(problem.graph.edge_count, -1, np.int64)
        self.of_edge[sent.edge] = np.arange(len(sent))
        pair = (sent.source, sent.destination)
        self.queues = np.stack([problem.queue[pair], problem.second_queue[pair]]).astype(np.int64)
        # Of transfers that end at one instant the longest first: the others took no time.
        self.times_ns = np.unique(sent.end_ns)
        ends = self._keys(self.queues, sent.end_ns).ravel()
        self.order = np.lexsort((np.tile(sent.start_ns, 2), ends))
        self.ends = ends[self.order]

    def brings(self, producer: int, reader: int) -> bool:
        """Return whether the reader started when the output of a producer elsewhere arrived."""
        devices = self.schedule.devices
        if producer < 0 or devices[producer] == devices[reader]:
            return False
        if producer not in _inputs(self.problem, reader):
            return False
        end_ns = self.schedule.transfers.end_ns[self._carrier(producer, reader)]
        return bool(end_ns == self.schedule.start_ns[reader])

    def stretches(self, producer: int, reader: int) -> list[Stretch]:
        """Return the wait for the link or host, if any, and the transfer to the reader."""
        sent = self.schedule.transfers
        k = self._carrier(producer, reader)
        request_ns, start_ns = int(sent.request_ns[k]), int(sent.start_ns[k])
        waits = start_ns > request_ns
        busy: Literal["link busy", "host busy"]
        busy = "link busy" if self.problem.hosts is None else "host busy"
        wait = Stretch(
            kind=busy,
            op=producer,
            source=int(sent.source[k]),
            destination=int(sent.destination[k]),
            start_ns=request_ns,
            end_ns=start_ns,
            after="input",
            holder=self._holder(k) if waits and busy == "link busy" else None,
        )
        transfer = replace(
            wait,
            kind="transfer",
            start_ns=start_ns,
            end_ns=int(sent.end_ns[k]),
            after=busy if waits else "input",
            holder=None,
        )
        return [wait, transfer] if waits else [transfer]

    def _keys(self, queues: Longs, end_ns: Longs) -> Longs:
        """Return sort keys of transfers: by queue, then by end."""
        return queues * len(self.times_ns) + np.searchsorted(self.times_ns, end_ns)

    def _carrier(self, producer: int, reader: int) -> int:
        graph, devices = self.problem.graph, self.schedule.devices
        edges = range(graph.successor_start[producer], graph.successor_start[producer + 1])
        if self.problem.cluster.once_per_destination:
            # The transfer has the number of the first edge to that device.
            there = devices[reader]
            return int(
                next(self.of_edge[e] for e in edges if devices[graph.successors[e]] == there)
            )
        return int(next(self.of_edge[e] for e in edges if graph.successors[e] == reader))

    def _holder(self, k: int) -> Holder:
        """Return the transfer that occupied the link of transfer k until k began."""
        sent = self.schedule.transfers
        queues = self.queues[:, k]
        keys = self._keys(queues[queues != NO_QUEUE], sent.start_ns[k])
        at = np.searchsorted(self.ends, keys)
        others = self.order[at[self.ends[at] == keys]] % len(sent)  # k's own end comes at or after
        other = int(others[sent.start_ns[others] < sent.start_ns[k]][0])
        return Holder(
            op=int(sent.producer[other]),
            source=int(sent.source[other]),
            destination=int(sent.destination[other]),
        )


def _inputs(problem: Problem, i: int) -> list[int]:
    first, end = problem.graph.predecessor_start[i : i + 2]
    inputs: list[int] = problem.graph.predecessors[first:end].tolist()
    return inputs


Waiting: TypeAlias = Literal["producer", "link busy", "host busy", "transfer", "nothing left"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """A time in which a device runs nothing, for one reason.

    It waits for the output of ``producer`` on another device, which its next op, ``reader``, needs:
    until it is made ("producer"), until the transfer of ``holder`` leaves its link ("link busy"),
    or while it is sent ("transfer"). With hosts it also waits until their thread issues the op or
    the copy ("host busy"); there may be no producer. After the last op of the device nothing is
    left; then there is neither producer nor reader.
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
    free_ns = [0] * problem.device_count
    gaps: list[list[Idle]] = [[] for _ in free_ns]  # by device
    for i in np.lexsort((schedule.end_ns, schedule.start_ns)).tolist():
        d, start_ns = int(schedule.devices[i]), int(schedule.start_ns[i])
        if start_ns > free_ns[d]:
            gaps[d] += _gap(schedule, sent, i, free_ns[d])
        free_ns[d] = int(schedule.end_ns[i])
    for d, start_ns in enumerate(free_ns):
        if start_ns < schedule.step_ns:
            end_ns = schedule.step_ns
            gaps[d].append(Idle(device=d, start_ns=start_ns, end_ns=end_ns, waiting="nothing left"))
    return [idle for of_device in gaps for idle in of_device]


def _gap(schedule: Schedule, sent: Sent, reader: int, begin_ns: int) -> list[Idle]:
    """Split the gap before an op that started when a transfer ended, by what it waited for."""
    if sent.problem.hosts is not None and not sent.brings(int(schedule.cause[reader]), reader):
        here, start_ns = int(schedule.devices[reader]), int(schedule.start_ns[reader])
        why: Waiting = "host busy"
        return [Idle(device=here, start_ns=begin_ns, end_ns=start_ns, waiting=why, reader=reader)]
    while schedule.devices[schedule.cause[reader]] == schedule.devices[reader]:
        reader = int(schedule.cause[reader])  # skip ops that took no time
    producer = int(schedule.cause[reader])
    parts: list[tuple[Waiting, int, Holder | None]] = []  # reason, end, holder
    for part in sent.stretches(producer, reader):
        if not parts:
            parts.append(("producer", part.start_ns, None))
        waiting: Waiting = "producer" if part.kind == "compute" else part.kind
        parts.append((waiting, part.end_ns, part.holder))
    gap: list[Idle] = []
    for waiting, end_ns, holder in parts:
        if end_ns > begin_ns:
            gap.append(
                Idle(
                    device=int(schedule.devices[reader]),
                    start_ns=begin_ns,
                    end_ns=end_ns,
                    waiting=waiting,
                    producer=producer,
                    reader=reader,
                    holder=holder,
                )
            )
            begin_ns = end_ns
    return gap
