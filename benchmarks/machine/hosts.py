"""Predictions of recorded candidates on an H200 beside a CPU, without and with a host.

    python -m benchmarks hosts

The files of 2026-11-20 hold measured and predicted steps, and the number of ops and copies of each
placement, but no placements and no costs of ops. Placements are made again where that number proves
them: all on one device, the first layers, and random ones by their seed. Those of searches, which
ended by the clock, cannot be; nor can inference, for which no step on the GPU was recorded. Costs
are rooflines of the recorded speeds, scaled so that the step on either device alone takes what was
predicted for it ("as recorded") or what was measured ("fitted").
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.plan import PROFILE
from benchmarks.record import Effort, Part
from benchmarks.tables import Table
from envs.costs.roofline import roofline_costs
from envs.hardware.cluster import Cluster, Device, Link
from envs.hardware.host import Host
from envs.placement import Placement
from envs.problem import Ints, Problem
from envs.simulator import Simulator
from envs.simulator.fitting import fitted_factors, scaled_problem
from graphs.costs import with_costs
from graphs.extract import extract
from graphs.extract.placeable import placeable
from graphs.graph import GraphArrays
from graphs.graph_file import graph_from_dict
from placer.search.heuristics import layer_numbers

FOLDER: Final = Path(__file__).parents[1] / "results"
FIRST_DAY: Final = "2026-11-20-h200"
FILES: Final = ("gpu", "offload")
LATER: Final = ("2026-11-26-h200-gpu",)
"""Files that also hold the placements and the costs of ops."""
RANDOM_SHARES: Final = (0.5, 0.9, 0.97)
GOOD: Final = (0.8, 1.25)
CHANGED_OPS: Final = 2
GPU, CPU = "cuda:0", "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One recorded candidate of a model."""

    model: str
    name: str
    ops_on_gpu: int
    copies: int
    predicted_s: float
    measured_s: float


def parts_of(file: str) -> dict[str, Any]:
    """Return the parts of a file of results."""
    found: dict[str, Any] = json.loads((FOLDER / f"{file}.json").read_text())["parts"]
    return found


def recorded(file: str) -> dict[str, list[Row]]:
    """Return the candidates of every model in a file that ran; those of training steps."""
    rows: dict[str, list[Row]] = {}
    for part, content in parts_of(f"{FIRST_DAY}-{file}").items():
        model, _, what = part.partition(": ")
        for row in content.get("rows", []):
            if "median_s" in row and "overlap" not in what and "inference" not in what:
                share = f", {what}" if "%" in what else ""
                own = Row(
                    model=model,
                    name=row["name"] + share,
                    ops_on_gpu=row["ops_on_accelerator"],
                    copies=row["transfers"],
                    predicted_s=row["predicted_s"],
                    measured_s=row["median_s"],
                )
                rows.setdefault(model, []).append(own)
    return rows


def machine(file: str = f"{FIRST_DAY}-gpu") -> Cluster:
    """Return the GPU and the CPU with the speeds recorded in a file, and their host."""
    speeds = parts_of(file)["calibration"]
    devices = tuple(
        Device(
            name=name,
            kind=name,
            memory_bytes=1 << 45,
            launch_s=one["launch_s"],
            peak_flop_per_s=one["flop_per_s"],
            bandwidth_bytes_per_s=one["memory_bytes_per_s"],
        )
        for name, one in speeds["devices"].items()
    )
    links = tuple(
        Link(
            between=(source, to),
            one_way=True,
            latency_s=speeds["links"][f"{source} -> {to}"]["latency_s"],
            bandwidth_bytes_per_s=speeds["links"][f"{source} -> {to}"]["bytes_per_s"],
        )
        for source, to in ((GPU, CPU), (CPU, GPU))
    )
    return Cluster(
        name="H200", devices=devices, links=links, hosts=(Host(devices=(GPU, CPU), autograd=True),)
    )


@cache
def graph_of(model: str) -> nx.DiGraph[str]:
    """Return the graph of a model of ``benchmarks.gpu`` in its full size."""
    from benchmarks.gpu.models import models

    return placeable(extract(models(small=False)[model]())).graph


def recorded_graph(parts: Mapping[str, Any], model: str) -> nx.DiGraph[str] | None:
    """Return the graph of a model as it was recorded, None if it was not."""
    graph = parts.get(f"{model}: {PROFILE}", {}).get("graph")
    return None if graph is None else graph_from_dict(graph)


def scaled(times_s: NDArray[np.float64], least_s: float, sum_s: float) -> NDArray[np.float64]:
    """Return times in proportion, none below the least, whose sum is given (or less is not met)."""
    low, high = 0.0, 1.0
    while np.maximum(times_s * high, least_s).sum() < sum_s:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        short = np.maximum(times_s * middle, least_s).sum() < sum_s
        low, high = (middle, high) if short else (low, middle)
    return np.maximum(times_s * high, least_s)


