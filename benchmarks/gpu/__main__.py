"""All measurements of torch devices, in one file, and the graphs of the models beside it.

    python -m benchmarks.gpu --out gpu.json

First the calibration. Then for each model, without a limit of memory: predicted and measured steps
of everything on one device, of random placements and of search results, with the costs and
placements that simulate them again (``python -m benchmarks hosts``; the graphs of the models are in
gpu.graphs.json), and the placed module on one device against the model itself. Then
benchmarks/gpu/offload.py, limit by limit, copies that overlap with compute against copies in line,
one thread against a process for each device, the same step in three processes, and
``torch.compile``. What the time limit does not leave room for is skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.gpu import offload
from benchmarks.gpu.comparisons import compiled, overhead, overlapping, process_each
from benchmarks.gpu.models import models, two_devices
from benchmarks.gpu.process import PROCESSES, in_processes
from benchmarks.gpu.workbench import (
    Workbench,
    arguments,
    at_random,
    everything_on,
    save_graphs,
)
from benchmarks.record import Record
from envs.costs.torch_speeds import copy_speed
from envs.hardware import torch_devices
from envs.hardware.cluster import Cluster
from envs.hardware.torch_devices import cuda_devices, torch_device
from envs.runtime import calibrated
from graphs.extract import Workload
from placer.search.compilation import load_compiled_code

RANDOM_SHARES = (0.5, 0.9, 0.97)
"""Shares of the co-location groups that random placements put on the accelerator."""
PROFILE = "profile"
INFERENCE = "mixture of experts", "language model"
COMPARED = "mixture of experts"
"""Model whose step is timed in several processes."""


def calibration(cluster: Cluster, found: dict[str, Any]) -> None:
    measured = calibrated(cluster, again=True)
    found["devices"] = {
        device.name: {
            "kind": device.kind,
            "memory_bytes": device.memory_bytes,
            "launch_s": device.launch_s,
            "flop_per_s": device.peak_flop_per_s,
            "memory_bytes_per_s": device.bandwidth_bytes_per_s,
        }
        for device in measured.devices
    }
    found["links"] = {
        " -> ".join(link.between): {
            "latency_s": link.latency_s,
            "bytes_per_s": link.bandwidth_bytes_per_s,
        }
        for link in measured.links
    }
    fastest = min(device.bandwidth_bytes_per_s for device in measured.devices)
    ends = torch_devices.CPU, torch_device(cluster.names[0])
    pinned = copy_speed(*ends, fastest, pinned=True)
    found["links"][f"cpu -> {cluster.names[0]}, pinned"] = {
        "latency_s": pinned.latency_s,
        "bytes_per_s": pinned.bandwidth_bytes_per_s,
    }


def no_limit(record: Record, bench: Workbench, found: dict[str, Any]) -> None:
    """Measure placements of the whole step; the accelerator alone tells the memory it takes."""
    problem = bench.problem()
    state = bench.extraction.step.named_state().values()
    found.update(
        ops=problem.op_count,
        graph=problem.graph.hash,
        joint_ops=bench.extraction.program.op_count,
        state_bytes=sum(t.nbytes for t in {id(t): t for t in state}.values()),
        costs_ns=bench.costs_ns(),
    )
    plans = [everything_on(problem, d) for d in range(problem.device_count)]
    plans += at_random(problem, RANDOM_SHARES)
    plans += offload.found_by_search(problem, 2)
    found["rows"] = rows = bench.measured(problem, plans)
    offload.tell(record, rows)
    seen = rows[0]["measured_peak_bytes"].get(problem.cluster.names[0])
    found["peak_was_measured"] = seen is not None
    found["peak_bytes"] = seen or rows[0]["predicted_peak_bytes"][0]


def one_model(
    record: Record,
    cluster: Cluster,
    name: str,
    make: Callable[[], Workload],
    benches: dict[str, Workbench],
) -> None:
    """Extract and profile a model, and measure it without a limit."""

    def profiled(found: dict[str, Any]) -> None:
        benches[name] = Workbench(make(), cluster)
        found.update(benches[name].seconds)
        if record.out is not None:
            save_graphs(benches, record.out)

    record.part(f"{name}: {PROFILE}", profiled)
    if name in benches:
        record.part(f"{name}: no limit", partial(no_limit, record, benches[name]))
        record.part(f"{name}: overhead", partial(overhead, benches[name], cluster))


def under_limits(record: Record, cluster: Cluster, benches: dict[str, Workbench]) -> None:
    """Measure all models under one limit after the other, then inference and overlap."""
    parts = record.data["parts"]
    known = {name: parts.get(f"{name}: no limit", {}).get("peak_bytes") for name in benches}
    for share in offload.SHARES:
        for name, peak_bytes in known.items():
            if peak_bytes:
                part = partial(offload.capped, record, benches[name], peak_bytes, share)
                record.part(f"{name}: {share:.0%}", part)
    for name in INFERENCE:
        if name in benches:
            part = partial(offload.inference, record, cluster, benches[name].extraction.step)
            record.part(f"{name}: inference, 50% of the weights", part)
    for name, bench in benches.items():
        record.part(f"{name}: overlap", partial(overlapping, bench, cluster))


def main() -> None:
    options = arguments("Everything of torch devices that can be measured.", 460)
    always = {"compiled code", PROFILE} if options.parts else set()
    record = Record(options.out, options.limit, kinds=always | set(options.parts))
    is_real = bool(cuda_devices())
    small, backend = options.small or not is_real, "inductor" if is_real else "eager"
    benches: dict[str, Workbench] = {}
    with two_devices() as cluster:
        record.part("calibration", partial(calibration, cluster))
        record.part("compiled code", lambda _: load_compiled_code())
        for name, make in models(small=small).items():
            one_model(record, cluster, name, make, benches)
        under_limits(record, cluster, benches)
        for name, bench in benches.items():
            part = partial(process_each, bench, cluster)
            record.part(f"{name}: a process for each device", part)
        again = partial(in_processes, COMPARED, small=small)
        record.part(f"{COMPARED}: in {PROCESSES} processes", again)
        for name, bench in benches.items():
            part = partial(compiled, bench, cluster, backend=backend)
            record.part(f"{name}: compiled", part)
    record.save()
    measured = {name.rpartition(": ")[2] for name in record.data["parts"]}
    if unknown := set(options.parts) - measured:
        raise SystemExit(f"nothing was measured for --parts {', '.join(sorted(unknown))}")
    record.say("done" if options.out is None else f"done: {options.out}")


if __name__ == "__main__":
    main()
