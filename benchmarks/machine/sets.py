"""Gain of ops on both cores at once over the unplaced model and over single cores.

    python -m benchmarks sets

The costs of all ops of a step are measured on one core and on the set of both, the least of a few
runs. In a schedule an op takes one core or the set, which needs both cores free; a value that
another core made costs its hand-over, as calibrated; a core that goes from an op of its own to one
of the set, or back, waits for ``change_s``. The same local search finds the best schedule on single
cores and the best with sets. All ops on the set are the unplaced model.

These are simulated times of costs without load: they say what sets can win, before what caches and
memory that both cores share, and further signals, take of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.record import Effort, Part
from benchmarks.tables import Table
from envs.compiled import compiled
from envs.costs.ops import profile_runs
from envs.hardware.cluster import Cluster
from envs.hardware.discover import core_set, device_kind, discover, present
from envs.runtime import calibrated
from graphs.extract import Workload, extract
from graphs.graph import GraphArrays
from placer.sources.target import load_step

FOLDER: Final = Path(__file__).parents[2] / "graphs" / "models"
MODELS: Final[Mapping[str, str]] = {
    "NASNet-A": "nasnet.py:build",
    "Inception-V3": "inception.py:build",
    "two towers": "two_towers.py:build",
    "translation": "nmt.py:build",
    "mixture of experts": "moe.py:build",
    "recurrent language model": "rnnlm.py:build",
}
CHANGES_S: Final = (50e-6, 0.0)
BOTH: Final = 2
"""Width of an op on the set; below it, the number of its core."""
RUNS: Final = 9
LONGEST_CHAIN: Final = 32
PASSES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """A step of N ops on two cores and on the set of both."""

    graph: GraphArrays
    cost_s: NDArray[np.float64]  # (N, 2) on one core, on the set
    latency_s: float  # of a value from one core to the other
    bandwidth_bytes_per_s: float


def measured(step: Workload, cores: Cluster, runs: int) -> Costs:
    """Measure the ops of a step on the first core and on the set of both."""
    extraction = extract(step)
    both = core_set(int(name.removeprefix("core:")) for name in cores.names)
    devices = [
        replace(one, memory_bytes=cores.devices[0].memory_bytes) for one in present((both,)).devices
    ]
    runs_s = profile_runs(extraction, [cores.devices[0], *devices], repeats=runs)
    link = cores.links[0]
    return Costs(
        graph=GraphArrays.from_graph(extraction.graph),
        cost_s=np.column_stack(
            [runs_s[device_kind(name)].min(axis=0) for name in (cores.names[0], both)]
        ),
        latency_s=link.latency_s,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
    )


@compiled
def schedule_s(
    order: NDArray[np.int32],
    place: NDArray[np.int32],
    predecessor_start: NDArray[np.int32],
    predecessors: NDArray[np.int32],
    hand_over_s: NDArray[np.float64],
    cost_s: NDArray[np.float64],
    change_s: float,
    end_s: NDArray[np.float64],
) -> float:
    """Return the step of ops in an order, each on core 0, core 1 or both; ``end_s`` is filled."""
    free_s = np.zeros(2)
    wide = np.zeros(2, np.bool_)
    for i in order:
        where = place[i]
        ready_s = 0.0
        for k in range(predecessor_start[i], predecessor_start[i + 1]):
            u = predecessors[k]
            apart = where + place[u] == 1  # one on core 0, the other on core 1
            ready_s = max(ready_s, end_s[u] + (hand_over_s[u] if apart else 0.0))
        if where == BOTH:
            changes = not (wide[0] and wide[1])
            start_s = max(free_s[0], free_s[1], ready_s) + (change_s if changes else 0.0)
            end_s[i] = start_s + cost_s[i, 1]
            free_s[:] = end_s[i]
            wide[:] = True
        else:
            start_s = max(free_s[where], ready_s) + (change_s if wide[where] else 0.0)
            end_s[i] = start_s + cost_s[i, 0]
            free_s[where] = end_s[i]
            wide[where] = False
    return float(max(free_s[0], free_s[1]))


@compiled
def improve(
    order: NDArray[np.int32],
    place: NDArray[np.int32],
    predecessor_start: NDArray[np.int32],
    predecessors: NDArray[np.int32],
    hand_over_s: NDArray[np.float64],
    cost_s: NDArray[np.float64],
    change_s: float,
    widths: int,
    steps: int,
    seed: int,
) -> float:
    """Improve ``place`` and return the step: first annealing, then each op by itself.

    A move puts a few ops that follow each other in the order, or that waited for each other, on one
    core or on the set.
    """
    np.random.seed(seed)
    count = len(order)
    end_s = np.zeros(count)
    now_s = schedule_s(
        order, place, predecessor_start, predecessors, hand_over_s, cost_s, change_s, end_s
    )
    best, best_s = place.copy(), now_s
    hottest = 0.5 * now_s / count
    moved = np.zeros(LONGEST_CHAIN, np.int32)
    before = np.zeros(LONGEST_CHAIN, np.int32)
    for step in range(steps):
        heat = hottest * (1.0 - step / steps) ** 2
        longest = 1 << np.random.randint(0, 6)
        at = np.random.randint(0, count)
        to = np.random.randint(0, widths)
        upstream = np.random.random() < 0.5
        length = 0
        i = order[at]
        while length < longest:
            moved[length], before[length] = i, place[i]
            place[i] = to
            length += 1
            if upstream:  # the input that came last
                latest = -1
                for k in range(predecessor_start[i], predecessor_start[i + 1]):
                    u = predecessors[k]
                    if latest < 0 or end_s[u] > end_s[latest]:
                        latest = u
                if latest < 0:
                    break
                i = latest
            else:
                at += 1
                if at == count:
                    break
                i = order[at]
        new_s = schedule_s(
            order, place, predecessor_start, predecessors, hand_over_s, cost_s, change_s, end_s
        )
        if new_s <= now_s or np.random.random() < np.exp((now_s - new_s) / max(heat, 1e-12)):
            now_s = new_s
            if now_s < best_s:
                best_s = now_s
                best[:] = place
        else:
            for k in range(length - 1, -1, -1):
                place[moved[k]] = before[k]
    place[:] = best
    for _ in range(PASSES):
        for i in order:
            for to in range(widths):
                was = place[i]
                place[i] = to
                new_s = schedule_s(
                    order,
                    place,
                    predecessor_start,
                    predecessors,
                    hand_over_s,
                    cost_s,
                    change_s,
                    end_s,
                )
                if new_s < best_s:
                    best_s = new_s
                else:
                    place[i] = was
    return best_s


def order_of(costs: Costs) -> NDArray[np.int32]:
    """Return ops by the longest way from their start to the end of the step, on one core."""
    graph = costs.graph
    rank = np.zeros(len(graph))
    for i in reversed(graph.topological.tolist()):
        readers = graph.successors[graph.successor_start[i] : graph.successor_start[i + 1]]
        rank[i] = costs.cost_s[i, 0] + rank[readers].max(initial=0.0)
    position = np.empty(len(graph))
    position[graph.topological] = np.arange(len(graph))
    return np.lexsort((position, -rank)).astype(np.int32)


def best_s(
    costs: Costs, change_s: float, starts: list[NDArray[np.int32]], widths: int, steps: int
) -> tuple[float, NDArray[np.int32]]:
    """Return the best step found from any of the starts, and its placement."""
    graph, order = costs.graph, order_of(costs)
    hand_over_s = costs.latency_s + graph.output_bytes / costs.bandwidth_bytes_per_s
    lists = graph.predecessor_start.copy(), graph.predecessors.copy()
    found = []
    for seed, start in enumerate(starts):
        place = start.copy()
        step_s = improve(
            order, place, *lists, hand_over_s, costs.cost_s, change_s, widths, steps, seed
        )
        found.append((step_s, place))
    return min(found, key=lambda one: one[0])


def compared(name: str, steps: int, runs: int, found: dict[str, Any]) -> Table:
    """Compare schedules of the training step and of inference of one model."""
    first_two = sorted(os.sched_getaffinity(0))[:2]
    cores = calibrated(discover(",".join(f"core:{core}" for core in first_two)))
    rows = []
    for training in (True, False):
        step = load_step(f"{FOLDER}/{MODELS[name]}", training=training)
        costs = measured(step, cores, runs)
        count = len(costs.graph)
        alone, together = np.zeros(count, np.int32), np.full(count, BOTH, np.int32)
        halves = np.random.default_rng(0).integers(0, 2, count).astype(np.int32)
        one_s, unplaced_s = costs.cost_s.sum(axis=0).tolist()
        _, single = best_s(costs, 0.0, [alone, halves], 2, steps)
        single_s, single = best_s(costs, 0.0, [single, single], 2, steps)  # searched as much
        starts, with_sets = [together, single], {}
        for change_s in CHANGES_S:
            with_sets[change_s] = best_s(costs, change_s, starts, BOTH + 1, steps)
            starts = [*starts, with_sets[change_s][1]]
        least_s = min(single_s, unplaced_s)
        what = "training" if training else "inference"
        found[what] = {
            "ops": count,
            "one_core_s": one_s,
            "unplaced_s": unplaced_s,
            "single_cores_s": single_s,
            "with_sets_s": {change_s: sets_s for change_s, (sets_s, _) in with_sets.items()},
            "on_set": {c: float((place == BOTH).mean()) for c, (_, place) in with_sets.items()},
        }
        times = (f"{value * 1e3:.1f}" for value in (one_s, unplaced_s, single_s))
        ratios = (f"{sets_s / least_s:.2f}" for sets_s, _ in with_sets.values())
        share = float(costs.cost_s[with_sets[CHANGES_S[0]][1] == BOTH, 1].sum())
        rows.append((f"{name}, {what}", f"{count:,}", *times, *ratios, f"{share * 1e3:.1f}"))
    return Table(
        "Core sets",
        "schedules of measured costs in ms; the ratios are with sets over the better of unplaced "
        "and single cores, for 50 and 0 us at every change between core and set",
        ("step", "ops", "one core", "unplaced", "single cores", "50 us", "0 us", "of it on both"),
        tuple(rows),
    )


def parts(effort: Effort) -> dict[str, Part]:
    """Return a part for each model."""
    names = list(MODELS)[: effort.pick(quick=0, normal=len(MODELS), full=len(MODELS))]
    steps = effort.pick(quick=2_000, normal=200_000, full=1_000_000)
    return {name: partial(compared, name, steps, RUNS) for name in names}
