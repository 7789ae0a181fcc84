"""Output of a replica plan: terminal tables and JSON data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

from envs.collectives import AllReduce
from envs.hardware.units import human_bytes, milliseconds
from placer.replicate.messages import remarks_of, verdict_of
from placer.replicate.result import ReplicaPlan, Split
from placer.report.table import CHOSEN
from placer.result import finite

COLUMNS: Final = ("samples/s", "exposed\nms", "hidden\nms", "efficiency")
LEGEND: Final = (
    f"{CHOSEN} chosen, the most samples/s; exposed: communication that makes the step longer; "
    "hidden: communication that overlaps with the step; efficiency: samples/s over the number of "
    "replicas times those of one; reduction: of the largest bucket"
)


def print_plan(plan: ReplicaPlan, console: Console) -> None:
    """Print the splits, the scaling curve of the best one and the verdict."""
    graph = plan.problem.graph
    console.print(
        f"{graph.name}: replicas of {len(graph)} ops on the {len(plan.problem.cluster)} devices of "
        f"{plan.problem.cluster.name}"
    )
    if plan.requested.accumulate > 1:
        console.print(f"A step is {plan.requested.accumulate} passes and one reduction.")
    times = ("predicted\nms", "measured\nms") if plan.was_run else ("step\nms",)
    table = _table("replicas x devices", *times, *COLUMNS)
    table.add_column("memory", justify="right", no_wrap=True)
    table.add_column("reduction", overflow="fold")
    for split in plan.shown:
        is_best = split is plan.best
        name, *cells = _split_cells(split, with_measured=plan.was_run)
        mark = CHOSEN if is_best else " "
        table.add_row(f"{mark} {name}", *cells, style="bold green" if is_best else "")
    console.print(table)
    for split in plan.shown:
        if split.step is None:
            console.print(f"{split.name}: {split.why}")
    curve = _table("replicas", "devices", *COLUMNS)
    for point in plan.curve:
        cells = _scaling_cells(
            point.samples_per_s, point.exposed_s, point.hidden_s, point.efficiency
        )
        style = "dim" if point.beyond_cluster else ""
        curve.add_row(str(point.replicas), str(point.devices), *cells, style=style)
    which, how = "best placement", ""
    if plan.was_run:
        which, how = "placement with the best prediction", ", simulated"
    console.print(f"The {which} on 1 .. {plan.curve[-1].devices} devices{how}:")
    console.print(curve)
    legend = LEGEND + "; samples/s: measured where a split was run" * plan.was_run
    console.print(legend, style="dim")
    for remark in remarks_of(plan):
        console.print(remark)
    console.print(verdict_of(plan))


def plan_to_dict(plan: ReplicaPlan) -> dict[str, Any]:
    """Return the plan as plain data for JSON; units are in the names, None if it cannot run."""
    return {
        "splits": [_split(plan, split) for split in plan.splits],
        "accumulate": plan.requested.accumulate,
        "curve": [
            asdict(point) | {"samples_per_s": finite(point.samples_per_s)} for point in plan.curve
        ],
        "searched": plan.searched,
        "left_out": plan.left_out,
        "search_s": plan.search_s,
        "cost_source": dict(plan.cost_source),
        "remarks": remarks_of(plan),
        "verdict": verdict_of(plan),
    }


def _split(plan: ReplicaPlan, split: Split) -> dict[str, Any]:
    step, result = split.step, split.result
    row: dict[str, Any] = {
        "replicas": split.replicas,
        "devices_each": split.devices_each,
        "groups": [list(group) for group in split.groups],
        "samples": split.samples,
        "feasible": step is not None,
        "why": split.why,
        "best": split is plan.best,
        "baseline": split.is_baseline,
        **_measured(split),
    }
    if step is None or result is None:
        return row
    return row | {
        "plan": result.best.name,
        "step_s": split.step_s,
        "alone_s": step.alone_s,
        "samples_per_s": finite(split.samples_per_s),
        "exposed_s": split.exposed_s,
        "hidden_s": step.hidden_s,
        "no_overlap_s": step.no_overlap_s,
        "full_overlap_s": step.full_overlap_s,
        "efficiency": finite(split.efficiency),
        "buckets": len(step.buckets),
        "reductions": list(dict.fromkeys(_name(reduction) for _, reduction in step.reductions)),
        "peak_memory_bytes": result.best.peak_memory_bytes,
    }


def _measured(split: Split) -> dict[str, Any]:
    """Return the keys of a split that was run; "unplaced" only of one that always is."""
    keys: dict[str, Any] = {"unplaced": True} if split.joined else {}
    runs = split.measurement
    if runs is None:
        return keys
    return keys | {
        "measured_step_s": split.measured_s,
        "measured_samples_per_s": split.measured_samples_per_s,
        "rounds": len(runs.wall_s),
        "spread": runs.spread if runs.ok else None,
        "failure": runs.failure,
    }


def _name(reduction: AllReduce) -> str:
    levels = ", ".join(reduction.by_level)
    return f"{reduction.algorithm} ({levels})" if levels else reduction.algorithm


def _table(first: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _split_cells(split: Split, *, with_measured: bool) -> list[str]:
    step, result = split.step, split.result
    if step is None or result is None:
        return [split.name, *["-"] * (6 + with_measured), ""]
    _, reduction = max(step.reductions, key=lambda bucket: bucket[0], default=(0, None))
    measured = [] if split.measured_s is None else [milliseconds(split.measured_s)]
    samples_per_s = split.measured_samples_per_s or split.samples_per_s
    return [
        split.name,
        milliseconds(split.step_s),
        *(measured or ["-"] * with_measured),
        *_scaling_cells(samples_per_s, split.exposed_s, step.hidden_s, split.efficiency),
        human_bytes(max(result.best.peak_memory_bytes.values())),
        _name(reduction) if reduction is not None else "",
    ]


def _scaling_cells(
    samples_per_s: float, exposed_s: float, hidden_s: float, efficiency: float
) -> list[str]:
    times = milliseconds(exposed_s), milliseconds(hidden_s)
    return [f"{samples_per_s:.4g}", *times, f"{efficiency:.1%}"]
