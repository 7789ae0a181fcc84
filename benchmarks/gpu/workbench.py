"""One step on two torch devices: extracted and profiled once, then planned and run repeatedly."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu import accelerated
from benchmarks.gpu.accelerated import Accelerated
from benchmarks.gpu.models import models
from benchmarks.gpu.plan import MODELS
from benchmarks.gpu.rounds import ROUNDS, SLOW_ROUNDS, Contestant, in_rounds, mark_ties
from benchmarks.record import quartiles
from envs.hardware.cluster import Cluster
from envs.measured import Failure, TimedStep
from envs.measurement import Measurement
from envs.placement import Placement
from envs.problem import Problem
from envs.runtime import calibrated, costed
from envs.simulator import INFEASIBLE_NS, Simulator
from envs.torch_runtime import TorchExecutor, TorchRuntime
from envs.torch_runtime.runtime import launch_order
from graphs.extract import Workload, extract
from graphs.graph import GraphArrays
from placer.search.candidate import Candidate, Kind
from placer.search.heuristics import single_device

SLOW = ("all on cpu", "random, 50% of groups")
"""Rows that take much of the time and are never the fastest: they have ``SLOW_ROUNDS`` rounds."""


class Workbench:
    """One step, extracted and profiled once, placed under several memory limits."""

    def __init__(self, step: Workload, cluster: Cluster) -> None:
        began = time.perf_counter()
        self.cluster = calibrated(cluster)
        self.extraction = extract(step)
        extracted = time.perf_counter()
        self.runtime = TorchRuntime(self.extraction, self.cluster)
        self.graph = costed(self.runtime, self.runtime.graph, self.cluster)
        self.arrays = GraphArrays.from_graph(self.graph)
        self.seconds = {
            "extraction_s": extracted - began,
            "profile_s": time.perf_counter() - extracted,
        }

    def problem(self, limit_bytes: int | None = None) -> Problem:
        """Return the problem with the memory of the first device limited to ``limit_bytes``."""
        cluster = self.cluster if limit_bytes is None else limited(self.cluster, limit_bytes)
        return Problem.of(self.arrays, self.runtime.planned(cluster))

    def measured(
        self,
        problem: Problem,
        plans: list[Candidate],
        limit_bytes: int | None = None,
        *,
        rounds: int = ROUNDS,
        beside: Accelerated | None = None,
    ) -> list[dict[str, Any]]:
        """Run candidates in turn; return predictions and measurements of each, ties marked.

        The model as accelerate runs it may have turns in the same rounds; its row is the last.
        """
        limits = {} if limit_bytes is None else {self.cluster.names[0]: limit_bytes}
        placements = [placement(problem, plan) for plan in plans]
        executor = TorchExecutor(self.extraction, self.runtime.calls, problem, limits=limits)
        contestants = [
            Contestant(partial(_turn, executor, each), SLOW_ROUNDS if plan.name in SLOW else rounds)
            for plan, each in zip(plans, placements, strict=True)
        ]

        def cleared(other: Accelerated) -> TimedStep | Failure:
            executor.clear()  # its weights take the memory of the others
            return other.run()

        if beside is not None:
            contestants.append(Contestant(partial(cleared, beside), rounds))
        with closing(executor):
            measurements = in_rounds(contestants)
        rows = [row(problem, plan, one) for plan, one in zip(plans, measurements, strict=False)]
        if beside is not None:
            rows.append(accelerated_row(beside, measurements[-1]))
        mark_ties(rows, measurements)
        return rows

    def costs_ns(self) -> dict[str, str]:
        """Return the cost of every op by device, in the order of the graph, as a text."""
        nodes = self.graph.nodes
        return {
            device.name: " ".join(
                str(round(costs.get(device.kind, costs.get("*", -1e-9)) * 1e9))
                for costs in (nodes[op_id]["cost_s"] for op_id in nodes)
            )
            for device in self.cluster.devices
        }


def placement(problem: Problem, plan: Candidate) -> Placement:
    """Return the placement of a candidate, with its launch order as priority."""
    schedule = Simulator(problem).run(plan.devices, plan.priority)
    priority = np.empty(problem.op_count)
    priority[launch_order(problem, schedule)] = -np.arange(problem.op_count)
    return Placement.of(problem.graph, problem.cluster, plan.devices, priority)


def row(problem: Problem, plan: Candidate, measurement: Measurement) -> dict[str, Any]:
    """Return the predictions and the measurement of a candidate, and what simulates it again.

    ``devices`` has a digit per op, the index of its device; ``order`` lists ops by priority.
    """
    schedule = Simulator(problem).run(plan.devices, plan.priority)
    return {
        "name": plan.name,
        "devices": "".join(map(str, plan.devices)),
        "order": " ".join(map(str, np.argsort(-plan.priority, kind="stable"))),
        "ops_on_accelerator": int((plan.devices == 0).sum()),
        "transfers": len(schedule.transfers.edge),
        "predicted_s": schedule.step_ns / 1e9,
        "predicted_peak_bytes": schedule.peak_bytes.tolist(),
        **measured_part(measurement),
    }


def measured_part(measurement: Measurement) -> dict[str, Any]:
    """Return the entries of a row that were measured."""
    return {
        "measured_peak_bytes": dict(measurement.peak_memory_bytes),
        "measured_reserved_bytes": dict(measurement.reserved_memory_bytes),
        "failure": measurement.failure,
        **quartiles(measurement.wall_s),
    }


def accelerated_row(beside: Accelerated, measurement: Measurement) -> dict[str, Any]:
    """Return the measurement of the model as accelerate runs it."""
    return {
        "name": accelerated.NAME,
        "share": beside.shares[0] if beside.shares else None,
        "device_map": beside.device_map if beside.shares else None,
        **measured_part(measurement),
    }


def _turn(executor: TorchExecutor, placed: Placement) -> TimedStep | Failure:
    loaded = executor.load(placed)
    return loaded if isinstance(loaded, Failure) else loaded.run()


def limited(cluster: Cluster, limit_bytes: int) -> Cluster:
    first, *others = cluster.devices
    return replace(cluster, devices=(replace(first, memory_bytes=limit_bytes), *others))


def everything_on(problem: Problem, device: int) -> Candidate:
    """Return the candidate that runs the whole step on one device, in the order of the model."""
    name = f"all on {problem.cluster.names[device]}"
    return in_order(problem, name, single_device(problem, device))


def in_order(problem: Problem, name: str, devices: Any) -> Candidate:
    """Return a candidate that runs ops in the order of the model."""
    rank = np.empty(problem.op_count)
    rank[problem.graph.topological] = -np.arange(problem.op_count)
    devices = np.asarray(devices, np.int32)
    schedule = Simulator(problem).run(devices, rank)
    step_ns = schedule.step_ns if schedule.feasible else INFEASIBLE_NS
    return Candidate(kind=Kind.OTHER, name=name, devices=devices, priority=rank, step_ns=step_ns)


def at_random(problem: Problem, shares: Sequence[float]) -> list[Candidate]:
    """Return random placements with these shares of the co-location groups on the accelerator."""
    rng = np.random.default_rng(0)
    group, candidates = problem.graph.group, []
    for share in shares:
        devices = (rng.random(problem.op_count) >= share).astype(np.int32)
        for number in range(int(group.max(initial=-1)) + 1):
            members = np.flatnonzero(group == number)
            devices[members] = devices[members[0]]
        candidates.append(in_order(problem, f"random, {share:.0%} of groups", devices))
    return candidates


def summary(row: dict[str, Any]) -> str:
    """Return a one-line summary of a row."""
    if row["failure"] or "median_s" not in row:
        return f"{row['name']} failed: {row['failure'][:80]}"
    predicted = f", predicted {row['predicted_s'] * 1e3:.1f} ms" if "predicted_s" in row else ""
    tie = ", tied with the fastest" if row["tied_with_fastest"] else ""
    return f"{row['name']}: {row['median_s'] * 1e3:.1f} ms{predicted}{tie}"


def arguments(description: str, limit_s: float) -> argparse.Namespace:
    """Parse the options of the benchmark of torch devices."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON file of the results")
    parser.add_argument(
        "--limit", type=float, default=limit_s, metavar="SECONDS", help=f"time [{limit_s:.0f}]"
    )
    parser.add_argument(
        "--small", action="store_true", help="small models, as where there is no CUDA device"
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        default=[],
        metavar="KIND",
        help='only these, such as "no limit", "75%%" or "overlap"',
    )
    parser.add_argument(
        "--models",
        nargs="+",
        default=[],
        choices=models(small=True),
        metavar="MODEL",
        help=f"of the first everything, of the others some [{', '.join(MODELS)}]",
    )
    parser.add_argument(
        "--table",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="measure nothing: print the offload table of files of results, the last ones count",
    )
    return parser.parse_args()
