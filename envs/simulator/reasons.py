"""Messages that explain why a placement, or every placement, is infeasible."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from envs.hardware.units import human_bytes
from envs.problem import Problem

LARGEST_SHOWN = 3


def overfull_reason(
    problem: Problem,
    devices: NDArray[np.int32],
    peak_bytes: NDArray[np.int64],
    room_bytes: NDArray[np.int64] | None = None,
) -> str:
    """Return which devices lack how much memory, with the largest ops there, or "" if all fits.

    ``room_bytes`` (D,) overrides the devices' memory in the problem.
    """
    room = problem.memory_bytes if room_bytes is None else room_bytes
    return " ".join(
        _lack(problem, devices, int(d), int(peak_bytes[d]), int(room[d]))
        for d in np.flatnonzero(peak_bytes > room)
    )


def _lack(problem: Problem, devices: NDArray[np.int32], d: int, peak: int, room: int) -> str:
    graph = problem.graph
    here = np.flatnonzero(devices == d)
    size = graph.resident_bytes + graph.output_bytes + graph.workspace_bytes + problem.held_bytes
    size = size[here]
    largest = np.argsort(-size, kind="stable")[:LARGEST_SHOWN]
    shown = "; ".join(
        f"{graph.ids[here[k]]}, {human_bytes(int(size[k]))}" for k in largest if size[k] > 0
    )
    ops = "1 op" if len(here) == 1 else f"{len(here)} ops"
    return (
        f"{problem.cluster.names[d]} needs {human_bytes(peak)} for {ops} but has "
        f"{human_bytes(room)}, {human_bytes(peak - room)} too little"
        + (f" (largest: {shown})" if shown else "")
        + ". Put fewer ops there, or add a device."
    )


def blocked_reason(problem: Problem, devices: NDArray[np.int32]) -> str:
    """Return which op may not run on its device or which edge has no link, or "" if none."""
    graph, names = problem.graph, problem.cluster.names
    wrong = np.flatnonzero(~problem.allowed[np.arange(len(graph)), devices])
    if len(wrong):
        i = int(wrong[0])
        where = ", ".join(names[d] for d in np.flatnonzero(problem.allowed[i]))
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        return f"op {graph.ids[i]!r}{more} cannot run on {names[devices[i]]}, only on {where}."
    source = np.repeat(np.arange(len(graph)), np.diff(graph.successor_start))
    cut = np.flatnonzero(~problem.connected[devices[source], devices[graph.successors]])
    if len(cut):
        a, b = int(source[cut[0]]), int(graph.successors[cut[0]])
        return (
            f"op {graph.ids[b]!r} on {names[devices[b]]} needs the output of {graph.ids[a]!r} on "
            f"{names[devices[a]]}, but no link joins these devices "
            f"(edges without a link: {len(cut)}). Place them together, or add a [[link]] between = "
            f'["{names[devices[a]]}", "{names[devices[b]]}"] to the cluster.'
        )
    return ""


def memory_shortfall(problem: Problem) -> str:
    """Return the reason that no placement can hold the parameters in memory, or "".

    Parameters are packed into devices as items into bins: ops that share a device are one item. No
    packing exists if an item fits nowhere, if all together exceed all memory, or if more items than
    devices are so large that no device holds two of them (Martello and Toth, 1990).
    """
    graph, names = problem.graph, problem.cluster.names
    item = graph.group.astype(np.int64)
    item[item < 0] = item.max(initial=-1) + 1 + np.arange(int((item < 0).sum()))
    size = np.zeros(int(item.max()) + 1, np.int64)
    np.add.at(size, item, graph.resident_bytes)
    first = np.unique(item, return_index=True)[1]
    room = np.where(problem.allowed[first], problem.memory_bytes, -1)
    stuck = np.flatnonzero(size > room.max(axis=1))
    if len(stuck):
        i = int(stuck[size[stuck].argmax()])
        members = int((item == i).sum())
        group = f" and the {members - 1} that share its device have" if members > 1 else " has"
        return (
            f"op {graph.ids[first[i]]!r}{group} {size[i]} bytes of parameters, but the largest "
            f"device that may run it has {room[i].max()} bytes"
        )
    total, memory = sum(size.tolist()), sum(problem.memory_bytes.tolist())
    if total > memory:
        return (
            f"the parameters of {graph.name!r} have {total} bytes, but all of "
            f"{', '.join(names)} together have {memory} bytes"
        )
    large = size[2 * size > problem.memory_bytes.max()]
    for least in np.unique(large).tolist():
        count = int((large >= least).sum())
        holders = int((problem.memory_bytes >= least).sum())
        if count > holders:
            return (
                f"{count} ops or groups have {least} bytes of parameters and more, no device has "
                f"room for two of them, and {holders} devices have room for one"
            )
    return ""
