"""Terminal tables of a result, a cluster and a placement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sized
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from envs.hardware.units import human_bytes, milliseconds, ratio_of
from envs.placement import ROOT, module_of
from placer.messages import remarks
from placer.report.console import print_rows
from placer.search.candidate import Kind

if TYPE_CHECKING:
    from envs.hardware.cluster import Cluster, Link
    from envs.measurement import Measurement
    from envs.placement import Placement
    from placer.result import Result
    from placer.search.candidate import Candidate

UNITS: Final = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
FLOP_UNITS: Final = (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("kFLOP", 1e3))
MEASURED_COLUMNS: Final = ("wall\nms", "min\nms", "spread", "CPU clock\nms")
TRIAL_COLUMNS: Final = ("replicas x devices", "predicted ms", "measured ms", "samples/s")
QUEUES: Final = {
    "none": "nothing",
    "egress": "all of one sender",
    "pair": "all of one sender to one receiver",
    "bus": "all",
}
"""{sharing of a link: the transfers that queue for each other, in words}."""
CHOSEN: Final = ">"
MOST_SINGLES: Final = 8
MOST_DEVICES: Final = 16
"""Number of devices up to which tables list each one."""


def print_result(result: Result, console: Console, *, verbose: bool = False) -> None:
    """Print all candidates with step times, speed-up and memory, then remarks and the verdict.

    ``verbose`` adds a legend and the less important remarks.
    """
    ran = any(candidate.measurement is not None for candidate in result.candidates)
    console.print(_title(result))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("candidate", no_wrap=True)
    for column in ("predicted\nms", *(MEASURED_COLUMNS if ran else ()), "speed-up"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("memory", justify="right", overflow="fold")
    shown = _shown(result)
    for candidate in shown:
        measured = _measured_cells(candidate.measurement, candidate.failure) if ran else []
        table.add_row(
            f"{CHOSEN if candidate is result.best else ' '} {_named(candidate)}",
            _predicted(candidate),
            *measured,
            _speed_up(result, candidate),
            _memory(peaks) if any((peaks := candidate.peak_memory_bytes).values()) else "-",
            style="bold green" if candidate is result.best else "",
        )
    if left_out := len(result.candidates) - len(shown):
        table.add_row(f"  {left_out} more single devices", style="dim")
    console.print(table)
    if verbose:
        console.print(_legend(result, ran), style="dim")
    for remark in result.remarks if verbose else result.main_remarks:
        console.print(remark)
    console.print(str(result))


def _on_one_device(result: Result) -> list[Candidate]:
    return [one for one in result.candidates if one.kind is Kind.SINGLE_DEVICE]


def _shown(result: Result) -> list[Candidate]:
    first = (result.best, result.single)
    single = [one for one in _on_one_device(result) if one.is_single]
    single.sort(key=lambda candidate: (candidate not in first, candidate.predicted_s))
    left_out = {id(candidate) for candidate in single[MOST_SINGLES:]}
    return [candidate for candidate in result.candidates if id(candidate) not in left_out]


def _named(candidate: Candidate) -> str:
    """Return the name, with the node of a cluster that ran it."""
    node = "" if candidate.measurement is None else candidate.measurement.node
    return f"{candidate.name} on {node}" if node else candidate.name


def _legend(result: Result, ran: bool) -> str:
    names = result.problem.cluster.names
    shown = f"the fullest of {len(names)} devices" if _are_many(names) else " / ".join(names)
    parts = [f"{remarks.LEGEND} of {shown}"]
    if result.placement.objective != "latency":
        parts.append(f"predicted and speed-up: of the objective {result.placement.objective}")
    if ran:
        clocks = [candidate.measurement for candidate in result.candidates if candidate.measurement]
        on_cores = any(measurement.has_cpu_clock for measurement in clocks)
        parts.append(remarks.MEASURED_LEGEND)
        parts.append(remarks.CORES_LEGEND if on_cores else remarks.TORCH_LEGEND)
    if any(candidate.kind is Kind.WARM_START for candidate in result.candidates):
        parts.append(remarks.WARM_START_LEGEND)
    if not all(candidate.is_single for candidate in _on_one_device(result)):
        parts.append(remarks.WHERE_ALLOWED_LEGEND)
    if result.unplaced is not None:
        parts.append(remarks.UNPLACED_LEGEND)
        if result.contended and (measurement := result.best.measurement) is not None:
            parts[-1] += f", to be compared with {_ms(measurement.median_s)} ms"
    return "; ".join(parts) + "."


def print_cluster(cluster: Cluster, console: Console) -> None:
    """Print devices and links with their speeds."""
    console.print(cluster.name)
    print_rows(
        console,
        ("device", "kind", "memory", "GFLOP/s", "GB/s", "source"),
        [
            (
                *(device.name, device.kind, human_bytes(device.memory_bytes)),
                f"{device.peak_flop_per_s / 1e9:.1f}",
                f"{device.bandwidth_bytes_per_s / 1e9:.1f}",
                device.source,
            )
            for device in cluster.devices
        ],
    )
    print_rows(
        console,
        ("link", "latency", "GB/s", "transfers that wait for each other"),
        [
            (
                (" -> " if link.one_way else " - ").join(link.between),
                f"{link.latency_s * 1e6:.1f} us",
                f"{link.bandwidth_bytes_per_s / 1e9:.2f}",
                _queue(link),
            )
            for link in cluster.links
        ],
    )


def _queue(link: Link) -> str:
    both_ways = " and back" if link.sharing == "pair" and not link.full_duplex else ""
    return f"{QUEUES[link.sharing]}{both_ways}"


def print_placement(placement: Placement, console: Console) -> None:
    """Print ops per device for the top modules of a placement, and its step times."""
    console.print(origin(placement))
    names = placement.device_names
    print_rows(
        console,
        ("module", *names),
        [
            (module, *(counts[name] or "" for name in names))
            for module, counts in _ops_by_module(placement).items()
        ],
    )
    predicted, measured = placement.predicted or {}, placement.measured or {}
    if "step_s" in predicted:
        step_s = predicted.get("replicated_step_s", predicted["step_s"])
        console.print(f"predicted step: {_ms(step_s)} ms{_memory_of(predicted)}")
    if "step_s" in measured:
        clock = _by_clock(measured)
        console.print(f"measured step: {_ms(measured['step_s'])} ms{clock}{_memory_of(measured)}")
    if "trials" in measured:
        busy = ", on cores that other processes used" if measured.get("busy") else ""
        console.print(f"Plans that were run in turns{busy}:")
        print_rows(console, TRIAL_COLUMNS, _trials(measured["trials"]))


def _trials(trials: Mapping[str, Mapping[str, float]]) -> list[tuple[str, ...]]:
    """Return a row for each plan of replicas, the most samples per second first."""
    rate = {name: ratio_of(trial["samples"], trial["step_s"]) for name, trial in trials.items()}
    return [
        (name, _ms(trials[name]["predicted_s"]), _ms(trials[name]["step_s"]), f"{rate[name]:.4g}")
        for name in sorted(trials, key=lambda name: -rate[name])
    ]


def _by_clock(measured: Mapping[str, Any]) -> str:
    if measured.get("clock") != "cpu" or "wall_median_s" not in measured:
        return ""
    return f" ({remarks.CPU_CLOCK}; by the wall clock {_ms(measured['wall_median_s'])} ms)"


def _memory_of(record: Mapping[str, Any]) -> str:
    peaks = record.get("peak_memory_bytes")
    return f", memory {_memory(peaks)}" if peaks else ""


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
        "unplaced": placement.unplaced,
    }


def device_text(placement: Placement, module: str) -> str:
    """Return where a module's ops are, as in "core:1 (7 forward ops), core:0 (7 backward ops)"."""
    parts = []
    for name, counts in placement.phases_of(module).items():
        ops = ", ".join(f"{count} {phase}" for phase, count in counts.items())
        parts.append(f"{name} ({ops} op{'s'[: sum(counts.values()) > 1]})")
    return ", ".join(parts)


