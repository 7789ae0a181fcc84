"""Plans of replicas on two cores: predicted and measured steps, before and after calibration.

Every model is planned twice with an empty cache: trials of the first plan correct the predictions
of the second, which is what ``placer optimize --data-parallel auto`` shows when it is repeated. On
a busy machine nothing is learned, and the table says so.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from benchmarks.record import Effort, Part
from benchmarks.tables import Table
from envs.hardware.discover import physical_cores
from envs.measurement import tied
from envs.replication import Replication
from placer.job import Job, SearchConfig
from placer.replicate.plan import plan_job
from placer.replicate.result import ReplicaPlan, Split
from placer.replicate.trials import per_sample
from placer.sources.target import load_step

MODELS: Final = {
    "two towers": "graphs/models/two_towers.py:build",
    "RNNLM": "graphs/models/rnnlm.py:build",
    "NASNet-A": "graphs/models/nasnet.py:build",
}


def parts(effort: Effort) -> dict[str, Part]:
    """Return one part per model; quick leaves out the largest."""
    names = effort.pick(quick=list(MODELS)[:1], normal=list(MODELS), full=list(MODELS))
    budget = effort.pick(quick="2s", normal="5s", full="20s")
    return {name: partial(compared, name, budget) for name in names}


def compared(name: str, budget: str, found: dict[str, Any]) -> Table:
    """Plan a model twice, and compare predictions with measured steps."""
    with empty_cache():
        plans = [planned(MODELS[name], budget) for _ in range(2)]
    found["plans"] = [[row_of(split) for split in plan.splits] for plan in plans]
    found["busy"] = [plan.is_busy for plan in plans]
    first, second = ({split.name: split for split in plan.splits} for plan in plans)
    rows = []
    for split in sorted(second.values(), key=lambda each: -(each.measured_samples_per_s or 0.0)):
        if split.measured_s is None or (before := first.get(split.name)) is None:
            continue
        chosen = f" ({standing(plans[1])})" if split is plans[1].best else ""
        ratios = (ratio_of(each) for each in (before, split))
        model = f"{name}{'*' if any(found['busy']) else ''}"
        rows.append((f"{model}: {split.name}{chosen}", f"{split.measured_s * 1e3:.1f}", *ratios))
    note = (
        "predicted over measured step of a first plan, and of a second, which predicts splits that "
        "ran from their runs; *: on a BUSY machine"
    )
    columns = ("plan: replicas x cores", "measured ms", "first", "second")
    return Table("Plans of replicas on two cores", note, columns, tuple(rows))


def standing(plan: ReplicaPlan) -> str:
    """Return how the chosen split compares with the fastest one that was run."""
    ran = [each for each in plan.splits if each.was_run]
    if plan.best not in ran:
        return "chosen, not run"
    fastest = max(ran, key=lambda each: each.measured_samples_per_s or 0.0)
    if plan.best is fastest:
        return "chosen, the fastest"
    is_level = tied(per_sample(plan.best), per_sample(fastest))
    return f"chosen, {'level with' if is_level else 'SLOWER than'} the fastest"


def planned(target: str, budget: str) -> ReplicaPlan:
    """Return a plan for replicas on two cores of this machine."""
    devices = ",".join(f"core:{core}" for core in physical_cores()[:2])
    job = Job.of(
        load_step(target, training=True),
        devices,
        search=SearchConfig(budget=budget),
        replicas=Replication(),
    )
    return plan_job(job)


def row_of(split: Split) -> dict[str, Any]:
    """Return the numbers of a split."""
    return {"name": split.name, "predicted_s": split.step_s, "measured_s": split.measured_s}


def ratio_of(split: Split) -> str:
    """Return the predicted over the measured step."""
    return "-" if split.measured_s is None else f"{split.step_s / split.measured_s:.2f}"


@contextmanager
def empty_cache() -> Iterator[None]:
    """Keep measurements in a folder of their own."""
    before = os.environ.get("PLACER_CACHE")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PLACER_CACHE"] = folder
        try:
            yield
        finally:
            del os.environ["PLACER_CACHE"]
            if before is not None:
                os.environ["PLACER_CACHE"] = before
