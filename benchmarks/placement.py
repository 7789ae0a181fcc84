"""Speed-up of optimized placements of real models on real cores, and accuracy of predictions.

    python -m benchmarks.placement

For each example: the measured step of the best placement against one core, by wall time and by time
rebuilt from CPU clocks (more accurate on a busy machine); predicted over measured; and the executor
on one core against the unplaced model on one core, run in turn.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import placer
from envs.measurement import Measurement
from graphs.extract import Step
from graphs.extract.step import LossModule
from placer.result import Result
from placer.search.candidate import Candidate
from placer.target import load_step

EXAMPLES = {
    "Inception-V3, batch 2": "inception.py:build",
    "two towers, batch 256": "two_towers.py:build",
    "NMT with attention, batch 32": "nmt.py:build",
}
FOLDER = Path(__file__).parents[1] / "examples"
BUDGET = "10s"
PAIRS = 5


def main() -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        print("a placement over two cores needs two cores; this machine has one")
        return
    devices = ",".join(f"core:{core}" for core in cores)
    print(f"training steps on {devices}, search {BUDGET}, load {os.getloadavg()[0]:.1f}")
    for name, target in EXAMPLES.items():
        step = load_step(f"{FOLDER}/{target}", training=True)
        found = placer.optimize(
            step.model,
            step.inputs,
            loss=step.loss,
            devices=devices,
            budget=BUDGET,
            progress=False,
        )
        report(name, found)
        print(f"  executor on one core / eager on one core: {overhead(found, cores[0])}")


def report(name: str, found: Result) -> None:
    single, best = found.single, found.best
    assert single is not None
    one, two = single.measurement, best.measurement
    assert one is not None
    assert two is not None
    print(f"{name}: {len(found.problem.graph)} ops, best: {best.name}")
    print(f"  one core   {spread(one)}   predicted/measured {accuracy(single)}")
    print(f"  placement  {spread(two)}   predicted/measured {accuracy(best)}")
    print(
        f"  speed-up {one.median_s / two.median_s:.2f}x by wall time, "
        f"{one.rebuilt_median_s / two.rebuilt_median_s:.2f}x by rebuilt time; "
        f"contention {one.contention:.2f} and {two.contention:.2f}"
    )


def spread(seen: Measurement) -> str:
    low, high = np.percentile(seen.wall_s, [25, 75]) * 1e3
    return (
        f"{seen.median_s * 1e3:7.1f} ms ({low:.1f} to {high:.1f}), "
        f"rebuilt {seen.rebuilt_median_s * 1e3:7.1f} ms"
    )


def accuracy(candidate: Candidate) -> str:
    assert candidate.measurement is not None
    return (
        f"{candidate.predicted_s / candidate.measurement.median_s:.2f} wall, "
        f"{candidate.predicted_s / candidate.measurement.rebuilt_median_s:.2f} rebuilt"
    )


def overhead(found: Result, core: int) -> str:
    """Return the time ratios of placed to plain model on one core, results copied back included."""
    assert found.extraction is not None
    assert found.single is not None
    step = found.extraction.step
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    ratios = []
    with placer.apply(step.model, found.single.placement, step.inputs, loss=step.loss) as placed:
        os.sched_setaffinity(0, {core})
        torch.set_num_threads(1)
        for _ in range(PAIRS + 1):
            eager_s = timed(step, lambda: LossModule(step)(*step.inputs).backward())
            placed_s = timed(step, lambda: placed.step(step.inputs))
            ratios.append(placed_s / eager_s)
    os.sched_setaffinity(0, before)
    torch.set_num_threads(threads)
    ratios = sorted(ratios[1:])
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def timed(step: Step, work: Callable[[], object]) -> float:
    step.model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
