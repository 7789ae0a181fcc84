"""Data of a report, ready for JSON.

::

    {"graph", "cluster", "objective", "verdict", "remarks": [str], "micro_batches",
     "made_by": {"placer", "seed", "budget", "version"}, "cost_source": {device kind: source},
     "step_s": value of the objective, "judged": "measured" | "cpu-clock" | "predicted",
     "wall_s": measured step time by the wall clock, "speed_up", "lower_bound_s",
     "speed_up_is": as "judged", "best_single": name of the candidate,
     "devices": [{"name", "kind", "memory_bytes", "source"}],
     "candidates": [{"name", "predicted_s", "measured", "speed_up", "speed_up_is", "best",
                     "memory_bytes": predicted, by device, "measured_memory_bytes": by device,
                     "why": why it cannot run}],
     "ops": columns of N ops and E edges, see :func:`ops_data`,
     "timeline": the simulated step, see :mod:`placer.report.html.schedule`,
     "search": {"seconds", "lines": [{"name", "evaluations", "seconds", "cost_s"}]},
     "commands": [{"what", "command"}]}

Unknown numbers are null. Times are whole nanoseconds (``_ns``) where there are many, seconds
(``_s``) elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any

import numpy as np

from envs.hardware.units import ratio_of
from envs.measurement import Measurement
from envs.placement import Placement
from envs.problem import Problem
from envs.simulator import Simulated
from graphs.graph import PHASES
from placer.messages.remarks import CPU_CLOCK
from placer.messages.verdicts import clocks_disagree
from placer.report.html.commands import Command
from placer.report.html.schedule import timeline_data
from placer.result import Result, finite
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


def report_data(result: Result, commands: Sequence[Command] = ()) -> dict[str, Any]:
    """Return all data of the report of an optimization."""
    problem, placement, runs = result.problem, result.placement, Runs(result)
    best = runs.times(result.best)
    speed_up, speed_up_is = runs.speed_up(result.best)
    return {
        "graph": problem.graph.name,
        "cluster": problem.cluster.name,
        "objective": placement.objective,
        "verdict": runs.verdict,
        "remarks": result.remarks,
        "micro_batches": placement.micro_batches,
        "made_by": asdict(placement.made_by),
        "cost_source": dict(result.cost_source),
        "step_s": best["step_s"] if best else finite(result.best.predicted_s),
        "judged": runs.clock if best else "predicted",
        "wall_s": best["wall_s"] if best else None,
        "speed_up": speed_up,
        "speed_up_is": speed_up_is,
        "lower_bound_s": finite(result.lower_bound_s),
        "best_single": None if result.single is None else result.single.name,
        "devices": [
            {
                "name": device.name,
                "kind": device.kind,
                "memory_bytes": device.memory_bytes,
                "source": device.source,
            }
            for device in problem.cluster.devices
        ],
        "candidates": _candidates(runs),
        "ops": ops_data(problem, placement),
        "timeline": timeline_data(Simulated(problem), placement),
        "search": {"seconds": result.search_s, "lines": _lines(result.search_trace)},
        "commands": [asdict(command) for command in commands],
    }


class Runs:
    """Measured times of a result's candidates, or those that the placement file records.

    A file records the medians of the best candidate and of the best single device; its spread and
    its shortest times are by the wall clock.
    """

    def __init__(self, result: Result) -> None:
        self.result = result
        placement = result.placement  # what a file of replicas records is of all of them
        is_recorded = result.best.measurement is None and placement.replicas is None
        self.recorded: dict[str, Any] = dict((is_recorded and placement.measured) or {})

    @cached_property
    def clock(self) -> str:
        """Return the clock that counts: "measured" by the wall clock, or "cpu-clock"."""
        step_s = self.recorded.get("step_s")
        by_wall = self.recorded.get("wall_median_s", step_s) == step_s
        return "cpu-clock" if self.result.contended or not by_wall else "measured"

    def times(self, row: Candidate) -> dict[str, Any] | None:
        """Return median, quartiles and shortest time of the steps; None if it was not run here."""
        if row.measurement is not None and row.measurement.node:
            return None
        if row.measurement is not None:
            return _times(row.measurement, contended=self.clock == "cpu-clock")
        prefix = self._prefix(row)
        if prefix is None or f"{prefix}step_s" not in self.recorded:
            return None
        step_s = float(self.recorded[f"{prefix}step_s"])
        of_wall = self.recorded if self.clock == "measured" else {}
        half = None if prefix or "spread" not in of_wall else step_s * of_wall["spread"] / 2
        return {
            "step_s": step_s,
            "wall_s": self.recorded.get(f"{prefix}wall_median_s"),
            "low_s": None if half is None else step_s - half,
            "high_s": None if half is None else step_s + half,
            "min_s": of_wall.get(f"{prefix}wall_min_s"),
            "rounds": None if prefix else self.recorded.get("rounds"),
        }

    def _prefix(self, row: Candidate) -> str | None:
        """Return the prefix of a candidate's keys in the file, None if it is not recorded."""
        if row is self.result.best:
            return ""
        if self.result.placement.unplaced:  # its single device need not be that of the file
            return None
        return "single_device_" if row is self.result.single else None

    def speed_up(self, row: Candidate) -> tuple[float | None, str]:
        """Return the speed-up over the best single device, and which times it compares."""
        single = self.result.single
        of_single, of_row = single and self.times(single), self.times(row)
        if of_single and of_row:
            return finite(ratio_of(of_single["step_s"], of_row["step_s"])), self.clock
        return finite(self.result.speedup_of(row)), "predicted"

    def memory_bytes(self, row: Candidate) -> list[int | None]:
        """Return the measured peak of each device."""
        peaks: Mapping[str, int] = {}
        if row.measurement is not None:
            peaks = row.measurement.peak_memory_bytes
        elif row is self.result.best:
            peaks = self.recorded.get("peak_memory_bytes", {})
        return [peaks.get(name) for name in self.result.problem.cluster.names]

    @property
    def verdict(self) -> str:
        """Return the verdict of the result; a recorded gain counts, unless it no longer fits."""
        result = self.result
        ratio, source = self.speed_up(result.best)
        is_gain = not (result.best.is_single or result.best.is_unplaced) and np.isfinite(
            result.best.predicted_s
        )
        if not self.recorded or source == "predicted" or ratio is None or not is_gain:
            return result.verdict
        gain = f"{ratio:.2f}x faster than the best single device"
        if source == "measured":
            return f"{gain}, measured when it was made."
        wall_s = self.recorded.get("wall_median_s")
        single_s = self.recorded.get("single_device_wall_median_s")
        by_wall = single_s / wall_s if wall_s and single_s else ratio
        return (
            clocks_disagree(ratio, by_wall, "the best single device")
            or f"{gain}, by {CPU_CLOCK} when it was made."
        )


