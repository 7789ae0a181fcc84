"""Terminal tables of an optimization, a cluster and a placement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sized
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from envs.host_names import is_core
from envs.placement import ROOT, module_of
from placer.milliseconds import milliseconds
from placer.outcome import REBUILT
from placer.search.candidate import SINGLE, WHERE_ALLOWED
from placer.warm_start import WARM_START

if TYPE_CHECKING:
    from envs.cluster import Cluster, Link
    from envs.measurement import Measurement
    from envs.placement import Placement
    from placer.outcome import Optimization, Row

UNITS: Final = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
FLOP_UNITS: Final = (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("kFLOP", 1e3))
MEASURED_COLUMNS: Final = ("wall\nms", "min\nms", "spread", "rebuilt\nms")
QUEUES: Final = {
    "none": "nothing",
    "egress": "all of one sender",
    "pair": "all of one sender to one receiver",
    "bus": "all",
}
"""{sharing of a link: the transfers that queue for each other, in words}."""
UNPLACED: Final = "not placed"
CHOSEN: Final = ">"
MOST_SINGLES: Final = 8
MOST_DEVICES: Final = 16
"""Number of devices up to which tables list each one."""


def print_optimization(found: Optimization, console: Console) -> None:
    """Print all candidates with step times, speed-up and memory, then remarks and the verdict."""
    ran = any(row.measurement is not None for row in found.rows)
    console.print(_title(found))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("candidate", no_wrap=True)
    for column in ("predicted\nms", *(MEASURED_COLUMNS if ran else ()), "speed-up"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("memory", justify="right", overflow="fold")
    rows = _shown(found)
    for row in rows:
        measured = _measured_cells(row.measurement, row.failure) if ran else []
        table.add_row(
            f"{CHOSEN if row is found.best else ' '} {row.name}",
            _ms(row.predicted_s),
            *measured,
            _speed_up(found, row),
            _memory(row),
            style="bold green" if row is found.best else "",
        )
    if found.all_cores is not None:
        *cells, _ = _measured_cells(found.all_cores, found.all_cores.failure)
        cells.append("-")  # the CPU time of torch's threads is unknown
        table.add_row(f"  {UNPLACED}", "-", *cells, "", "", style="dim")
    console.print(table)
    if len(rows) < len(found.rows):
        console.print(f"{len(found.rows) - len(rows)} more single devices are left out.")
    console.print(_legend(found, ran), style="dim")
    for remark in found.remarks:
        console.print(remark)
    console.print(best_line(found))


def _shown(found: Optimization) -> list[Row]:
    first = (found.best, found.single)
    single = [row for row in found.rows if row.name.startswith(SINGLE)]
    single.sort(key=lambda row: (row not in first, row.predicted_s))
    left_out = {id(row) for row in single[MOST_SINGLES:]}
    return [row for row in found.rows if id(row) not in left_out]


def best_line(found: Optimization) -> str:
    """Return the chosen candidate and the verdict."""
    return f"Best: {found.best.name}. {found.verdict}"


def _legend(found: Optimization, ran: bool) -> str:
    text = f"{CHOSEN} {_why_chosen(found)}; speed-up over the best single device"
    names = found.problem.cluster.names
    shown = f"the fullest of {len(names)} devices" if _are_many(names) else " / ".join(names)
    text += f"; simulated peak memory of {shown}"
    if found.placement.objective != "latency":
        text += f"; predicted and speed-up are of the objective, {found.placement.objective}"
    if ran:
        text += (
            "; wall, min: median and shortest by the wall clock; spread: between the quartiles, as "
            "a share of the median; in brackets: predicted, it was not run"
        )
    if ran and is_core(found.problem.cluster.names[0]):
        text += (
            f"; rebuilt: {REBUILT.removeprefix('rebuilt ')}, without what others did to this "
            "machine; no time counts the way of gradients back from the workers"
        )
    elif ran:
        text += "; every device is waited for; rebuilt: the same as wall"
    if any(row.name == WARM_START for row in found.rows):
        text += f"; {WARM_START}: what --start-from names"
    if any(row.name.endswith(WHERE_ALLOWED) for row in found.rows):
        text += f";{WHERE_ALLOWED}: what pins or missing costs keep off that device is elsewhere"
    if found.all_cores is not None:
        text += f"; {UNPLACED}: one process with torch's threads on all cores, by the wall clock"
        if found.loaded and (seen := found.best.measurement) is not None:
            text += f", to be compared with {_ms(seen.median_s)} ms"
    return text + "."


def _why_chosen(found: Optimization) -> str:
    best = found.best
    others = (row for row in found.rows if row.measurement is not None and row.can_run)
    if best.measurement is None or all(found.step_s(best) <= found.step_s(row) for row in others):
        return "chosen, the fastest"
    return "chosen: noise hides which of the fastest is ahead, and of these it is the simplest"


def print_cluster(cluster: Cluster, console: Console) -> None:
    """Print devices and links with their speeds."""
    console.print(cluster.name)
    devices = Table(box=box.SIMPLE_HEAD)
    for column in ("device", "kind", "memory", "GFLOP/s", "GB/s", "source"):
        devices.add_column(column, justify="left" if column in "device kind source" else "right")
    for device in cluster.devices:
        devices.add_row(
            device.name,
            device.kind,
            human_bytes(device.memory_bytes),
            f"{device.peak_flop_per_s / 1e9:.1f}",
            f"{device.bandwidth_bytes_per_s / 1e9:.1f}",
            device.source,
        )
    console.print(devices)
    if not cluster.links:
        return
    links = Table(box=box.SIMPLE_HEAD)
    for column in ("link", "latency", "GB/s", "transfers that wait for each other"):
        links.add_column(column)
    for link in cluster.links:
        links.add_row(
            (" -> " if link.one_way else " - ").join(link.between),
            f"{link.latency_s * 1e6:.1f} us",
            f"{link.bandwidth_bytes_per_s / 1e9:.2f}",
            _queue(link),
        )
    console.print(links)


def _queue(link: Link) -> str:
    both_ways = " and back" if link.sharing == "pair" and not link.full_duplex else ""
    return f"{QUEUES[link.sharing]}{both_ways}"


def print_placement(placement: Placement, console: Console) -> None:
    """Print ops per device for the top modules of a placement, and its step times."""
    console.print(_origin(placement))
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("module")
    for name in placement.device_names:
        table.add_column(name, justify="right")
    for module, count in _ops_by_module(placement).items():
        table.add_row(module, *(str(count[name] or "") for name in placement.device_names))
    console.print(table)
    predicted, measured = placement.predicted or {}, placement.measured or {}
    if "step_s" in predicted:
        console.print(f"predicted step: {_ms(predicted['step_s'])} ms")
    if "step_s" in measured:
        console.print(f"measured step: {_ms(measured['step_s'])} ms{_by_clock(measured)}")


def _by_clock(measured: Mapping[str, Any]) -> str:
    if measured.get("clock") != "cpu" or "wall_median_s" not in measured:
        return ""
    return f" ({REBUILT}; by the wall clock {_ms(measured['wall_median_s'])} ms)"


def placement_to_dict(placement: Placement) -> dict[str, Any]:
    """Return a summary of the placement as plain data for JSON; units are in the names."""
    return {
        "graph": placement.graph,
        "cluster": placement.cluster,
        "devices": list(placement.device_names),
        "ops": len(placement.ops),
        "modules": _ops_by_module(placement),
        "made_by": asdict(placement.made_by),
        "predicted": None if placement.predicted is None else dict(placement.predicted),
        "measured": None if placement.measured is None else dict(placement.measured),
        "replicas": None if placement.replicas is None else placement.replicas.to_dict(),
    }


def told_devices(placement: Placement, module: str) -> str:
    """Return where a module's ops are, as in "core:1 (7 forward ops), core:0 (7 backward ops)"."""
    told = []
    for name, counts in placement.phases_of(module).items():
        ops = ", ".join(f"{count} {phase}" for phase, count in counts.items())
        told.append(f"{name} ({ops} op{'s'[: sum(counts.values()) > 1]})")
    return ", ".join(told)