def human_flops(count: float) -> str:
    """Format FLOPs with a decimal unit, as in "3.500 GFLOP"."""
    for unit, scale in FLOP_UNITS:
        if count >= scale:
            return f"{count / scale:,.3f} {unit}"
    return f"{count:.0f} FLOP"


def _title(result: Result) -> str:
    graph, names = result.problem.graph, result.problem.cluster.names
    devices = f"{len(names)} devices" if _are_many(names) else ", ".join(names)
    bound = _ms(result.lower_bound_s)
    return f"{graph.name}: {len(graph)} ops on {devices}; lower bound {bound} ms"


def _ops_by_module(placement: Placement) -> dict[str, Counter[str]]:
    counts: dict[str, Counter[str]] = {}
    for op_id, d in zip(placement.ops, placement.devices, strict=True):
        top = module_of(op_id).partition(".")[0] or ROOT
        counts.setdefault(top, Counter())[placement.device_names[d]] += 1
    return counts


def origin(placement: Placement) -> str:
    """Return the size of a placement and how it was found, in one line."""
    made = placement.made_by
    parts = [f"{len(placement.ops)} ops of graph {placement.graph[:12]}"]
    if placement.unplaced:
        parts.append("left unplaced")
    if made.placer:
        parts.append(f"by {made.placer}, budget {made.budget}, seed {made.seed}")
    if placement.replicas is not None:
        each = len(placement.replicas.groups[0])
        count, on = len(placement.replicas.groups), f"{each} device{'s'[: each > 1]}"
        many = f"the first of {count} replicas on {on} each"
        parts.append(many if count > 1 else f"one replica on {on}")
    return ", ".join(parts)