def problems(model: str, gpu_s: float, cpu_s: float) -> tuple[Problem, Problem]:
    """Return the problem without and with a host, for known steps on either device alone.

    Without a host a launch counts on the device, with one on its thread beside the ops.
    """
    cluster, graph = machine(), graph_of(model)
    costs = roofline_costs(graph, cluster.devices)
    launch_s = {device.name: device.launch_s for device in cluster.devices}
    on_cpu = scaled(costs[CPU], 0.0, cpu_s - len(graph) * launch_s[CPU])
    on_gpu = scaled(costs[GPU], launch_s[GPU], gpu_s)
    source = {GPU: ["scaled"] * len(graph), CPU: ["scaled"] * len(graph)}
    found = []
    for hosts, gpu_costs in (((), on_gpu - launch_s[GPU]), (cluster.hosts, on_gpu)):
        priced = with_costs(graph, {GPU: gpu_costs, CPU: on_cpu}, source)
        found.append(Problem.of(GraphArrays.from_graph(priced), replace(cluster, hosts=hosts)))
    return found[0], found[1]


def placement_of(problem: Problem, row: Row) -> Ints | None:
    """Return the placement of a row, None if none of that kind has its numbers of ops and copies.

    Another version of transformers has two more ops in one model.
    """
    if row.name.startswith("random"):
        trials = [devices for name, devices in random_placements(problem) if name == row.name]
    else:
        number = layer_numbers(problem)
        layers = range(int(number.max()) + 2) if "placer" not in row.name else ()
        trials = [np.where(number < count, 0, 1).astype(np.int32) for count in layers]
    simulator, priority = Simulator(problem, memory=False), in_order(problem)

    def changed_ops(devices: Ints) -> int:
        return abs(int((devices == 0).sum()) - row.ops_on_gpu)

    for devices in sorted(trials, key=changed_ops):
        copies = len(simulator.run(devices, priority).transfers)
        if max(changed_ops(devices), abs(copies - row.copies)) <= CHANGED_OPS:
            return devices
    return None


def random_placements(problem: Problem) -> Iterator[tuple[str, Ints]]:
    """Yield names and devices of random placements, drawn as ``benchmarks.gpu`` draws them."""
    rng = np.random.default_rng(0)
    group = problem.graph.group
    for share in RANDOM_SHARES:
        devices = (rng.random(problem.op_count) >= share).astype(np.int32)
        for one in range(int(group.max(initial=-1)) + 1):
            members = np.flatnonzero(group == one)
            devices[members] = devices[members[0]]
        yield f"random, {share:.0%} of groups", devices


def in_order(problem: Problem) -> NDArray[np.float64]:
    """Return priorities in the order of the model."""
    priority = np.empty(problem.op_count)
    priority[problem.graph.topological] = -np.arange(problem.op_count)
    return priority


def predicted_s(problem: Problem, devices: Ints) -> float:
    """Return the simulated step of a placement in the order of the model."""
    return float(Simulator(problem, memory=False).step_ns(devices, in_order(problem))[0]) / 1e9


