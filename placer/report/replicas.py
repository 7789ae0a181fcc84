"""Output of a replica plan: terminal tables, all its sentences, and JSON data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

from envs.collectives import AllReduce
from envs.hardware.byte_size import human_bytes
from envs.replicas.reductions import ReplicatedStep
from envs.runtime import reduces_in_backward
from graphs.graph import PHASES
from placer.messages import NO_OPTIMIZER, extraction_remarks
from placer.milliseconds import milliseconds
from placer.parallel.plan import why_not_run
from placer.replicate.result import CurvePoint, ReplicaPlan, Split
from placer.report.table import CHOSEN

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
    for remark in remarks_of(plan):
        console.print(remark)
    console.print(verdict_of(plan))


def verdict_of(plan: ReplicaPlan) -> str:
    """Return the best split and how it compares to pure data parallelism and pure placement."""
    best, step = plan.best, plan.best.step
    assert step is not None
    text = f"{_replicas(best)}: {best.samples_per_s:.4g} samples/s{_gain(plan, best)}, a step of "
    text += f"{milliseconds(step.step_s)} ms"
    if plan.wanted.accumulate > 1:
        text += f" in {plan.wanted.accumulate} passes"
    if best.replicas > 1:
        text += (
            f", {milliseconds(step.exposed_s)} ms of it communication that is not hidden "
            f"({milliseconds(step.hidden_s)} ms are)"
        )
    others = (
        ("pure data parallelism", plan.pure(replicas=True)),
        ("pure placement", plan.pure(replicas=False)),
    )
    compared = [
        f"It is {name}." if other is best else _against(plan, name, other)
        for name, other in others
        if other is not None and best.devices > 1
    ]
    return " ".join([f"{text}.", *compared])


def remarks_of(plan: ReplicaPlan) -> list[str]:
    """Return remarks that qualify the numbers of a plan, one sentence each."""
    return ["Nothing was run: steps are the simulator's.", *_assumptions(plan), *_limits(plan)]


def _assumptions(plan: ReplicaPlan) -> Iterator[str]:
    best, wanted, extraction = plan.best, plan.wanted, plan.extraction
    trains = extraction is None or extraction.step.training
    phases = {PHASES[i] for i in set(plan.problem.graph.phase.tolist())}
    parts = [wanted.parts(split.replicas) for split in plan.splits]
    if extraction is None and any(own > 1 and not wanted.uneven_parts(own) for own in parts):
        yield (
            "Costs and activations for a smaller batch are those of the whole one, divided: "
            "ops that need a large batch to use their device take longer."
        )
    if not trains:
        yield "Inference has no gradients: replicas do not wait for each other."
    elif "backward" not in phases:
        yield "The graph has no backward pass: each op is taken to end with its own gradients."
    if wanted.batch == "global" and wanted.samples is None:
        yield "How many samples the step has is not known: its batch is cut into any parts."
    if trains and "optimizer" not in phases:
        yield NO_OPTIMIZER
    if best.replicas > 1 and best.devices_each > 1:
        yield "Reductions and the transfers of a replica are simulated as if apart."
    if best.replicas > 1 and wanted.payload != "fp32" and wanted.coding_bytes_per_s is None:
        yield f"To turn gradients into {wanted.payload}, and back, is taken to take no time."
    if best.replicas > 1 and not reduces_in_backward(plan.problem.cluster):
        yield (
            "Pinned cores give all gradients at the end: none of the communication is hidden. "
            "It is taken to be as fast as their links; through gloo it is slower."
        )
    idle = plan.problem.device_count - best.devices
    if idle:
        yield f"{idle} of {plan.problem.device_count} devices are left idle."


def _limits(plan: ReplicaPlan) -> Iterator[str]:
    if any(point.beyond for point in plan.curve):
        yield (
            f"Beyond {plan.problem.device_count} devices the outermost level of the cluster's "
            "network is taken to have more ranks."
        )
    if large := [point.replicas for point in plan.curve if not point.fits]:
        yield (
            f"The batch does not fit on {max(large)} replicas or fewer: their steps are those "
            "of devices with more memory."
        )
    if why := why_not_run(plan.replicas):
        yield why
    if plan.left_out:
        yield f"Stopped early: {plan.left_out} searches were not made."
    if plan.extraction is not None:
        yield from extraction_remarks(plan.extraction)


def _gain(plan: ReplicaPlan, split: Split) -> str:
    single, is_shared = plan.pure(replicas=True), plan.wanted.batch == "global"
    if single is None or single.step is None or split.devices == 1 or is_shared:
        return ""
    return f", {split.samples_per_s / single.one_samples_per_s:.3g}x one device"


def _against(plan: ReplicaPlan, name: str, other: Split) -> str:
    if other.step is None:
        return f"{name.capitalize()} ({other.name}) is not possible: {other.why.rstrip('.')}."
    ratio = plan.best.samples_per_s / other.samples_per_s
    why = f"steps of {milliseconds(other.step.step_s)} ms for {other.samples} samples"
    why += _gain(plan, other)
    if other.replicas > 1:
        why += (
            f", of which {milliseconds(other.step.exposed_s)} ms are communication that "
            "nothing hides"
        )
    return f"That is {ratio:.2f}x {name} ({other.name}: {why})."


def _replicas(split: Split) -> str:
    each = "1 device" if split.devices_each == 1 else f"{split.devices_each} devices"
    if split.replicas == 1:
        return f"One replica on {each}"
    return f"{split.replicas} replicas of {each} each"


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
        "remarks": remarks_of(plan),
        "verdict": verdict_of(plan),
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
