"""Summary of a graph: terminal tables and JSON data."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from envs.hardware.units import human_bytes, milliseconds
from placer.messages.remarks import NO_OPTIMIZER
from placer.report.table import human_flops

if TYPE_CHECKING:
    from graphs.costs import GraphSummary, Work


def print_summary(summary: GraphSummary, console: Console) -> None:
    """Print ops by phase and sizes; for each device kind work, critical path and costliest ops."""
    count = sum(summary.ops.values())
    console.print(f"{summary.name}: {count} ops, {summary.edges} edges", highlight=False)
    table = Table(box=box.SIMPLE, show_header=False)
    table.add_column("what")
    table.add_column("how much", justify="right")
    for phase, ops in summary.ops.items():
        if ops:
            table.add_row(f"{phase} ops", str(ops))
    table.add_row("FLOPs", human_flops(summary.flops))
    table.add_row("parameters and buffers", human_bytes(summary.parameter_bytes))
    if summary.gradient_bytes:
        table.add_row("gradients", human_bytes(summary.gradient_bytes))
    if summary.optimizer_bytes:
        table.add_row("optimizer state", human_bytes(summary.optimizer_bytes))
    table.add_row("saved for backward", human_bytes(summary.saved_bytes))
    for kind, work in summary.work.items():
        table.add_row(f"total work on {_named(kind)}", f"{milliseconds(work.total_s)} ms")
        table.add_row(
            f"critical path on {_named(kind)}", f"{milliseconds(work.critical_path_s)} ms"
        )
        table.add_row("total work / critical path (headroom)", f"{work.headroom:.2f}x")
    console.print(table)
    if summary.work:
        console.print(
            "Headroom is for any number of such devices; N of them are at most N times as fast."
        )
    if summary.ops["backward"] and not summary.ops["optimizer"]:
        console.print(NO_OPTIMIZER)
    for kind, work in summary.work.items():
        console.print(_dearest(kind, work))
    for kind, known in summary.partly_known.items():
        console.print(f"Costs on {_named(kind)} are known for {known} of {count} ops only.")
    if not summary.work and not summary.partly_known:
        console.print("Costs are unknown, and with them the critical path and the headroom.")


def summary_to_dict(summary: GraphSummary) -> dict[str, Any]:
    """Return the summary as plain data for JSON; units are in the names."""
    data = asdict(summary)
    for kind, work in summary.work.items():
        data["work"][kind]["headroom"] = work.headroom
    return data


def _dearest(kind: str, work: Work) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(f"costliest ops on {_named(kind)}", overflow="fold")
    table.add_column("ms", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("source", overflow="fold")
    for op in work.dearest:
        share = op.cost_s / work.total_s if work.total_s > 0 else 0.0
        table.add_row(op.id, milliseconds(op.cost_s), f"{share:.1%}", op.source or "unknown")
    return table


def _named(kind: str) -> str:
    return "any kind" if kind == "*" else kind