def human_bytes(size: float) -> str:
    """Format bytes with a decimal unit, as in "21.4 GB"."""
    for unit, scale in UNITS:
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size:.0f} B"


def human_flops(count: float) -> str:
    """Format FLOPs with a decimal unit, as in "3.500 GFLOP"."""
    for unit, scale in FLOP_UNITS:
        if count >= scale:
            return f"{count / scale:,.3f} {unit}"
    return f"{count:.0f} FLOP"


def _title(found: Optimization) -> str:
    graph, names = found.problem.graph, found.problem.cluster.names
    devices = f"{len(names)} devices" if _are_many(names) else ", ".join(names)
    return f"{graph.name}: {len(graph)} ops on {devices}; lower bound {_ms(found.lower_bound_s)} ms"


def _ops_by_module(placement: Placement) -> dict[str, Counter[str]]:
    counts: dict[str, Counter[str]] = {}
    for op_id, d in zip(placement.ops, placement.devices, strict=True):
        top = module_of(op_id).partition(".")[0] or ROOT
        counts.setdefault(top, Counter())[placement.device_names[d]] += 1
    return counts


def _origin(placement: Placement) -> str:
    made = placement.made_by
    parts = [f"{len(placement.ops)} ops of graph {placement.graph[:12]}"]
    if made.placer:
        parts.append(f"by {made.placer}, budget {made.budget}, seed {made.seed}")
    if placement.replicas is not None:
        each = len(placement.replicas.groups[0])
        count, on = len(placement.replicas.groups), f"{each} device{'s'[: each > 1]}"
        many = f"the first of {count} replicas on {on} each"
        parts.append(many if count > 1 else f"one replica on {on}")
    return ", ".join(parts)


def _measured_cells(seen: Measurement | None, failure: str) -> list[str]:
    if failure:
        return ["failed", "", "", ""]
    if seen is None or not seen.ok:
        return ["-"] * 4
    return [_ms(seen.median_s), _ms(seen.min_s), f"{seen.spread:.0%}", _ms(seen.rebuilt_median_s)]


def _speed_up(found: Optimization, row: Row) -> str:
    """Return the speed-up, in brackets if it is predicted although others were measured."""
    ratio = found.speed_up_of(row)
    if np.isnan(ratio):
        return "-"
    only_predicted = row.measurement is None and found.best.measurement is not None
    return f"({ratio:.2f}x)" if only_predicted else f"{ratio:.2f}x"


def _memory(row: Row) -> str:
    """Return the peak of every device in one unit, as in "246 / 202 MB"; of many, the largest."""
    sizes = list(row.peak_memory_bytes.values())
    largest = max(sizes, default=0)
    unit, scale = next(((u, s) for u, s in UNITS if largest >= s), ("B", 1.0))
    digits = 0 if largest / scale >= 10 else 1
    shown = [largest] if _are_many(sizes) else sizes
    return f"{' / '.join(f'{size / scale:.{digits}f}' for size in shown)} {unit}"


def _are_many(devices: Sized) -> bool:
    return len(devices) > MOST_DEVICES


def _ms(seconds: float) -> str:
    return milliseconds(seconds) if np.isfinite(seconds) else "no room"