def _predicted(candidate: Candidate) -> str:
    prediction = candidate.prediction
    if prediction is not None and prediction.missing_bytes and not candidate.can_run:
        return "no room"
    return _ms(candidate.predicted_s)


def _measured_cells(measurement: Measurement | None, failure: str) -> list[str]:
    if failure:
        return ["failed", "", "", ""]
    if measurement is None or not measurement.ok:
        return ["-"] * 4
    times = (measurement.median_s, measurement.min_s, measurement.cpu_clock_median_s)
    median, shortest, cpu_clock = map(_ms, times)
    return [median, shortest, f"{measurement.spread:.0%}", cpu_clock]


def _speed_up(result: Result, candidate: Candidate) -> str:
    """Return the speed-up, in brackets if it is predicted although others were measured."""
    ratio = result.speedup_of(candidate)
    if np.isnan(ratio):
        return "-"
    ran = candidate.measurement is not None and not candidate.eliminated
    only_predicted = not ran and result.best.measurement is not None
    return f"({ratio:.2f}x)" if only_predicted else f"{ratio:.2f}x"


def _memory(peak_bytes: Mapping[str, int]) -> str:
    """Return the peak of every device in one unit, as in "246 / 202 MB"; of many, the largest."""
    sizes = list(peak_bytes.values())
    largest = max(sizes, default=0)
    unit, scale = next(((u, s) for u, s in UNITS if largest >= s), ("B", 1.0))
    digits = 0 if largest / scale >= 10 else 1
    shown = [largest] if _are_many(sizes) else sizes
    return f"{' / '.join(f'{size / scale:.{digits}f}' for size in shown)} {unit}"


def _are_many(devices: Sized) -> bool:
    return len(devices) > MOST_DEVICES


def _ms(seconds: float) -> str:
    return milliseconds(seconds) if np.isfinite(seconds) else "-"
