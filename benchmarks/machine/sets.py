"""Gain of ops on both cores at once over the unplaced model and over single cores.

    python -m benchmarks sets

The costs of all ops of a step are measured on one core and on the set of both, the least of a few
runs. In a schedule an op takes one core or the set, which needs both cores free; a value that
another core made costs its hand-over, as calibrated; a core that goes from an op of its own to one
of the set, or back, waits for ``change_s``. The same local search finds the best schedule on single
cores and the best with sets. All ops on the set are the unplaced model.

These are simulated times of costs without load: they say what sets can win, before what caches and
memory that both cores share, and further signals, take of it. The parts ``run, ...`` then run the
schedules of the steps where sets win most (:mod:`benchmarks.machine.set_runs`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.machine.set_runs import BOTH, measured_s
from benchmarks.machine.set_schedules import Costs, changes, plan_of, searched
from benchmarks.record import Effort, Part
from benchmarks.tables import Table
from envs.costs.ops import profile_runs
from envs.hardware.cluster import Cluster
from envs.hardware.discover import core_set, device_kind, discover, present
from envs.runtime import calibrated
from graphs.extract import Extraction, Workload, extract
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
RUN_CHANGES_S: Final = (300e-6, 50e-6)
"""Costs of a change in schedules that are run; the first is more than a waiting worker polls."""
RUNS: Final = 9
ROUNDS: Final = 15
RAN: Final = (
    ("Inception-V3", True),
    ("mixture of experts", True),
    ("mixture of experts", False),
)
"""Models and whether they are trained, where sets win most."""


def measured(extraction: Extraction, cores: Cluster, runs: int) -> Costs:
    """Measure the ops of a step on the first core and on the set of both."""
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


def compared(name: str, steps: int, runs: int, found: dict[str, Any]) -> Table:
    """Compare schedules of the training step and of inference of one model."""
    rows = []
    for training in (True, False):
        costs = measured(extract(step_of(name, training=training)), first_cores(), runs)
        one_s, unplaced_s = costs.cost_s.sum(axis=0).tolist()
        best = searched(costs, steps, CHANGES_S)
        least_s = min(best.single_s, unplaced_s)
        what = "training" if training else "inference"
        found[what] = {
            "ops": len(costs.graph),
            "one_core_s": one_s,
            "unplaced_s": unplaced_s,
            "single_cores_s": best.single_s,
            "with_sets_s": best.with_sets_s,
            "on_set": {c: float((place == BOTH).mean()) for c, place in best.with_sets.items()},
        }
        times = (f"{value * 1e3:.1f}" for value in (one_s, unplaced_s, best.single_s))
        ratios = (f"{sets_s / least_s:.2f}" for sets_s in best.with_sets_s.values())
        share = float(costs.cost_s[best.with_sets[CHANGES_S[0]] == BOTH, 1].sum())
        rows.append(
            (f"{name}, {what}", f"{len(costs.graph):,}", *times, *ratios, f"{share * 1e3:.1f}")
        )
    return Table(
        "Core sets",
        "schedules of measured costs in ms; the ratios are with sets over the better of unplaced "
        "and single cores, for 50 and 0 us at every change between core and set",
        ("step", "ops", "one core", "unplaced", "single cores", "50 us", "0 us", "of it on both"),
        tuple(rows),
    )


def ran(
    name: str, training: bool, steps: int, runs: int, rounds: int, found: dict[str, Any]
) -> Table:
    """Run the schedules of a step, on single cores and with sets, and the unplaced model."""
    extraction, cores = extract(step_of(name, training=training)), first_cores()
    costs = measured(extraction, cores, runs)
    best = searched(costs, steps, RUN_CHANGES_S)
    plans = {"single cores": plan_of(costs, best.single, 0.0)}
    simulated_s = {"unplaced": float(costs.cost_s[:, 1].sum()), "single cores": best.single_s}
    for change_s in RUN_CHANGES_S:
        plan = plan_of(costs, best.with_sets[change_s], change_s)
        plans[key := f"sets, {change_s * 1e6:.0f} us, {changes(plan)} changes"] = plan
        simulated_s[key] = best.with_sets_s[change_s]
    step_s = measured_s(extraction, cores.devices, plans, rounds)
    found.update(measured_s=step_s, simulated_s=simulated_s)
    what = f"{name}, {'training' if training else 'inference'}"
    return Table(
        "Core sets, run",
        "schedules on single cores, and with sets for a cost of every change between core and set: "
        "simulated from costs without load, then run in turn, medians in ms; and over the better "
        "of unplaced and single cores, each",
        ("step", "simulated", "run", "simulated / better", "run / better"),
        tuple(
            (
                f"{what}: {key}",
                *(f"{times[key] * 1e3:.1f}" for times in (simulated_s, step_s)),
                *(
                    f"{times[key] / min(times['unplaced'], times['single cores']):.2f}"
                    for times in (simulated_s, step_s)
                ),
            )
            for key in simulated_s
        ),
    )


def step_of(name: str, *, training: bool) -> Workload:
    """Return the step of one of the models."""
    return load_step(f"{FOLDER}/{MODELS[name]}", training=training)


def first_cores() -> Cluster:
    """Return the first two cores of this process, with calibrated links."""
    names = (f"core:{core}" for core in sorted(os.sched_getaffinity(0))[:2])
    return calibrated(discover(",".join(names)))


def parts(effort: Effort) -> dict[str, Part]:
    """Return a part for each model, and one for each step that is run."""
    if effort.level == "quick":
        return {}
    steps = effort.pick(quick=2_000, normal=200_000, full=1_000_000)
    found: dict[str, Part] = {name: partial(compared, name, steps, RUNS) for name in MODELS}
    for name, training in RAN:
        part = f"run, {name}, {'training' if training else 'inference'}"
        found[part] = partial(ran, name, training, steps, RUNS, ROUNDS)
    return found
