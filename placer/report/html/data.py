"""Data of a report, ready for JSON.

::

    {"graph", "cluster", "objective", "verdict", "remarks": [str], "micro_batches",
     "made_by": {"placer", "seed", "budget", "version"}, "cost_source": {device kind: source},
     "step_s": value of the objective, "judged": "measured" | "rebuilt" | "predicted",
     "wall_s": measured step time by the wall clock, "speed_up", "lower_bound_s",
     "speed_up_is": "measured" | "rebuilt" | "predicted", "best_single": name of the candidate,
     "devices": [{"name", "kind", "memory_bytes", "source"}],
     "candidates": [{"name", "predicted_s", "measured", "speed_up", "speed_up_is", "best",
                     "memory_bytes": predicted, by device, "measured_memory_bytes": by device,
                     "why": why it cannot run}],
     "ops": columns of N ops and E edges, see :func:`ops_data`,
     "timeline": the simulated step, see :mod:`placer.report.html.schedule`,
     "search": {"seconds", "lines": [{"name", "evaluations", "seconds", "cost_s"}]},
     "commands": [{"what", "command"}]}

Unknown numbers are null. Times are whole nanoseconds (``_ns``) where there are many, seconds
(``_s``) elsewhere; "rebuilt" marks CPU-clock times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from envs.measurement import Measurement
from envs.placement import Placement
from envs.problem import Problem
from envs.simulator import Simulated
from graphs.graph import PHASES
from placer.messages import CPU_CLOCK
from placer.report.html.commands import Command
from placer.report.html.schedule import timeline_data
from placer.result import Result
from placer.search.candidate import Candidate
from placer.search.request import SearchTrace


def ops_data(problem: Problem, placement: Placement) -> dict[str, Any]:
    """Return columns of N ops, by index, and of E edges.

    ::

        {"id": [str], "kind": [index into "kinds"], "kinds": [str], "phases": [str],
         "module": [index into "modules"], "modules": [str], "phase": [index into "phases"],
         "device": [index of device], "cost_ns": [on that device, launch included], "flops",
         "moved_bytes", "output_bytes", "parameter_bytes", "resident_bytes", "saved_bytes",
         "source": [op], "target": [op], "bytes": [int]}
    """
    graph = problem.graph
    devices, _ = placement.arrays()
    kinds, kind = _coded(graph.ops)
    modules, module = _coded(graph.modules)
    return {
        "id": list(graph.ids),
        "kinds": kinds,
        "kind": kind,
        "modules": modules,
        "module": module,
        "phases": list(PHASES),
        "phase": graph.phase.tolist(),
        "device": devices.tolist(),
        "cost_ns": problem.cost_ns[np.arange(len(graph)), devices].tolist(),
        "flops": graph.flops.tolist(),
        "moved_bytes": graph.moved_bytes.tolist(),
        "output_bytes": graph.output_bytes.tolist(),
        "parameter_bytes": graph.parameter_bytes.tolist(),
        "resident_bytes": graph.resident_bytes.tolist(),
        "saved_bytes": graph.saved_bytes.tolist(),
        "source": np.repeat(np.arange(len(graph)), np.diff(graph.successor_start)).tolist(),
        "target": graph.successors.tolist(),
        "bytes": graph.edge_bytes.tolist(),
    }


def _coded(names: tuple[str, ...]) -> tuple[list[str], list[int]]:
    """Return the distinct names in order of first use, and the index of each name."""
    index: dict[str, int] = {}
    codes = [index.setdefault(name, len(index)) for name in names]
    return list(index), codes


UNPLACED = "not placed"


def report_data(found: Result, commands: Sequence[Command] = ()) -> dict[str, Any]:
    """Return all data of the report of an optimization.

    Raises:
        ValueError: the placement cannot run, so there is no step to show.
    """
    problem, placement = found.problem, found.placement
    simulated = Simulated(problem)
    judged_s, wall_s = _judged_s(found), _wall_s(found)
    return {
        "graph": problem.graph.name,
        "cluster": problem.cluster.name,
        "objective": placement.objective,
        "verdict": _verdict(found),
        "remarks": found.remarks,
        "micro_batches": placement.micro_batches,
        "made_by": asdict(placement.made_by),
        "cost_source": dict(found.cost_source),
        "step_s": _finite(judged_s if judged_s is not None else found.best.predicted_s),
        "judged": "predicted" if judged_s is None else _how(found),
        "wall_s": wall_s,
        "speed_up": _speed_up(found),
        "speed_up_is": _speed_up_is(found, found.best),
        "lower_bound_s": _finite(found.lower_bound_s),
        "best_single": None if found.single is None else found.single.name,
        "devices": [
            {
                "name": device.name,
                "kind": device.kind,
                "memory_bytes": device.memory_bytes,
                "source": device.source,
            }
            for device in problem.cluster.devices
        ],
        "candidates": _candidates(found),
        "ops": ops_data(problem, placement),
        "timeline": timeline_data(simulated, placement),
        "search": {"seconds": found.search_s, "lines": _lines(found.search_trace)},
        "commands": [asdict(command) for command in commands],
    }


def _verdict(found: Result) -> str:
    ratio = _recorded_speed_up(found)
    if ratio is not None and not found.best.is_single and np.isfinite(found.best.predicted_s):
        told = f"{ratio:.2f}x faster than the best single device"
        if _how(found) == "measured":
            return f"{told}, measured when it was made."
        by_wall = _recorded_by_wall(found)
        busy = "" if by_wall is None else f" ({by_wall:.2f}x by the wall clock of a busy machine)"
        return f"{told}, by {CPU_CLOCK} when it was made{busy}."
    return found.verdict


def _recorded(found: Result) -> dict[str, Any] | None:
    """Return the measurement recorded in the placement, None if the runs themselves are known."""
    measured = found.placement.measured
    return dict(measured) if measured and found.best.measurement is None else None


def _how(found: Result) -> str:
    known = _recorded(found)
    if known is None:
        return "rebuilt" if found.contended else "measured"
    step_s = known.get("step_s")
    of_wall = known.get("wall_median_s", step_s) == step_s
    return "measured" if of_wall else "rebuilt"


def _recorded_speed_up(found: Result) -> float | None:
    known = _recorded(found)
    if known is None or not known.get("single_device_step_s") or not known.get("step_s"):
        return None
    return float(known["single_device_step_s"] / known["step_s"])


def _recorded_by_wall(found: Result) -> float | None:
    known = _recorded(found) or {}
    if not known.get("single_device_wall_median_s") or not known.get("wall_median_s"):
        return None
    return float(known["single_device_wall_median_s"] / known["wall_median_s"])


def _speed_up(found: Result) -> float | None:
    ratio = _recorded_speed_up(found)
    return _finite(found.speedup) if ratio is None else ratio


def _speed_up_is(found: Result, row: Candidate) -> str:
    """Return which times a speed-up compares; measured, rebuilt and predicted are never mixed."""
    single = found.single
    if single is not None and single.measurement is not None and row.measurement is not None:
        return _how(found)
    recorded = _recorded_speed_up(found) is not None and row in (found.best, single)
    return _how(found) if recorded else "predicted"


def _judged_s(found: Result) -> float | None:
    if found.best.measurement is not None:
        return found.step_s(found.best)
    known = _recorded(found)
    return None if known is None else known.get("step_s")


def _wall_s(found: Result) -> float | None:
    if found.best.measurement is not None:
        return _finite(found.best.measurement.median_s)
    return (_recorded(found) or {}).get("wall_median_s")


def _candidates(found: Result) -> list[dict[str, Any]]:
    """Return the candidates and the unplaced baseline."""
    rows = [
        {
            "name": row.name,
            "predicted_s": _finite(row.predicted_s),
            "measured": _measured(found, row),
            "speed_up": _speed_up(found) if row is found.best else _finite(found.speedup_of(row)),
            "speed_up_is": _speed_up_is(found, row),
            "memory_bytes": list(row.peak_memory_bytes.values()),
            "measured_memory_bytes": _measured_memory(found, row),
            "best": row is found.best,
            "why": row.failure or ("" if np.isfinite(row.predicted_s) else row.why),
        }
        for row in found.candidates
    ]
    if found.all_cores is not None:
        rows.append(
            {
                "name": UNPLACED,
                "predicted_s": None,
                "measured": _runs(found.all_cores, loaded=False),
                "speed_up": None,
                "speed_up_is": "measured",
                "memory_bytes": [],
                "measured_memory_bytes": [],
                "best": False,
                "why": found.all_cores.failure,
            }
        )
    return rows


def _measured(found: Result, row: Candidate) -> dict[str, Any] | None:
    if row.measurement is not None:
        return _runs(row.measurement, loaded=found.contended)
    known = _recorded(found) or {}
    of_wall = _how(found) == "measured"  # as are spread and shortest time
    if row is found.best and "step_s" in known:
        half = float(known["spread"]) / 2 if of_wall and "spread" in known else None
        min_s = known.get("wall_min_s") if of_wall else None
        wall_s = known.get("wall_median_s")
        return _rounds(float(known["step_s"]), wall_s, half, min_s, known.get("rounds"))
    if row is found.single and "single_device_step_s" in known:
        min_s = known.get("single_device_wall_min_s") if of_wall else None
        wall_s = known.get("single_device_wall_median_s")
        return _rounds(float(known["single_device_step_s"]), wall_s, min_s=min_s)
    return None


def _measured_memory(found: Result, row: Candidate) -> list[int | None]:
    peaks: Mapping[str, int] = {}
    if row.measurement is not None:
        peaks = row.measurement.peak_memory_bytes
    elif row is found.best:
        peaks = (_recorded(found) or {}).get("peak_memory_bytes", {})
    return [peaks.get(name) for name in found.problem.cluster.names]


def _rounds(
    step_s: float,
    wall_s: float | None,
    half: float | None = None,
    min_s: float | None = None,
    rounds: int | None = None,
) -> dict[str, Any]:
    """Return the runs as a placement file records them; ``half`` is half the relative spread.

    Quartiles of CPU-clock times and of the single device are not recorded.
    """
    return {
        "step_s": step_s,
        "wall_s": wall_s,
        "low_s": None if half is None else step_s * (1 - half),
        "high_s": None if half is None else step_s * (1 + half),
        "min_s": min_s,
        "rounds": rounds,
    }


def _runs(seen: Measurement, *, loaded: bool) -> dict[str, Any] | None:
    if not seen.ok:
        return None
    times_s = seen.cpu_clock_s if loaded else seen.wall_s
    low_s, high_s = np.percentile(times_s, [25, 75]).tolist()
    return {
        "step_s": seen.step_s(contended=loaded),
        "wall_s": seen.median_s,
        "low_s": low_s,
        "high_s": high_s,
        "min_s": float(times_s.min()),
        "rounds": len(seen.wall_s),
    }


def _lines(search_trace: SearchTrace) -> list[dict[str, Any]]:
    """Return the search traces as columns; the last entry is the end, without an improvement."""
    return [
        {
            "name": line.name,
            "evaluations": [*(i.evaluations for i in line.improvements), line.evaluations],
            "seconds": [*(round(i.seconds, 4) for i in line.improvements), round(line.seconds, 4)],
            "cost_s": [*(i.cost_s for i in line.improvements), line.improvements[-1].cost_s],
        }
        for line in search_trace.parts.values()
    ]


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
