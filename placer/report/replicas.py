"""Output of a replica plan: terminal tables of splits and scaling curve, and JSON data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

from placer.milliseconds import milliseconds
from placer.report.table import CHOSEN, human_bytes

if TYPE_CHECKING:
    from envs.collectives import AllReduce
    from envs.replicas import ReplicatedStep
    from placer.replica_plan import CurvePoint, ReplicaPlan, Split

COLUMNS: Final = ("samples/s", "exposed\nms", "hidden\nms", "efficiency")
LEGEND: Final = (
    f"{CHOSEN} chosen, the most samples/s. Exposed: communication that makes the step longer; "
    "hidden: behind the rest of the step; "
    "efficiency: over as many times the samples/s of one replica; reduction: of the largest bucket."
)


def print_plan(plan: ReplicaPlan, console: Console) -> None:
    """Print the splits, the scaling curve of the best one and the verdict."""
    graph = plan.problem.graph
    console.print(
        f"{graph.name}: replicas of {len(graph)} ops on the {len(plan.problem.cluster)} devices of "
        f"{plan.problem.cluster.name}"
    )
    if plan.wanted.accumulate > 1:
        console.print(f"A step is {plan.wanted.accumulate} passes and one reduction.")
    table = _table("replicas x devices", "step\nms", *COLUMNS)
    table.add_column("memory", justify="right", no_wrap=True)
    table.add_column("reduction", overflow="fold")
    for split in plan.shown:
        is_best = split is plan.best
        name, *cells = _cells(split)
        marked = f"{CHOSEN if is_best else ' '} {name}"
        table.add_row(marked, *cells, style="bold green" if is_best else "")
    console.print(table)
    for split in plan.shown:
        if split.step is None:
            console.print(f"{split.name}: {split.why}")
    curve = _table("replicas", "devices", *COLUMNS)
    for point in plan.curve:
        curve.add_row(*_point_cells(point), style="dim" if point.beyond else "")
    console.print(f"The best placement on 1 .. {plan.curve[-1].devices} devices:")
    console.print(curve)
    console.print(LEGEND, style="dim")
    for remark in plan.remarks:
        console.print(remark)
    console.print(plan.verdict)


def plan_to_dict(plan: ReplicaPlan) -> dict[str, Any]:
    """Return the plan as plain data for JSON; units are in the names, None if it cannot run."""
    return {
        "splits": [_split(plan, split) for split in plan.splits],
        "accumulate": plan.wanted.accumulate,
        "curve": [
            {
                "replicas": point.replicas,
                "devices": point.devices,
                "samples_per_s": point.samples_per_s,
                "efficiency": point.efficiency,
                "exposed_s": point.exposed_s,
                "hidden_s": point.hidden_s,
                "beyond_cluster": point.beyond,
                "fits": point.fits,
            }
            for point in plan.curve
        ],
        "searched": plan.searched,
        "left_out": plan.left_out,
        "search_s": plan.search_s,
        "cost_source": dict(plan.cost_source),
        "remarks": plan.remarks,
        "verdict": plan.verdict,
    }


def _split(plan: ReplicaPlan, split: Split) -> dict[str, Any]:
    step, found = split.step, split.found
    row: dict[str, Any] = {
        "replicas": split.replicas,
        "devices_each": split.devices_each,
        "groups": [list(group) for group in split.groups],
        "samples": split.samples,
        "feasible": step is not None,
        "why": split.why,
        "best": split is plan.best,
        "baseline": split.is_baseline,
    }
    if step is None or found is None:
        return row
    return row | {
        "plan": found.best.name,
        "step_s": step.step_s,
        "alone_s": step.alone_s,
        "samples_per_s": split.samples_per_s,
        "exposed_s": step.exposed_s,
        "hidden_s": step.hidden_s,
        "no_overlap_s": step.no_overlap_s,
        "full_overlap_s": step.full_overlap_s,
        "efficiency": split.efficiency,
        "buckets": len(step.buckets),
        "reductions": reductions_of(step),
        "peak_memory_bytes": found.best.peak_memory_bytes,
    }


def reductions_of(step: ReplicatedStep) -> list[str]:
    """Return the all-reduce algorithms in use, each once, with those of levels innermost first."""
    return list(dict.fromkeys(_named(how) for _, how in step.reductions))


def _of_largest(step: ReplicatedStep) -> str:
    _, how = max(step.reductions, key=lambda bucket: bucket[0], default=(0, None))
    return "" if how is None else _named(how)


def _named(how: AllReduce) -> str:
    return f"{how.algorithm} ({', '.join(how.by_level)})" if how.by_level else how.algorithm


def _table(first: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _cells(split: Split) -> list[str]:
    if split.step is None or split.found is None:
        return [split.name, *["-"] * 5, "no room", ""]
    return [
        split.name,
        milliseconds(split.step.step_s),
        f"{split.samples_per_s:.4g}",
        milliseconds(split.step.exposed_s),
        milliseconds(split.step.hidden_s),
        f"{split.efficiency:.1%}",
        human_bytes(max(split.found.best.peak_memory_bytes.values())),
        _of_largest(split.step),
    ]


def _point_cells(point: CurvePoint) -> list[str]:
    return [
        str(point.replicas),
        str(point.devices),
        f"{point.samples_per_s:.4g}",
        milliseconds(point.exposed_s),
        milliseconds(point.hidden_s),
        f"{point.efficiency:.1%}",
    ]
