"""Losses at equal samples of methods that synchronize replicas, against synchronous SGD.

    python -m benchmarks sync_quality [--quick]

A student learns the labels of a random network, a tenth of them wrong, in one pass over fresh
samples; learning rates decay to 0. All workers are stacked in one process; averages and codings are
computed by the same code that runs on ranks. Synchronous SGD multiplies the learning rate by the
number of workers, half or a quarter of it, after a warm-up, and the best one counts; methods that
average models use the learning rate of one worker. About ten minutes on two idle cores; half a
minute with --quick: one seed of the short task for an eighth of its samples.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.record import Effort, Part
from benchmarks.tables import Table
from placer.parallel.methods.block_averager import AVERAGING, BMUF, BlockAverager, BlockUpdate
from placer.parallel.methods.onebit import Segments, decode, encode

WIDTHS = (32, 256, 256, 10)
TEACHER = (32, 64, 64, 10)
WRONG = 0.1
BATCH = 32
LR, MOMENTUM = 0.15, 0.5
TEST_SAMPLES = 20_000
ONE_BIT_WARMUP = 200


@dataclass(frozen=True, slots=True)
class Bar:
    """Largest allowed gap to synchronous SGD, or the least that a bad method must show."""

    gap: float
    is_least: bool = False

    def holds(self, gap: float) -> bool:
        """Return whether the gap keeps the bar; a diverged loss counts as infinite."""
        above = gap if math.isfinite(gap) else math.inf
        return above >= self.gap if self.is_least else above <= self.gap

    def __str__(self) -> str:
        return f"{'>=' if self.is_least else '<='} {self.gap:+.0%}"


@dataclass(frozen=True, slots=True)
class Task:
    """Number of workers and steps; models are averaged after each block of ``period`` steps."""

    workers: int
    period: int
    steps: int
    methods: tuple[str, ...] = ("synchronous", "averaging", "BMUF")
    bars: tuple[tuple[str, Bar], ...] = ()  # by method


SHORT = Task(
    workers=4,
    period=16,
    steps=4096,
    methods=("synchronous", "averaging", "BMUF", "1-bit", "1-bit without feedback"),
    bars=(
        ("averaging", Bar(0.03, is_least=True)),
        ("BMUF", Bar(0.01)),
        ("1-bit", Bar(0.01)),
        ("1-bit without feedback", Bar(0.20, is_least=True)),
    ),
)
LONG = Task(
    workers=16,
    period=8,
    steps=4096,
    bars=(("averaging", Bar(0.08, is_least=True)), ("BMUF", Bar(0.02))),
)


@dataclass(frozen=True, slots=True)
class Job:
    task: Task
    method: str
    seed: int
    lr_factor: float = 1.0


class Data:
    """Fresh samples of a seed, labelled by its teacher network."""

    def __init__(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.teacher = [
            torch.randn(before + 1, after, generator=self.random) * math.sqrt(2 / before)
            for before, after in pairwise(TEACHER)
        ]

    def samples(self, *shape: int) -> tuple[Tensor, Tensor]:
        """Return inputs (*shape, 32) and labels (*shape)."""
        inputs = torch.randn(*shape, TEACHER[0], generator=self.random)
        hidden = inputs
        for number, weight in enumerate(self.teacher):
            hidden = (torch.relu(hidden) if number else hidden) @ weight[:-1] + weight[-1]
        wrong = torch.rand(*shape, generator=self.random) < WRONG
        other = torch.randint(TEACHER[-1], shape, generator=self.random)
        return inputs, torch.where(wrong, other, hidden.argmax(-1))


def judging(seed: int) -> tuple[Tensor, Tensor]:
    """Return (1, TEST_SAMPLES) test samples of a seed's teacher."""
    data = Data(seed)
    data.random.manual_seed(10_000 + seed)
    return data.samples(1, TEST_SAMPLES)


