"""Costs of single ops beside their time within a step, with everything on the accelerator.

A step runs under torch's profiler, forward call by call. Kernels of the backward pass belong to the
call whose sequence number autograd's node has. Without kernels the times are those of the host.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from benchmarks.gpu.workbench import Workbench
from envs.costs.call_inputs import bound, walk
from envs.costs.calls import backward_nodes
from envs.costs.roofline import roofline_costs
from envs.hardware.cluster import Cluster
from envs.hardware.torch_devices import synchronize, torch_device
from graphs.extract import Extraction
from graphs.extract.autocast import autocast
from graphs.extract.placeable import CallGraph
from graphs.extract.program import Ref

COUNT: Final = 20
STEPS: Final = 3
CALL: Final = "call:"
BACKWARD: Final = "autograd::engine::evaluate_function"


def single_ops(bench: Workbench, cluster: Cluster, results: dict[str, Any]) -> None:
    """Record the most expensive nodes: roofline, profiled time, and time within the step."""
    device = cluster.devices[0].name
    calls = cast("CallGraph", bench.runtime.calls)  # not a map of modules
    runs = [profiled_step(bench.extraction, torch_device(device)) for _ in range(STEPS + 1)]
    steps = runs[1:]  # the first one allocates
    in_step_s = np.median(
        [by_node(bench.extraction, calls, by_call(events)) for events in steps], axis=0
    )
    kind = bench.cluster.devices[0].kind
    roofline_s = roofline_costs(bench.graph, bench.cluster.devices[:1])[kind]
    profiled_s = np.array([costs[kind] for _, costs in bench.graph.nodes(data="cost_s")])
    names = list(bench.graph)
    order = np.argsort(-in_step_s)[:COUNT]
    results["time"] = "kernels" if all(map(has_kernels, steps)) else "host"
    results["rows"] = [
        {
            "node": names[k],
            "roofline_s": roofline_s[k],
            "profiled_s": profiled_s[k],
            "in_step_s": in_step_s[k],
        }
        for k in order
    ]
    for name in ("roofline_s", "profiled_s"):
        ratios = [row[name] / row["in_step_s"] for row in results["rows"] if row["in_step_s"]]
        results[f"{name.removesuffix('_s')}_over_in_step"] = statistics.median(ratios)


def has_kernels(events: Sequence[Any]) -> bool:
    """Return whether the profiler saw kernels of a GPU: a fake one has none, nor has the host."""
    return any(event.device_type.name == "CUDA" for event in events)


def profiled_step(extraction: Extraction, device: torch.device) -> Sequence[Any]:
    """Run a training step; return the events of torch's profiler."""
    program = extraction.forward
    state = extraction.step.named_state()
    host_values = dict(next(walk(extraction)).values)  # sources, on the host
    trained = {s.value for s in program.sources if s.name in state and state[s.name].requires_grad}
    values = {v: t.to(device).requires_grad_(v in trained) for v, t in host_values.items()}
    activities: set[ProfilerActivity] = supported_activities()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    with profile(activities=activities) as profiler:
        for call in program.calls:
            work = bound(call, values, device)
            with record_function(f"{CALL}{call.key}"), autocast(extraction.step.dtype):
                made = work()
            members = made if call.tuple_result else (made,)
            values |= {v: t for v, t in zip(call.outputs, members, strict=True) if v is not None}
        losses = [values[leaf.value] for leaf in program.results if isinstance(leaf, Ref)]
        losses[0].backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        synchronize(device)
    return profiler.events() or []


def by_call(events: Sequence[Any]) -> Mapping[str, tuple[float, float]]:
    """Return the seconds of each call from the events of a step, forward and backward."""
    seconds: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    call_of: dict[int, str] = {}  # by sequence number
    of_device = has_kernels(events)

    def event_s(event: Any) -> float:
        return float(event.device_time_total if of_device else event.cpu_time_total) / 1e6

    def call_around(event: Any) -> str:
        while event is not None and not event.name.startswith(CALL):
            event = event.cpu_parent
        return "" if event is None else event.name.removeprefix(CALL)

    host = [event for event in events if event.device_type.name == "CPU"]
    for event in sorted(host, key=lambda event: event.time_range.start):
        if event.name.startswith(BACKWARD):
            if (key := call_of.get(event.sequence_nr)) is not None:
                seconds[key][1] += event_s(event)
        elif event.name.startswith(CALL):
            seconds[event.name.removeprefix(CALL)][0] += event_s(event)
        elif event.sequence_nr >= 0 and (key := call_around(event)):
            call_of[event.sequence_nr] = key  # the last one makes autograd's node
    return {key: (forward, backward) for key, (forward, backward) in seconds.items()}


def by_node(
    extraction: Extraction, calls: CallGraph, seconds: Mapping[str, tuple[float, float]]
) -> NDArray[np.float64]:
    """Return the seconds of every node of a call graph, (M,)."""
    node_s = np.zeros(len(calls.graph))
    backwards = backward_nodes(extraction, calls)
    for key, (forward, backward) in seconds.items():
        if key in calls.node_of_call:
            node_s[calls.node_of_call[key]] += forward
        if key in backwards:
            node_s[backwards[key]] += backward
    return node_s
