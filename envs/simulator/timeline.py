"""Chrome trace of a simulated step, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Devices and links are two processes of the trace. A device's track shows its ops, a link's track its
transfers; one that occupies two ports appears on both. A link whose transfers do not wait for each
other has as many tracks as overlap. Every device has a counter of the memory in use. Times are in
microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from envs.problem import Problem
from envs.simulator.arrays import INFEASIBLE_NS
from envs.simulator.memory_curves import memory_curves
from envs.simulator.schedule import Schedule
from envs.simulator.tracks import link_tracks

DEVICES: Final = 1
LINKS: Final = 2
Event = dict[str, Any]


def chrome_trace(problem: Problem, schedule: Schedule) -> dict[str, Any]:
    """Return the trace as the content of a JSON file.

    Raises:
        ValueError: the placement cannot run at all, so there is nothing to show.
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
    sent, names = schedule.transfers, problem.cluster.names
    for number, track in enumerate(link_tracks(problem, schedule)):
        yield _name(LINKS, number, track.title)
        for k in track.transfers:
            start_ns = int(sent.start_ns[k])
            details = {
                "from": names[int(sent.source[k])],
                "to": names[int(sent.destination[k])],
                "bytes": int(sent.bytes[k]),
                "waited_us": (start_ns - int(sent.request_ns[k])) / 1000,
            }
            producer = problem.graph.ids[int(sent.producer[k])]
            yield _span(LINKS, number, producer, start_ns, int(sent.end_ns[k]), details)


def _memory(problem: Problem, schedule: Schedule) -> Iterator[Event]:
    curves = memory_curves(problem, schedule)
    for name, curve in zip(problem.cluster.names, curves, strict=True):
        for at, used in curve:
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
