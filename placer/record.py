"""Predicted and measured times, by clock, as placement files and ``--json`` hold them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from envs.measurement import Measurement
from placer.outcome import Optimization, Row


def with_record(found: Optimization) -> Optimization:
    """Return the result with the best candidate's times recorded in its placement."""
    best = found.best
    predicted = {
        "step_s": best.predicted_s,
        **best.times_s,
        "peak_memory_bytes": best.peak_memory_bytes,
        "lower_bound_s": found.lower_bound_s,
    }
    placement = replace(found.placement, predicted=predicted, measured=_measured(found))
    return replace(found, placement=placement)


def candidates_to_list(found: Optimization) -> list[dict[str, Any]]:
    """Return all candidates as plain data for JSON; None marks unknown values."""
    return [_candidate(found, row) for row in found.rows]


def _measured(found: Optimization) -> dict[str, Any] | None:
    seen, single, unplaced = found.best.measurement, found.single, found.all_cores
    if seen is None:
        return None
    measured: dict[str, Any] = {
        "step_s": found.step_s(found.best),
        "clock": "cpu" if found.loaded else "wall",
        **_clocks(seen),
        "spread": seen.spread,
        "contention": seen.contention,
        "rounds": len(seen.wall_s),
    }
    if seen.peak_memory_bytes:
        measured["peak_memory_bytes"] = dict(seen.peak_memory_bytes)
    if single is not None and single.measurement is not None:
        measured["single_device_step_s"] = found.step_s(single)
        measured |= _clocks(single.measurement, "single_device_")
    if unplaced is not None and unplaced.ok:
        told = _clocks(unplaced, "all_cores_")
        del told["all_cores_rebuilt_s"]  # torch's threads have no common CPU clock
        measured |= told
    return measured


def _clocks(seen: Measurement, whose: str = "") -> dict[str, float]:
    return {
        f"{whose}wall_median_s": seen.median_s,
        f"{whose}wall_min_s": seen.min_s,
        f"{whose}rebuilt_s": seen.cpu_clock_median_s,
    }


def _candidate(found: Optimization, row: Row) -> dict[str, Any]:
    step_s, seen, ratio = row.times_s.get("step_s", row.predicted_s), None, found.speed_up_of(row)
    if row.measurement is not None and row.measurement.ok:
        seen = {
            **_clocks(row.measurement),
            "spread": row.measurement.spread,
            "peak_memory_bytes": dict(row.measurement.peak_memory_bytes),
        }
    return {
        "name": row.name,
        "predicted_step_s": step_s if np.isfinite(row.predicted_s) else None,
        "peak_memory_bytes": dict(row.peak_memory_bytes),
        "measured": seen,
        "speed_up": ratio if np.isfinite(ratio) else None,
        "chosen": row is found.best,
        "why": row.failure or row.why,
    }