def compared(found: dict[str, Any]) -> Table:
    """Compare all recorded candidates that can be made again."""
    rows: list[tuple[str, ...]] = []
    ratios: list[tuple[float, float, float]] = []  # recorded, with a host, and fitted
    ranks: list[tuple[float, float]] = []
    lost = []
    for file in FILES:
        for model, candidates in recorded(file).items():
            whole = {row.name: row for row in candidates if row.name.startswith("all on")}
            ends = [whole[f"all on {name}"] for name in (GPU, CPU)]
            _, hosted = problems(model, *(row.predicted_s for row in ends))
            _, fitted = problems(model, *(row.measured_s for row in ends))
            ranked = []
            for row in candidates:
                devices = placement_of(hosted, row)
                if devices is None:
                    lost.append(f"{model}, {row.name} ({file})")
                    continue
                steps_s = [row.predicted_s, *(predicted_s(p, devices) for p in (hosted, fitted))]
                ranked.append((row.measured_s, *steps_s))
                if row in ends:
                    continue
                recorded_ratio, host_ratio, fitted_ratio = (s / row.measured_s for s in steps_s)
                ratios.append((recorded_ratio, host_ratio, fitted_ratio))
                cells = (f"{ratio:.2f}" for ratio in ratios[-1])
                rows.append((model, row.name, f"{row.measured_s * 1e3:.0f}", *cells))
            columns = list(zip(*ranked, strict=True))
            ranks.append((rank_correlation(*columns[:2]), rank_correlation(columns[0], columns[2])))
    within = [
        sum(GOOD[0] <= ratio <= GOOD[1] for ratio in column) / len(ratios)
        for column in zip(*ratios, strict=True)
    ]
    found.update(ratios=ratios, rank_correlations=ranks, within=within, not_made_again=lost)
    means = [statistics.fmean(column) for column in zip(*ranks, strict=True)]
    correlations = *(f"{mean:.2f}" for mean in means), ""
    rows += [
        ("all", f"within {GOOD[0]} to {GOOD[1]}", "", *(f"{share:.0%}" for share in within)),
        ("all", "rank correlation, mean of 6", "", *correlations),
    ]
    return Table(
        "Hosts",
        f"predicted / measured of {len(ratios)} candidates recorded on an H200; {len(lost)} others "
        "cannot be made again",
        ("model", "candidate", "measured ms", "without host", "with host", "fitted"),
        tuple(rows),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """A recorded candidate with its placement: ratios of predicted to measured step."""

    model: str
    name: str
    measured: str
    recorded: float
    simulated: float
    fitted: float
    is_fitted_to: bool


def again(file: str, found: dict[str, Any]) -> Table:
    """Simulate the recorded placements of a file with its recorded costs of ops, then fit these."""
    parts, runs, lost = parts_of(file), list[Rerun](), list[str]()
    for part, content in parts.items():
        model, _, what = part.partition(": ")
        if what == "no limit":
            try:
                graph = recorded_graph(parts, model)
                problem = costed(
                    graph_of(model) if graph is None else graph, machine(file), content["costs_ns"]
                )
                if graph is not None and problem.graph.hash != content["graph"]:
                    raise ValueError("another graph was recorded with it")
            except ValueError as error:
                lost.append(f"{model} ({error})")
                continue
            runs += reruns(problem, model, parts)
    ratios = [(each.recorded, each.simulated, each.fitted) for each in runs]
    good = [
        [GOOD[0] <= ratio <= GOOD[1] for ratio in column] for column in zip(*ratios, strict=True)
    ]
    found.update(file=file, reruns=[asdict(each) for each in runs], not_made_again=lost)
    rows: list[tuple[str, ...]] = [
        (each.model, each.name, each.measured, *(f"{ratio:.2f}" for ratio in own))
        for each, own in zip(runs, ratios, strict=True)
    ]
    shares = (f"{statistics.fmean(column):.0%}" for column in good)
    rows.append(("all", f"within {GOOD[0]} to {GOOD[1]}", "", *shares))
    return Table(
        f"Hosts, {file}",
        "predicted / measured as recorded, simulated again with the recorded costs of ops, and "
        "with costs fitted to the rows without a limit; (tie): with the fastest of its rounds; "
        f"not made again: {', '.join(lost) or 'none'}",
        ("model", "candidate", "measured ms", "recorded", "simulated", "fitted"),
        tuple(rows),
    )


def reruns(problem: Problem, model: str, parts: Mapping[str, Any]) -> Iterator[Rerun]:
    """Yield the candidates of a model, with costs fitted to those without a limit of memory."""
    own: dict[str, list[dict[str, Any]]] = {}
    for part, content in parts.items():
        name, _, what = part.partition(": ")
        if name == model and "inference" not in what:
            rows = [row for row in content.get("rows", []) if "median_s" in row]
            own[what] = [row for row in rows if "devices" in row]
    unlimited = own["no limit"]
    placements = [recorded_placement(problem, row) for row in unlimited]
    factors = fitted_factors(problem, placements, [row["median_s"] for row in unlimited])
    fitted = scaled_problem(problem, factors)
    for what, rows in own.items():
        for row in rows:
            placement, measured_s = recorded_placement(problem, row), row["median_s"]
            steps_s = [
                float(Simulator(each, memory=False).step_ns(*placement.arrays())[0]) / 1e9
                for each in (problem, fitted)
            ]
            yield Rerun(
                model=model,
                name=row["name"] if what == "no limit" else f"{row['name']}, {what}",
                measured=f"{measured_s * 1e3:.1f}{' (tie)' * row['tied_with_fastest']}",
                recorded=row["predicted_s"] / measured_s,
                simulated=steps_s[0] / measured_s,
                fitted=steps_s[1] / measured_s,
                is_fitted_to=what == "no limit",
            )


def recorded_placement(problem: Problem, row: Mapping[str, str]) -> Placement:
    """Return the placement of a row: a digit per op, and the ops by priority."""
    priority = np.empty(problem.op_count)
    priority[np.array(row["order"].split(), np.int64)] = -np.arange(problem.op_count)
    devices = np.array(list(row["devices"]), np.int32)
    return Placement.of(problem.graph, problem.cluster, devices, priority)


def costed(graph: nx.DiGraph[str], cluster: Cluster, costs_ns: Mapping[str, str]) -> Problem:
    """Return the problem of a graph with recorded costs, a text of nanoseconds per device.

    Raises:
        ValueError: the graph has another number of ops than the recorded one.
    """
    costs = {name: np.array(text.split(), np.float64) / 1e9 for name, text in costs_ns.items()}
    for name, cost_s in costs.items():
        if len(cost_s) != len(graph):
            raise ValueError(f"{len(graph)} ops, but {len(cost_s)} were recorded on {name}")
    source = {name: ["recorded"] * len(graph) for name in costs}
    return Problem.of(GraphArrays.from_graph(with_costs(graph, costs, source)), cluster)


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's rank correlation of values without ties."""
    ranks = [np.argsort(np.argsort(values)) for values in (one, other)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def parts(effort: Effort) -> dict[str, Part]:
    """Return the part; it needs some gigabytes of memory, and transformers."""
    later: dict[str, Part] = {f"again, {file}": partial(again, file) for file in LATER}
    return {} if effort.level == "quick" else {"recorded": compared} | later
