"""The critical path of a simulated step: without a gap from its start to its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from envs.problem import Problem
from envs.simulator.arrays import INFEASIBLE_NS
from envs.simulator.schedule import Schedule

Kind: TypeAlias = Literal["compute", "transfer", "link busy"]
Reason: TypeAlias = Literal["start", "input", "transfer", "device busy", "link busy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A part of the critical path: an op, a transfer of its output, or the wait for the link.

    ``after`` says what it could not start before: the start of the step, an input made on the same
    device, a transfer, or that its device or link was busy.
    """

    kind: Kind
    op: int  # that runs, or whose output is sent
    source: int  # device
    destination: int  # device; of an op the same
    start_ns: int
    end_ns: int
    after: Reason


def critical_path(problem: Problem, schedule: Schedule) -> list[Stretch]:
    """Stretches from 0 to the end of the step, each begins where the one before it ends.

    Nothing but them decides how long the step is: make one shorter, or avoid what it waits for.
    Empty for a placement that cannot run.
    """
    if schedule.step_ns == INFEASIBLE_NS:
        return []
    path: list[Stretch] = []
    cause = -1
    for i in schedule.critical_chain():
        device = int(schedule.devices[i])
        after: Reason = "start"
        if cause >= 0 and schedule.devices[cause] != device:
            path += _sent(problem, schedule, cause, i)
            after = "transfer"
        elif cause >= 0:
            after = "input" if cause in _inputs(problem, i) else "device busy"
        start_ns, end_ns = int(schedule.start_ns[i]), int(schedule.end_ns[i])
        path.append(_stretch("compute", i, device, device, start_ns, end_ns, after))
        cause = i
    return path


def critical_path_to_list(problem: Problem, path: list[Stretch]) -> list[dict[str, Any]]:
    """The path as plain data for JSON, with names and seconds."""
    names, ids = problem.cluster.names, problem.graph.ids
    return [
        {
            "kind": part.kind,
            "op": ids[part.op],
            **(
                {"device": names[part.source]}
                if part.kind == "compute"
                else {"from": names[part.source], "to": names[part.destination]}
            ),
            "start_s": part.start_ns / 1e9,
            "end_s": part.end_ns / 1e9,
            "after": part.after,
        }
        for part in path
    ]


def _sent(problem: Problem, schedule: Schedule, producer: int, reader: int) -> list[Stretch]:
    """The transfer that the reader started after, and before it the wait for its link."""
    source, destination = int(schedule.devices[producer]), int(schedule.devices[reader])
    sent = schedule.transfers
    brings = (
        (sent.producer == producer)
        & (sent.destination == destination)
        & (sent.end_ns == schedule.start_ns[reader])
    )
    if not problem.cluster.once_per_destination:
        brings &= problem.graph.successors[sent.edge] == reader
    k = int(brings.argmax())
    request_ns, start_ns = int(sent.request_ns[k]), int(sent.start_ns[k])
    end_ns = int(sent.end_ns[k])
    waits = start_ns > request_ns
    after: Reason = "link busy" if waits else "input"
    path = [_stretch("transfer", producer, source, destination, start_ns, end_ns, after)]
    if waits:
        wait = _stretch("link busy", producer, source, destination, request_ns, start_ns, "input")
        path.insert(0, wait)
    return path


def _inputs(problem: Problem, i: int) -> list[int]:
    graph = problem.graph
    first, end = graph.predecessor_start[i], graph.predecessor_start[i + 1]
    return [int(u) for u in graph.predecessors[first:end]]


def _stretch(
    kind: Kind, op: int, source: int, destination: int, start_ns: int, end_ns: int, after: Reason
) -> Stretch:
    return Stretch(
        kind=kind,
        op=op,
        source=source,
        destination=destination,
        start_ns=start_ns,
        end_ns=end_ns,
        after=after,
    )
