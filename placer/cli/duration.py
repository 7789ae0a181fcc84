"""The duration of an optimization: an estimate before it, and its longest stages after it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from envs.hardware.cluster import Cluster
    from placer.job import Job

LOADING_S: Final = 10.0
"""Seconds on two quiet cores for libraries, extraction and op costs of a small model."""
COMPILING_S: Final = 10.0
CALIBRATING_S: Final = 14.0
SMALLEST_SHARE: Final = 0.1
"""Share of the total time below which a stage is not named."""


def estimate(job: Job) -> str:
    """Return a sentence with the time that a job takes on a quiet machine, and its parts."""
    from envs.hardware.discover import is_here
    from placer.search.compilation import is_compiled

    is_here_and_has_model = not job.has_costs and all(map(is_here, job.cluster.names))
    is_run = is_here_and_has_model and job.replicas is None and job.search.measure
    budget = job.search.search_budget if is_run else job.search.budget
    parts_s: dict[str, float] = {}
    if not job.has_costs:
        parts_s["loading, extraction and op costs (more for large models)"] = LOADING_S
    if not is_compiled():
        parts_s["compilation (once)"] = COMPILING_S
    if is_here_and_has_model and not (job.cluster.links or _is_calibrated(job.cluster)):
        parts_s["calibration of devices (once)"] = CALIBRATING_S
    parts_s["search"] = math.inf if budget.seconds is None else budget.seconds
    if is_run:
        parts_s["runs of the best candidates"] = job.search.measuring_s
    known_s = {name: seconds for name, seconds in parts_s.items() if math.isfinite(seconds)}
    limited = f"a search of {budget.evaluations} evaluations"
    unknown = [limited if name == "search" else name for name in parts_s if name not in known_s]
    if not known_s:
        return f"This takes as long as {' and '.join(unknown)}."
    total = " plus ".join([f"about {duration(sum(known_s.values()))}", *unknown])
    parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in known_s.items())
    return f"This takes {total} on a quiet machine: {parts}."


def _is_calibrated(cluster: Cluster) -> bool:
    """Return whether speeds of these devices are cached, by any version of torch.

    The exact answer would import torch before the first line is printed.
    """
    from envs.hardware.cache_folder import speed_files
    from envs.hardware.cluster import load_cluster

    for path in speed_files():
        with suppress(OSError, ValueError):
            if path.suffix == ".toml" and load_cluster(path).names == cluster.names:
                return True
    return False


def taken(total_s: float, stages_s: Mapping[str, float]) -> str:
    """Return the duration of a job, and of the stages that took a large part of it.

    >>> taken(30.0, {"Loading the model": 9.0, "Calibrating": 0.1, "Compiling (once, 10 s)": 12.0})
    'took 30 s, of which loading the model 9 s, compiling 12 s'
    """
    stages = [
        f"{_short(title)} {duration(stage_s)}"
        for title, stage_s in stages_s.items()
        if stage_s >= SMALLEST_SHARE * total_s
    ]
    return f"took {duration(total_s)}{', of which ' if stages else ''}{', '.join(stages)}"


def _short(title: str) -> str:
    """Return what a stage does, without the reason before it and the explanation after it."""
    what = title.rpartition(": ")[2] if " (" not in title else title.partition(" (")[0]
    return f"{what[:1].lower()}{what[1:]}"


def duration(seconds: float) -> str:
    """Format a duration in seconds, from 90 s in minutes, from 90 min in hours.

    >>> duration(20.0), duration(600.0), duration(86400.0)
    ('20 s', '10 min', '24 h')
    """
    if seconds < 90:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 5400 else f"{seconds / 3600:.4g} h"
