"""Chrome trace of a simulated step, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Devices and links are two processes of the trace. A device's track shows its ops, a link's track its
transfers; one that occupies two ports appears on both. A link whose transfers do not wait for each
other has as many tracks as overlap (:func:`link_tracks`). Every device has a counter of the memory
in use (:func:`memory_curves`). Times are in microseconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, Final, TypeAlias

import numpy as np

from envs.hardware.link_tables import NO_QUEUE
from envs.problem import Problem
from envs.simulator.kernel.arrays import INFEASIBLE_NS
from envs.simulator.schedule import Schedule

_Way: TypeAlias = tuple[int, ...]
"""A queue, or a pair of devices whose transfers never wait."""


def link_tracks(problem: Problem, schedule: Schedule) -> dict[str, list[int]]:
    """Return {title of a track: its transfers by start} in device order, senders before receivers.

    A track shows one queue of a link; a transfer that occupies two is on both tracks. A pair of
    devices whose transfers never wait, so that they may overlap, has several, numbered tracks.
    """
    sent = schedule.transfers
    lanes: dict[_Way, list[list[int]]] = defaultdict(list)
    for k in range(len(sent)):
        for way in _ways(problem, int(sent.source[k]), int(sent.destination[k])):
            free = (t for t in lanes[way] if sent.end_ns[t[-1]] <= sent.start_ns[k])
            lane = next(free, None)
            if lane is None:
                lanes[way].append(lane := [])
            lane.append(k)
    tracks: dict[str, list[int]] = {}
    for way in sorted(lanes, key=lambda way: _place(problem, way)):
        for transfers in lanes[way]:
            title, number = _title(problem, way), 2
            while title in tracks:
                title, number = f"{_title(problem, way)} ({number})", number + 1
            tracks[title] = transfers
    return tracks


def _ways(problem: Problem, source: int, destination: int) -> list[_Way]:
    """Return the queues that a transfer occupies, or its two devices if it never waits."""
    pair = (source, destination)
    queues = [int(queue[pair]) for queue in (problem.queue, problem.second_queue)]
    return [(queue,) for queue in queues if queue != NO_QUEUE] or [pair]


def _place(problem: Problem, way: _Way) -> tuple[int, int, int]:
    """Return the sort key of a queue: its first sender, or else its first receiver."""
    if len(way) == 2:
        return (0, *way)
    sent, received = (np.argwhere(of == way[0]) for of in (problem.queue, problem.second_queue))
    if len(sent):
        return (0, int(sent[:, 0].min()), int(sent[:, 1].min()))
    return (1, int(received[:, 1].min()), 0)


def _title(problem: Problem, way: _Way) -> str:
    if len(way) == 2:
        return f"{problem.cluster.names[way[0]]} → {problem.cluster.names[way[1]]}"
    out = np.argwhere(problem.queue == way[0]).tolist()
    into = np.argwhere(problem.second_queue == way[0]).tolist()
    sources, destinations = ({pair[end] for pair in out + into} for end in (0, 1))
    if out and into:  # one port for both directions
        port = {source for source, _ in out}
        return f"{_listed(problem, port)} ↔ {_listed(problem, (sources | destinations) - port)}"
    if sources & destinations:
        ends = sources | destinations
        both = " ↔ ".join(problem.cluster.names[d] for d in sorted(ends))
        return both if len(ends) == 2 else "bus " + _listed(problem, ends)
    which = "in: " if into else "out: " if (problem.second_queue[tuple(out[0])] != NO_QUEUE) else ""
    return f"{which}{_listed(problem, sources)} → {_listed(problem, destinations)}"


def _listed(problem: Problem, devices: set[int]) -> str:
    """Return device names, or "all" for all but one."""
    names = problem.cluster.names
    if 1 < len(devices) == len(names) - 1:
        return "all"
    return ", ".join(names[d] for d in sorted(devices))


def memory_curves(problem: Problem, schedule: Schedule) -> list[list[tuple[int, int]]]:
    """Return (ns, bytes in use from then on) of every device, in order of time.

    The first entry is at 0. The largest value of a device is its ``schedule.peak_bytes`` if every
    op takes time: the curve omits what comes and goes within one instant. With hosts
    the peak follows the order of issue, and may differ.
    """
    change: list[dict[int, int]] = [defaultdict(int) for _ in range(problem.device_count)]
    resident = problem.graph.resident_bytes.tolist()
    graph, devices = problem.graph, schedule.devices.tolist()
    start_ns, end_ns = schedule.start_ns.tolist(), schedule.end_ns.tolist()
    successors = np.split(graph.successors, graph.successor_start[1:-1])
    sent_ns = [0] * len(devices)  # when the last transfer of every output has ended
    transfers = schedule.transfers
    for of_device in change:
        of_device[0] = 0
    for k in range(len(transfers)):
        u, to = int(transfers.producer[k]), int(transfers.destination[k])
        sent_ns[u] = max(sent_ns[u], int(transfers.end_ns[k]))
        readers = [int(graph.successors[transfers.edge[k]])]
        if problem.cluster.once_per_destination:
            readers = [v for v in successors[u].tolist() if devices[v] == to]
        last_ns = max(end_ns[v] for v in readers)
        change[to][int(transfers.start_ns[k])] += int(transfers.bytes[k])
        change[to][last_ns] -= int(transfers.bytes[k])
    for i, d in enumerate(devices):
        here = [end_ns[v] for v in successors[i].tolist() if devices[v] == d]
        output, scratch = int(graph.output_bytes[i]), int(graph.workspace_bytes[i])
        change[d][0] += resident[i]
        change[d][start_ns[i]] += output + scratch + int(problem.held_bytes[i])
        change[d][end_ns[i]] -= scratch
        if len(successors[i]):
            change[d][max([sent_ns[i], *here])] -= output
    curves = []
    for of_device in change:
        times = sorted(of_device)
        used = accumulate(of_device[at] for at in times)
        curves.append(list(zip(times, used, strict=True)))
    return curves


DEVICES: Final = 1
LINKS: Final = 2
Event = dict[str, Any]


def chrome_trace(problem: Problem, schedule: Schedule) -> dict[str, Any]:
    """Return the trace as the content of a JSON file."""
    if schedule.step_ns == INFEASIBLE_NS:
        raise ValueError(f"there is no timeline of a placement that cannot run: {schedule.reason}")
    processes = ((DEVICES, "devices"), (LINKS, "links"))
    events = [_name(number, 0, name, "process_name") for number, name in processes]
    events += [_name(DEVICES, d, name) for d, name in enumerate(problem.cluster.names)]
    events += _ops(problem, schedule)
    events += _transfers(problem, schedule)
    events += [
        {
            "ph": "C",
            "pid": DEVICES,
            "name": f"memory of {name}",
            "ts": at / 1000,
            "args": {"bytes": used},
        }
        for name, curve in zip(problem.cluster.names, memory_curves(problem, schedule), strict=True)
        for at, used in curve
    ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "graph": problem.graph.name,
            "cluster": problem.cluster.name,
            "step_us": schedule.step_ns / 1000,
            "feasible": schedule.feasible,
            "why": schedule.reason,
        },
    }


def _ops(problem: Problem, schedule: Schedule) -> Iterator[Event]:
    graph = problem.graph
    on_chain = set(schedule.critical_chain())
    for i, op_id in enumerate(graph.ids):
        yield _span(
            DEVICES,
            int(schedule.devices[i]),
            op_id,
            int(schedule.start_ns[i]),
            int(schedule.end_ns[i]),
            {"op": graph.ops[i], "module": graph.modules[i], "critical": i in on_chain},
        )


def _transfers(problem: Problem, schedule: Schedule) -> Iterator[Event]:
    sent, names = schedule.transfers, problem.cluster.names
    for number, (title, transfers) in enumerate(link_tracks(problem, schedule).items()):
        yield _name(LINKS, number, title)
        for k in transfers:
            start_ns = int(sent.start_ns[k])
            details = {
                "from": names[int(sent.source[k])],
                "to": names[int(sent.destination[k])],
                "bytes": int(sent.bytes[k]),
                "waited_us": (start_ns - int(sent.request_ns[k])) / 1000,
            }
            producer = problem.graph.ids[int(sent.producer[k])]
            yield _span(LINKS, number, producer, start_ns, int(sent.end_ns[k]), details)


def _span(
    process: int, track: int, name: str, start_ns: int, end_ns: int, details: dict[str, Any]
) -> Event:
    return {
        "ph": "X",
        "pid": process,
        "tid": track,
        "name": name,
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
        "args": details,
    }


def _name(process: int, track: int, name: str, kind: str = "thread_name") -> Event:
    return {"ph": "M", "pid": process, "tid": track, "name": kind, "args": {"name": name}}