class Students(nn.Module):
    """N networks with equal initial weights, all their parameters in one tensor (N, P)."""

    def __init__(self, count: int, seed: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(1000 + seed)
        self.shapes = [
            shape for before, after in pairwise(WIDTHS) for shape in ((before, after), (1, after))
        ]
        flat = [
            (torch.rand(shape, generator=random) * 2 - 1).flatten() / math.sqrt(max(shape[0], 16))
            for shape in self.shapes
        ]
        self.all = nn.Parameter(torch.cat(flat).expand(count, -1).clone())

    @property
    def sizes(self) -> list[int]:
        return [math.prod(shape) for shape in self.shapes]

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the students' mean losses; inputs (N, B, 32), labels (N, B)."""
        parts = self.all.split(self.sizes, 1)  # type: ignore[no-untyped-call]  # torch leaves it so
        weights = [part.view(-1, *shape) for part, shape in zip(parts, self.shapes, strict=True)]
        hidden = inputs
        for number in range(0, len(weights), 2):
            hidden = torch.relu(hidden) if number else hidden
            hidden = torch.baddbmm(weights[number + 1], hidden, weights[number])
        found = F.cross_entropy(hidden.flatten(0, 1), labels.flatten(), reduction="sum")
        return found / labels.shape[1]

    def test_loss(self, seed: int) -> float:
        """Return the test loss of the mean student."""
        inputs, labels = judging(seed)
        with torch.no_grad():
            mean = Students(1, seed)
            mean.all.copy_(self.all.mean(0, keepdim=True))
            return float(mean.loss(inputs, labels))


def mean_of_stacked(count: int) -> Callable[[Tensor], Tensor]:
    def mean(flat: Tensor) -> Tensor:
        rows = flat.view(count, -1)
        return rows.mean(0).expand_as(rows).flatten()

    return mean


class Bits:
    """The mean of 1-bit encoded gradients, as all ranks of 1-bit SGD compute it together."""

    def __init__(self, sizes: list[int], workers: int, *, feedback: bool) -> None:
        one = Segments.of_sizes(sizes, workers)
        self.every = Segments(one.of.repeat(workers, 1), one.count)  # all stripes of all workers
        self.stripes = one
        self.workers = workers
        self.feedback = feedback
        self.own = torch.zeros(self.every.of.shape)
        self.stripe = torch.zeros(one.of.shape)

    def mean(self, gradients: Tensor) -> Tensor:
        """Return the mean (P,) of gradients (N, P)."""
        size = gradients.shape[1]
        padded = F.pad(gradients, (0, self.stripes.of.numel() - size))
        due = padded.view_as(self.own) + self.own
        wire, sent = encode(due, self.every)
        by_stripe = decode(wire, self.every).view(self.workers, *self.stripe.shape).mean(0)
        mean_due = by_stripe + self.stripe
        wire, mean_sent = encode(mean_due, self.stripes)
        if self.feedback:
            self.own, self.stripe = due - sent, mean_due - mean_sent
        return decode(wire, self.stripes).flatten()[:size]


def blocks(job: Job, update: BlockUpdate) -> float:
    """Train by model averaging or BMUF: every worker has its own model and samples."""
    task, data = job.task, Data(job.seed)
    students = Students(task.workers, job.seed)
    sgd = torch.optim.SGD(students.parameters(), lr=LR * job.lr_factor, momentum=MOMENTUM)
    averager = BlockAverager(
        students,
        update,
        period=task.period,
        inner=sgd,
        workers=task.workers,
        mean=mean_of_stacked(task.workers),
    )
    for number in range(task.steps):
        sgd.param_groups[0]["lr"] = LR * job.lr_factor * _left(number, task)
        sgd.zero_grad()
        torch.autograd.backward(students.loss(*data.samples(task.workers, BATCH)))
        sgd.step()
        averager.after_step()
    averager.finish()
    return students.test_loss(job.seed)


def every_step(job: Job, bits: Bits | None = None) -> float:
    """Train by synchronous SGD on one model; with bits, the workers' gradients are encoded."""
    task, data = job.task, Data(job.seed)
    model = Students(1, job.seed)
    sgd = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    for number in range(task.steps):
        sgd.param_groups[0]["lr"] = learning_rate(number, task, job.lr_factor)
        inputs, labels = data.samples(task.workers, BATCH)
        sgd.zero_grad()
        if bits is None or number < ONE_BIT_WARMUP:
            loss = model.loss(inputs.flatten(0, 1)[None], labels.flatten()[None])
            torch.autograd.backward(loss)
        else:
            stacked = Students(task.workers, job.seed)
            stacked.all = nn.Parameter(model.all.detach().expand(task.workers, -1))
            torch.autograd.backward(stacked.loss(inputs, labels))
            assert stacked.all.grad is not None
            model.all.grad = bits.mean(stacked.all.grad)[None]
        sgd.step()
    return model.test_loss(job.seed)


def learning_rate(number: float, task: Task, factor: float) -> float:
    """Return the learning rate of a step: warm-up to ``factor`` times LR, with decay to 0."""
    warm = min(1.0, number / (task.steps // 20))
    return LR * (1 + (factor - 1) * warm) * _left(number, task)


def _left(number: float, task: Task) -> float:
    return 1 - number / task.steps


def trained(job: Job) -> float:
    """Return the test loss of one training."""
    torch.set_num_threads(1)
    sizes = Students(1, 0).sizes
    match job.method:
        case "averaging":
            return blocks(job, AVERAGING)
        case "BMUF":
            return blocks(job, BMUF)
        case "1-bit":
            return every_step(job, Bits(sizes, job.task.workers, feedback=True))
        case "1-bit without feedback":
            return every_step(job, Bits(sizes, job.task.workers, feedback=False))
    return every_step(job)


def jobs(task: Task, seeds: Iterable[int]) -> list[Job]:
    """Return all trainings of a task."""
    full = float(task.workers)
    found = []
    for method in task.methods:
        if method == "synchronous":
            factors: tuple[float, ...] = (full, full / 2, full / 4)
        else:
            factors = (full,) if method.startswith("1-bit") else (1.0,)
        found += [Job(task, method, seed, factor) for seed in seeds for factor in factors]
    return found


def parts(effort: Effort) -> dict[str, Part]:
    """Return a part for each task."""
    quick = replace(SHORT, steps=SHORT.steps // 8, bars=())
    seeds = effort.seed_count(quick=1, normal=3, full=3)
    tasks = effort.pick(quick=(quick,), normal=(SHORT, LONG), full=(SHORT, LONG))
    return {f"{task.workers} workers": partial(compared, task, seeds) for task in tasks}


def compared(task: Task, seeds: int, found: dict[str, Any]) -> Table:
    """Train with all methods of a task in several processes and compare their losses."""
    own = jobs(task, tuple(range(seeds)))
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as pool:
        losses = dict(zip(own, pool.map(trained, own), strict=True))
    found.update((name, value) for name, value in asdict(task).items() if name != "bars")
    found["losses"] = [
        {"method": j.method, "seed": j.seed, "lr_factor": j.lr_factor, "loss": loss}
        for j, loss in losses.items()
    ]
    found["means"] = rows = means(task, losses)
    return Table(
        f"Quality of synchronization, {task.workers} workers",
        f"loss after {task.steps} steps of {BATCH}, blocks of {task.period} steps, mean of {seeds} "
        "seeds, against synchronous SGD",
        ("method", "loss", "gap", "bar", "holds"),
        tuple(
            (
                row["method"],
                f"{row['mean_loss']:.4f}",
                f"{row['gap']:+.1%}",
                row.get("bar", ""),
                {True: "yes", False: "NO", None: ""}[row.get("holds")],
            )
            for row in rows
        ),
    )


def means(task: Task, losses: Mapping[Job, float]) -> list[dict[str, Any]]:
    """Return mean losses over seeds against synchronous SGD, and their bars."""
    found: dict[str, float] = {}
    for job in losses:
        own = [loss for other, loss in losses.items() if replace(other, seed=job.seed) == job]
        mean = statistics.fmean(own)
        found[job.method] = min(mean, found.get(job.method, math.inf), key=_finite)
    rows: list[dict[str, Any]] = []
    for method, mean in found.items():
        gap = mean / found["synchronous"] - 1
        row = {"method": method, "mean_loss": mean, "gap": gap}
        if (bar := dict(task.bars).get(method)) is not None:
            row |= {"bar": str(bar), "holds": bar.holds(gap)}
        rows.append(row)
    return rows


def _finite(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf
