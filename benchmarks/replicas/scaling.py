"""Simulated scaling of data parallelism against published figures; nothing is measured.

    python -m benchmarks scaling

For each figure: the predicted efficiency if reductions begin after the step, if they overlap with
the backward pass in buckets, and if everything that can be hidden is hidden, next to the published
efficiency. ResNet-50 uses the graph of the model with its forward and backward pass scaled to
published times; for other models the published amount of gradients appears evenly over the last two
thirds of a step. Numbers that the source does not give are marked as assumed. Averages of models
do not overlap with computation: their band begins at the prediction, and their period, which the
source does not give, is fitted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from torch.nn import functional as F

from benchmarks.record import Effort, Part
from benchmarks.tables import Table
from envs.collectives import Level, halving_doubling_s, ring_s, single_reducer_s
from envs.costs.roofline import roofline_costs
from envs.hardware.cluster import Cluster, Device
from envs.placement import Placement
from envs.problem import Problem
from envs.replicas.reductions import replicated
from envs.replicas.step import ReplicaSimulator, ReplicaStep
from envs.replicas.topology import SlotNetwork
from envs.replication import AUTO, BUCKET_BYTES, Replication
from graphs.costs import with_costs
from graphs.extract import Workload, extract
from graphs.graph import PHASES, GraphArrays
from graphs.models import ResNet

IMAGENET: Final = 1_281_167  # training images
EPOCHS: Final = 90
P100: Final = Device(  # data sheet: Tesla P100 SXM2, fp32
    name="gpu:0",
    kind="p100",
    memory_bytes=16 * 10**9,
    peak_flop_per_s=10.6e12,
    bandwidth_bytes_per_s=732e9,
    source="NVIDIA Tesla P100 data sheet",
)
GRADIENTS: Final = 100  # of models that are not traced


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """A published efficiency and the inputs of its prediction."""

    name: str
    published: float
    step: ReplicaStep
    levels: tuple[Level, ...]
    source: str
    assumed: str
    algorithm: str = AUTO
    bucket_bytes: int = BUCKET_BYTES  # 1: every layer is reduced separately
    every: int = 1  # steps between averages of parameters; values above 1 are fitted to the figure

    @property
    def replication(self) -> Replication:
        """Return how gradients are reduced."""
        return Replication(reduction=self.algorithm, bucket_bytes=self.bucket_bytes)


@dataclass(frozen=True, slots=True)
class Predicted:
    """Predicted efficiencies."""

    no_overlap: float
    in_buckets: float
    full_overlap: float

    def holds(self, published: float) -> bool:
        """Return whether an efficiency lies between no overlap and full overlap."""
        return self.no_overlap <= published <= self.full_overlap


def predicted(one: Scaling) -> Predicted:
    """Predict the efficiency of replicas of one device each."""
    network = SlotNetwork(levels=one.levels, queues=frozenset())
    if one.every > 1:
        rare = replicated(one.step, [network], replace(one.replication, average_every=one.every))
        return Predicted(rare.alone_s / rare.no_overlap_s, rare.alone_s / rare.step_s, 1.0)
    found = replicated(one.step, [network], one.replication)
    return Predicted(
        found.alone_s / found.no_overlap_s,
        found.alone_s / found.step_s,
        found.alone_s / found.full_overlap_s,
    )


def scalings() -> Iterator[Scaling]:
    """Yield every published efficiency."""
    goyal_s = 29 * 3600 / (EPOCHS * IMAGENET / 256)  # a step of 8 GPUs, 32 images each
    yield Scaling(
        name="Facebook, ResNet-50, 8 -> 256 GPUs",
        published=29.0 / 32.0,  # 29 h on 8 GPUs, 1 h on 256
        step=resnet_step(goyal_s, backward_s=0.120),
        levels=(nvlink(8), level(32, 50e9 / 8)),
        source="Goyal et al., arXiv 1706.02677: 50 Gbit/s a server, backward pass of 120 ms, layer "
        "by layer",
        assumed="latency 50 us, NVLink 30 GB/s",
        bucket_bytes=1,
    )
    yield Scaling(
        name="IBM DDL, ResNet-50, 256 GPUs",
        published=0.95,
        step=resnet_step(0.190, backward_s=0.190 * 2 / 3),
        levels=(nvlink(4), level(64, 12.5e9)),
        source="Cho et al., arXiv 1708.02188: 64 servers of 4 P100, EDR InfiniBand",
        assumed="a step of 190 ms, latency 50 us, NVLink 30 GB/s",
    )
    tpu_s = 1402 * 60 / (EPOCHS * IMAGENET / 256)
    yield Scaling(
        name="TPU v2, ResNet-50, 1 -> 32",
        published=1402 / 45 / 32,
        step=resnet_step(tpu_s, backward_s=tpu_s * 2 / 3),
        levels=(level(32, 496e9 / 8, latency_s=1e-6),),
        source="Dean, Patterson, Young, IEEE Micro 2018: 1402 and 45 minutes",
        assumed="256 images each, a ring over one link of 496 Gbit/s with 1 us, layer by layer",
        algorithm="ring",
        bucket_bytes=1,
    )
    for model, millions, images_per_s, share in (
        ("Inception-V3", 23.8, 130, 0.90),
        ("ResNet-101", 44.5, 120, 0.90),
        ("VGG-16", 138.4, 150, 0.68),
    ):
        yield Scaling(
            name=f"Horovod, {model}, 512 GPUs",
            published=share,
            step=even_step(64 / images_per_s, 4 * millions * 1e6),
            levels=(level(4, 12e9), level(128, 25e9 / 8)),
            source="Sergeev and Del Balso, arXiv 1802.05799: 128 servers of 4 P100, 25 Gbit/s",
            assumed=f"64 images each at {images_per_s} a second, PCIe of 12 GB/s, latency 50 us",
        )
    for model, workers, speed_up, every in (("LSTM", 16, 15.0, 26), ("DNN", 64, 56.0, 13)):
        yield Scaling(
            name=f"BMUF, {model}, {workers} workers",
            published=speed_up / workers,
            step=even_step(0.100, 4 * 30e6),
            levels=(level(workers, 10e9 / 8),),
            source="Chen and Huo, ICASSP 2016: 15x on 16, 56x on 64",
            assumed="30 M parameters, 100 ms a step, 10 Gbit/s. Fitted: averages every "
            f"{every} steps",
            every=every,
        )


def level(ranks: int, bandwidth_bytes_per_s: float, latency_s: float = 50e-6) -> Level:
    return Level(ranks=ranks, latency_s=latency_s, bandwidth_bytes_per_s=bandwidth_bytes_per_s)


def nvlink(ranks: int) -> Level:
    return level(ranks, 30e9, latency_s=10e-6)


@cache
def resnet() -> tuple[ReplicaStep, float]:
    """Return ResNet-50 with 32 images on a P100 by its roofline, and its forward nanoseconds."""
    with torch.device("meta"):
        model = ResNet().train()
        inputs = (torch.empty(32, 3, 224, 224), torch.empty(32, dtype=torch.long))
    graph = extract(Workload.of(model, inputs, F.cross_entropy), "export").graph
    costs = roofline_costs(graph, [P100])
    sources = {kind: ["roofline"] * len(graph) for kind in costs}
    arrays = GraphArrays.from_graph(with_costs(graph, costs, sources))
    problem = Problem.of(arrays, Cluster(name="one", devices=(P100,)))
    nowhere_else = np.zeros(len(arrays), np.int32)
    order = -np.arange(len(arrays), dtype=np.float64)
    placement = Placement.of(arrays, problem.cluster, nowhere_else, order)
    is_forward = arrays.phase == PHASES.index("forward")
    return ReplicaSimulator(problem).step(placement), float(problem.cost_ns[is_forward].sum())


def resnet_step(step_s: float, *, backward_s: float) -> ReplicaStep:
    """Return the ResNet-50 step, scaled to these step and backward seconds."""
    step, forward_ns = resnet()
    share = (step.ready_ns - forward_ns) / (step.step_ns - forward_ns)
    ready_s = step_s - backward_s * (1 - share)
    step_ns = round(step_s * 1e9)
    return replace(
        step, step_ns=step_ns, pass_ns=step_ns, ready_ns=np.rint(ready_s * 1e9).astype(np.int64)
    )


def even_step(step_s: float, gradient_bytes: float) -> ReplicaStep:
    """Return a step with equal gradients that appear evenly over its last two thirds."""
    step_ns = round(step_s * 1e9)
    size = np.full(GRADIENTS, round(gradient_bytes / GRADIENTS), np.int64)
    return ReplicaStep(
        step_ns=step_ns,
        pass_ns=step_ns,
        slot=np.zeros(GRADIENTS, np.int32),
        size_bytes=size,
        ready_ns=np.linspace(step_ns / 3, step_ns, GRADIENTS + 1)[1:].astype(np.int64),
        update_ns=np.zeros(1, np.int64),
        peak_bytes=np.zeros(1, np.int64),
    )


def baidu_s() -> list[tuple[str, float, float]]:
    """Return (name, published, computed) seconds for 300 M fp32 parameters over 1 GB/s.

    Source: Gibiansky, "Bringing HPC techniques to deep learning", Baidu Research 2017.
    """
    size = 4 * 300e6
    rows = [
        (f"one reducer, {n} GPUs", published_s, single_reducer_s(size, level(n, 1e9, 0.0)))
        for n, published_s in ((2, 1.2), (10, 10.8))
    ]
    rings = ((2, 1.2), (10, 2.16), (10**6, 2.4))
    return rows + [
        (f"ring, {n} GPUs", published_s, ring_s(size, level(n, 1e9, 0.0)))
        for n, published_s in rings
    ]


def halving_gain(size_bytes: float) -> float:
    """Return ring over halving-doubling time on 32 servers, 50 Gbit/s; Goyal et al. report 3x."""
    servers = level(32, 50e9 / 8)
    return ring_s(size_bytes, servers) / halving_doubling_s(size_bytes, servers)


def parts(_: Effort) -> dict[str, Part]:
    """Return the parts."""
    return {"formulas": formulas, "efficiencies": efficiencies}


def formulas(found: dict[str, Any]) -> Table:
    """Compare the formulas of collectives with published times."""
    rows = [
        (name, f"{published_s:.2f} s", f"{computed_s:.2f} s")
        for name, published_s, computed_s in baidu_s()
    ]
    for size_bytes in (4 * 25.6e6 / 161, BUCKET_BYTES):
        name = f"32 servers, {size_bytes / 1e6:.2f} MB: ring / halving-doubling"
        rows.append((name, "3x", f"{halving_gain(size_bytes):.1f}x"))
    found["rows"] = rows
    title = "300 M fp32 parameters over 1 GB/s (Baidu), and arXiv 1706.02677"
    return Table("Collectives", title, ("collective", "published", "computed"), tuple(rows))


def efficiencies(found: dict[str, Any]) -> Table:
    """Compare predicted efficiencies with published ones."""
    rows = []
    for one in scalings():
        own = predicted(one)
        found[one.name] = {
            **asdict(own),
            "published": one.published,
            "source": one.source,
            "assumed": one.assumed,
            "algorithm": algorithm_of(one),
        }
        shares = own.no_overlap, own.in_buckets, own.full_overlap, one.published
        in_band = "yes" if own.holds(one.published) else "NO"
        fitted = ", fitted" if one.every > 1 else ""
        rows.append((one.name, *(f"{share:.1%}" for share in shares), in_band + fitted))
    return Table(
        "Scaling of data parallelism",
        "predicted and published efficiencies; sources and assumptions in benchmarks/replicas/"
        "scaling.py",
        ("system", "no overlap", "buckets", "full overlap", "published", "in band"),
        tuple(rows),
    )


def algorithm_of(one: Scaling) -> str:
    """Return the names of the algorithms that reduce a bucket, by level."""
    size = float(one.step.size_bytes.sum())
    bucket = int(min(size, max(one.bucket_bytes, size / GRADIENTS)))
    how = one.replication.all_reduce(bucket, one.levels)
    return ", ".join(how.by_level) or how.algorithm