def _candidates(runs: Runs) -> list[dict[str, Any]]:
    result, rows = runs.result, []
    names = result.problem.cluster.names
    for row in result.candidates:
        speed_up, speed_up_is = runs.speed_up(row)
        has_memory = row.placement.device_names == names  # the unplaced model has its own device
        data = {
            "name": row.name,
            "predicted_s": finite(row.predicted_s),
            "measured": runs.times(row),
            "speed_up": speed_up,
            "speed_up_is": speed_up_is,
            "memory_bytes": list(row.peak_memory_bytes.values()) if has_memory else [],
            "measured_memory_bytes": runs.memory_bytes(row) if has_memory else [],
            "best": row is result.best,
            "why": row.failure or ("" if np.isfinite(row.predicted_s) else row.why),
        }
        rows.append(data)
    return rows


def _times(runs: Measurement, *, contended: bool) -> dict[str, Any] | None:
    if not runs.ok:
        return None
    times_s = runs.cpu_clock_s if contended else runs.wall_s
    low_s, high_s = np.percentile(times_s, [25, 75]).tolist()
    return {
        "step_s": runs.step_s(contended=contended),
        "wall_s": runs.median_s,
        "low_s": low_s,
        "high_s": high_s,
        "min_s": float(times_s.min()),
        "rounds": len(runs.wall_s),
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
