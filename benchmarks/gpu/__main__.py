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

import copy
import statistics
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from benchmarks.gpu import offload
from benchmarks.gpu.models import models, two_devices
from benchmarks.gpu.process import PROCESSES, in_processes, on_device, trained
from benchmarks.gpu.workbench import (
    Workbench,
    arguments,
    everything_on,
    in_order,
    placement,
    save_graphs,
)
from benchmarks.record import Record, quartiles
from envs.executors.torch.placed_module import PlacedModule
from envs.hardware.cluster import Cluster
from envs.hardware.torch_devices import cuda_devices, torch_device
from envs.measured import Failure
from envs.problem import Problem
from envs.runtime import calibrated
from envs.simulator import Simulator
from envs.torch_runtime.executor import TorchExecutor
from envs.torch_runtime.worker_executor import WorkerExecutor
from graphs.extract import Extraction, Workload
from graphs.extract.placeable import CallGraph
from graphs.optimizer import Optimizer
from placer.search.candidate import Candidate
from placer.search.compilation import load_compiled_code

PAIRS = 15
PAIRS_S = 5.0
RANDOM_SHARES = (0.5, 0.9, 0.97)
"""Shares of the co-location groups that random placements put on the accelerator."""
PROFILE = "profile"
INFERENCE = "mixture of experts", "language model"
COMPARED = "mixture of experts"
"""Model whose step is timed in several processes."""
OVERLAP_SHARES = (0.5, 0.9)
OVERLAP_S = 2.0
"""Seconds of step pairs (copies in line, copies overlapped) for each placement."""
HALF = 0.5
PROCESS_SHARES = (0.9, 0.97)
"""Shares of the groups for placements that one thread drives, and a process for each device."""
VISITS = 2
TURNS = 2
"""Turns of such a placement in each visit of the executor."""


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
            "pinned_bytes_per_s": link.pinned_bandwidth_bytes_per_s,
        }
        for link in measured.links
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
    rng = np.random.default_rng(0)
    plans = [everything_on(problem, d) for d in range(problem.device_count)]
    plans += [
        in_order(problem, f"random, {share:.0%} of groups", random_devices(problem, rng, share))
        for share in RANDOM_SHARES
    ]
    plans += offload.found_by_search(problem, 2)
    found["rows"] = rows = bench.measured(problem, plans)
    offload.tell(record, rows)
    seen = rows[0]["measured_peak_bytes"].get(problem.cluster.names[0])
    found["peak_was_measured"] = seen is not None
    found["peak_bytes"] = seen or rows[0]["predicted_peak_bytes"][0]


def overhead(bench: Workbench, cluster: Cluster, found: dict[str, Any]) -> None:
    """Time the plain model and the placed module on the accelerator, in pairs."""
    device = torch_device(cluster.names[0])
    step, calls = bench.extraction.step, bench.runtime.calls
    devices = calls.devices_of_calls([device] * len(calls.graph))
    placed = PlacedModule(replaced(bench, copy.deepcopy(step)), devices)
    eager, inputs, keywords = on_device(step, device)
    one = partial(trained, eager, inputs, keywords, [device])
    other = partial(trained, placed, inputs, keywords, [device])
    for _ in range(3):
        one(), other()
    pairs = min(max(round(PAIRS_S / (one() + other())), 3), PAIRS)
    seconds = [(one(), other()) for _ in range(pairs)]
    found["eager"] = quartiles([pair[0] for pair in seconds])
    found["placed"] = quartiles([pair[1] for pair in seconds])
    found["placed_over_eager"] = statistics.median(p / e for e, p in seconds)


def compiled(
    bench: Workbench, cluster: Cluster, found: dict[str, Any], backend: str = "inductor"
) -> None:
    """Time the plain model on the accelerator with and without ``torch.compile``, in pairs."""
    device = torch_device(cluster.names[0])
    eager, inputs, keywords = on_device(bench.extraction.step, device)
    fast: Any = torch.compile(eager, backend=backend)  # a module, too
    plain, faster = (partial(trained, one, inputs, keywords, [device]) for one in (eager, fast))
    for _ in range(3):
        plain(), faster()
    pairs = min(max(round(PAIRS_S / (plain() + faster())), 3), PAIRS)
    seconds = [(plain(), faster()) for _ in range(pairs)]
    found["eager"] = quartiles([pair[0] for pair in seconds])
    found["compiled"] = quartiles([pair[1] for pair in seconds])
    found["compiled_over_eager"] = statistics.median(c / e for e, c in seconds)


def overlapping(bench: Workbench, cluster: Cluster, found: dict[str, Any]) -> None:
    """Compare in-line and overlapped copies: random placements, and one for half the memory."""
    problem = bench.problem()
    alone = everything_on(problem, 0)
    peak_bytes = Simulator(problem).run(alone.devices, alone.priority).peak_bytes[0]
    cramped = bench.problem(int(HALF * peak_bytes))
    rng = np.random.default_rng(0)
    plans = [
        in_order(problem, f"random, {share:.0%} of groups", random_devices(problem, rng, share))
        for share in OVERLAP_SHARES
    ]
    plans += [replace(plan, name="half the memory") for plan in offload.found_by_search(cramped, 1)]
    found["rows"] = [in_pairs(bench, cluster, problem, plan) for plan in plans]


