"""Tracks of a simulated step's links: rows of transfers that do not overlap."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from envs.problem import NO_QUEUE, Problem
from envs.simulator.schedule import Schedule

_Way: TypeAlias = tuple[int, ...]
"""A queue, or a pair of devices whose transfers never wait."""


@dataclass(slots=True)
class Track:
    """Transfers of one queue of a link, or of one ordered pair where they never wait.

    A pair whose transfers overlap has several tracks, numbered in their titles.
    """

    title: str
    transfers: list[int] = field(default_factory=list)  # indices, by start


def link_tracks(problem: Problem, schedule: Schedule) -> list[Track]:
    """Return the tracks of all transfers in device order, senders before receivers.

    A transfer that occupies two ports at once is on the tracks of both.
    """
    sent = schedule.transfers
    tracks: list[Track] = []
    lanes: dict[_Way, list[int]] = {}  # when the last transfer on each lane ends
    numbers: dict[tuple[_Way, int], int] = {}
    titles: Counter[str] = Counter()
    for k in range(len(sent)):
        start_ns, end_ns = int(sent.start_ns[k]), int(sent.end_ns[k])
        for way in _ways(problem, int(sent.source[k]), int(sent.destination[k])):
            ends = lanes.setdefault(way, [])
            lane = next((at for at, end in enumerate(ends) if end <= start_ns), len(ends))
            ends[lane : lane + 1] = [end_ns]
            if (way, lane) not in numbers:
                numbers[way, lane] = len(tracks)
                title = _title(problem, way)
                titles[title] += 1
                tracks.append(Track(title if titles[title] == 1 else f"{title} ({titles[title]})"))
            tracks[numbers[way, lane]].transfers.append(k)
    ordered = sorted(numbers, key=lambda at: (_place(problem, at[0]), at[1]))
    return [tracks[numbers[at]] for at in ordered]


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
        own = {source for source, _ in out}
        return f"{_listed(problem, own)} ↔ {_listed(problem, (sources | destinations) - own)}"
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
