"""Memory in use on every device over the time of a simulated step."""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate

import numpy as np

from envs.problem import Problem
from envs.simulator.schedule import Schedule


def memory_curves(problem: Problem, schedule: Schedule) -> list[list[tuple[int, int]]]:
    """Return (ns, bytes in use from then on) of every device, in order of time.

    The first entry is at 0. The largest value of a device is its ``schedule.peak_bytes`` if every
    op takes time: the curve omits what comes and goes within one instant.
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