def in_pairs(
    bench: Workbench, cluster: Cluster, problem: Problem, plan: Candidate
) -> dict[str, Any]:
    """Time steps of one placement without and with overlap, in turn."""
    names = [torch_device(name) for name in cluster.names]
    step, calls = bench.extraction.step, bench.runtime.calls
    placed = placement(problem, plan)
    devices = calls.devices_of_calls([names[d] for d in placed.devices])
    modules = [
        PlacedModule(
            replaced(bench, copy.deepcopy(step)),
            devices,
            calls.launch_order(placed.priority),
            overlap=overlap,
        )
        for overlap in (False, True)
    ]
    inputs, keywords = list(step.inputs), dict(step.keywords)
    runs = [partial(trained, module, inputs, keywords, names) for module in modules]
    for run in runs:
        run()  # compiles and allocates
    pairs = min(max(round(OVERLAP_S / sum(run() for run in runs)), 3), PAIRS)
    seconds = [[run() for run in runs] for _ in range(pairs)]
    in_line, beside = (list(own) for own in zip(*seconds, strict=True))
    return {
        "name": plan.name,
        "transfers": modules[0].transfers,
        "in line": quartiles(in_line),
        "overlapping": quartiles(beside),
        "overlapping_over_in_line": statistics.median(o / i for i, o in seconds),
    }


def process_each(bench: Workbench, cluster: Cluster, found: dict[str, Any]) -> None:
    """Compare one thread for all devices with a process for each: steps with SGD, in turns."""
    step = replace(bench.extraction.step, optimizer=Optimizer.of("sgd"))
    own = Workbench(step, cluster)
    problem = own.problem()
    rng = np.random.default_rng(0)
    plans = [everything_on(problem, 0)]
    plans += [
        in_order(problem, f"random, {share:.0%} of groups", random_devices(problem, rng, share))
        for share in PROCESS_SHARES
    ]
    found["rows"] = [one_thread_or_processes(own, problem, plan) for plan in plans]


def one_thread_or_processes(bench: Workbench, problem: Problem, plan: Candidate) -> dict[str, Any]:
    """Time one placement driven by one thread and by a process for each device, never both at once.

    One would slow the other.
    """
    placed = placement(problem, plan)
    calls = cast("CallGraph", bench.runtime.calls)  # not a map of modules
    seconds: dict[str, list[float]] = {"one thread": [], "processes": []}
    for _ in range(VISITS):
        for own_s, kind in zip(seconds.values(), (TorchExecutor, WorkerExecutor), strict=True):
            with closing(kind(bench.extraction, calls, problem, limits={})) as executor:
                loaded = executor.load(placed)
                for _ in range(TURNS):
                    step = loaded if isinstance(loaded, Failure) else loaded.run()
                    if isinstance(step, Failure):
                        return {"name": plan.name, "failure": step.reason}
                    own_s.append(step.wall_s)
    one_s, processes_s = (statistics.median(own_s) for own_s in seconds.values())
    return {
        "name": plan.name,
        **{name: quartiles(own_s) for name, own_s in seconds.items()},
        "processes_over_one_thread": processes_s / one_s,
    }


def replaced(bench: Workbench, step: Workload) -> Extraction:
    """Return the extraction with another copy of the model."""
    return replace(bench.extraction, step=step)


def random_devices(problem: Any, rng: np.random.Generator, share: float) -> list[int]:
    """Return a random device for every op, the same for all ops of a co-location group."""
    devices = (rng.random(problem.op_count) >= share).astype(int)
    group = problem.graph.group
    for number in range(int(group.max(initial=-1)) + 1):
        members = np.flatnonzero(group == number)
        devices[members] = devices[members[0]]
    return [int(d) for d in devices]


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
    small = options.small or not cuda_devices()
    benches: dict[str, Workbench] = {}
    with two_devices() as cluster:
        record.part("calibration", partial(calibration, cluster))
        record.part("compiled code", lambda _: load_compiled_code())
        for name, make in models(small=small).items():
            one_model(record, cluster, name, make, benches)
        under_limits(record, cluster, benches)
        for name in benches if cuda_devices() else ():
            part = partial(process_each, benches[name], cluster)
            record.part(f"{name}: a process for each device", part)
        again = partial(in_processes, COMPARED, small=small)
        record.part(f"{COMPARED}: in {PROCESSES} processes", again)
        for name in benches if cuda_devices() else ():
            record.part(f"{name}: compiled", partial(compiled, benches[name], cluster))
    record.save()
    measured = {name.rpartition(": ")[2] for name in record.data["parts"]}
    if unknown := set(options.parts) - measured:
        raise SystemExit(f"nothing was measured for --parts {', '.join(sorted(unknown))}")
    record.say("done" if options.out is None else f"done: {options.out}")


if __name__ == "__main__":
    main()
