"""A simulated step as a Chrome trace: opens in Perfetto (ui.perfetto.dev) and chrome://tracing.

Devices and links are two processes of the trace. A device's track shows its ops, a link's track its
transfers, one that occupies two ports shows on both; where transfers of a link do not wait for each
other, it has as many tracks as overlap.
Every device has a counter of the memory in use. Times are microseconds.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import numpy as np

from envs.problem import NO_QUEUE, Problem
from envs.simulator.arrays import INFEASIBLE_NS
from envs.simulator.schedule import Schedule

DEVICES: Final = 1
LINKS: Final = 2
Event = dict[str, Any]
_Way: TypeAlias = tuple[int, ...]
"""Of transfers: a queue, or two devices."""


def chrome_trace(problem: Problem, schedule: Schedule) -> dict[str, Any]:
    """The trace as the content of a JSON file.

    Raises:
        ValueError: the placement could not run at all, so there is nothing to show.
    """
    if schedule.step_ns == INFEASIBLE_NS:
        raise ValueError(f"there is no timeline of a placement that cannot run: {schedule.why}")
    events = [_name_process(DEVICES, "devices"), _name_process(LINKS, "links")]
    events += [_name(DEVICES, d, name) for d, name in enumerate(problem.cluster.names)]
    events += _ops(problem, schedule)
    events += _transfers(problem, schedule)
    events += _memory(problem, schedule)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "graph": problem.graph.name,
            "cluster": problem.cluster.name,
            "step_us": schedule.step_ns / 1000,
            "feasible": schedule.feasible,
            "why": schedule.why,
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
    transfers, names = schedule.transfers, problem.cluster.names
    lanes: dict[_Way, list[int]] = {}  # when the last transfer on each lane ends
    tracks: dict[tuple[_Way, int], int] = {}
    titles: Counter[str] = Counter()
    for k in range(len(transfers)):
        source, destination = int(transfers.source[k]), int(transfers.destination[k])
        start_ns, end_ns = int(transfers.start_ns[k]), int(transfers.end_ns[k])
        details = {
            "from": names[source],
            "to": names[destination],
            "bytes": int(transfers.bytes[k]),
            "waited_us": (start_ns - int(transfers.request_ns[k])) / 1000,
        }
        producer = problem.graph.ids[int(transfers.producer[k])]
        for way in _ways(problem, source, destination):
            ends = lanes.setdefault(way, [])
            lane = next((at for at, end in enumerate(ends) if end <= start_ns), len(ends))
            ends[lane : lane + 1] = [end_ns]
            if (way, lane) not in tracks:
                tracks[way, lane] = len(tracks)
                title = _title(problem, way)
                titles[title] += 1
                name = title if titles[title] == 1 else f"{title} ({titles[title]})"
                yield _name(LINKS, tracks[way, lane], name)
            yield _span(LINKS, tracks[way, lane], producer, start_ns, end_ns, details)


def _ways(problem: Problem, source: int, destination: int) -> list[_Way]:
    """The queues that a transfer occupies, or the two devices where it never waits."""
    pair = (source, destination)
    queues = [int(queue[pair]) for queue in (problem.queue, problem.second_queue)]
    return [(queue,) for queue in queues if queue != NO_QUEUE] or [pair]


def _title(problem: Problem, way: _Way) -> str:
    """Names a queue by the devices that share it."""
    if len(way) == 2:
        return f"{problem.cluster.names[way[0]]} → {problem.cluster.names[way[1]]}"
    out = np.argwhere(problem.queue == way[0]).tolist()
    into = np.argwhere(problem.second_queue == way[0]).tolist()
    sources, destinations = ({pair[end] for pair in out + into} for end in (0, 1))
    if out and into:  # one port for both directions
        own = {source for source, _ in out}
        return f"{_listed(problem, own)} ↔ {_listed(problem, (sources | destinations) - own)}"
    if sources & destinations:
        ends = sources | destinations
        both = " ↔ ".join(problem.cluster.names[d] for d in sorted(ends))
        return both if len(ends) == 2 else "bus " + _listed(problem, ends)
    which = "in: " if into else "out: " if (problem.second_queue[tuple(out[0])] != NO_QUEUE) else ""
    return f"{which}{_listed(problem, sources)} → {_listed(problem, destinations)}"


def _listed(problem: Problem, devices: set[int]) -> str:
    """Devices by name; "all" but one."""
    names = problem.cluster.names
    if 1 < len(devices) == len(names) - 1:
        return "all"
    return ", ".join(names[d] for d in sorted(devices))


def _memory(problem: Problem, schedule: Schedule) -> Iterator[Event]:
    """Bytes in use after each instant at which they change."""
    change: dict[tuple[int, int], int] = defaultdict(int)  # by device and time
    resident = problem.graph.resident_bytes.tolist()
    graph, devices = problem.graph, schedule.devices.tolist()
    start_ns, end_ns = schedule.start_ns.tolist(), schedule.end_ns.tolist()
    successors = np.split(graph.successors, graph.successor_start[1:-1])
    sent_ns = [0] * len(devices)  # when the last transfer of every output has ended
    transfers = schedule.transfers
    for k in range(len(transfers)):
        u, to = int(transfers.producer[k]), int(transfers.destination[k])
        sent_ns[u] = max(sent_ns[u], int(transfers.end_ns[k]))
        readers = [int(graph.successors[transfers.edge[k]])]
        if problem.cluster.once_per_destination:
            readers = [v for v in successors[u].tolist() if devices[v] == to]
        last_ns = max(end_ns[v] for v in readers)
        change[to, int(transfers.start_ns[k])] += int(transfers.bytes[k])
        change[to, last_ns] -= int(transfers.bytes[k])
    for i, d in enumerate(devices):
        here = [end_ns[v] for v in successors[i].tolist() if devices[v] == d]
        output, scratch = int(graph.output_bytes[i]), int(graph.workspace_bytes[i])
        change[d, 0] += resident[i]
        change[d, start_ns[i]] += output + scratch + int(problem.held_bytes[i])
        change[d, end_ns[i]] -= scratch
        if len(successors[i]):
            change[d, max([sent_ns[i], *here])] -= output
    for d, name in enumerate(problem.cluster.names):
        used = 0
        for at in sorted(at for device, at in change if device == d):
            used += change[d, at]
            yield {
                "ph": "C",
                "pid": DEVICES,
                "name": f"memory of {name}",
                "ts": at / 1000,
                "args": {"bytes": used},
            }


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


def _name(process: int, track: int, name: str) -> Event:
    return _meta("thread_name", process, track, name)


def _name_process(process: int, name: str) -> Event:
    return _meta("process_name", process, 0, name)


def _meta(kind: str, process: int, track: int, name: str) -> Event:
    return {"ph": "M", "pid": process, "tid": track, "name": kind, "args": {"name": name}}
