"""The benchmark of losses runs what ranks run."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from test_reductions import SIZES, bucket_of, gradients_of
from torch import Tensor

from benchmarks import sync_quality
from benchmarks.sync_quality import Bar, Bits, Job, Students, Task
from placer.parallel.onebit import OneBit

RANKS = 2
STEPS = 5


def by_ranks() -> list[Tensor]:
    reduction = OneBit(warmup_steps=0)
    means = []
    for step in range(STEPS):
        bucket = bucket_of(gradients_of(dist.get_rank(), step))
        reduction.start(bucket).wait()
        means.append(bucket.buffer().clone())
    return means


def test_workers_stacked_in_one_process_code_gradients_as_ranks_do() -> None:
    bits = Bits([torch.Size(size).numel() for size in SIZES], RANKS, feedback=True)
    found = []
    for step in range(STEPS):
        every = [torch.cat([g.flatten() for g in gradients_of(r, step)]) for r in range(RANKS)]
        found.append(bits.mean(torch.stack(every)))
    torch.testing.assert_close(found, on_ranks(RANKS, by_ranks)[0], rtol=0, atol=1e-6)


def test_stacked_students_have_the_losses_of_each() -> None:
    students = Students(3, seed=0)
    with torch.no_grad():
        students.all.add_(0.1 * torch.randn(students.all.shape))
    inputs, labels = sync_quality.Data(0).samples(3, 5)
    one = Students(1, seed=0)
    alone = []
    for worker in range(3):
        with torch.no_grad():
            one.all.copy_(students.all[worker : worker + 1])
        alone.append(one.loss(inputs[worker][None], labels[worker][None]))
    torch.testing.assert_close(students.loss(inputs, labels), torch.stack(alone).sum())


@pytest.mark.parametrize(
    "method", ["synchronous", "averaging", "BMUF", "1-bit", "1-bit without feedback"]
)
def test_every_method_learns_something(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_quality, "ONE_BIT_WARMUP", 2)
    task = Task(workers=2, period=4, steps=40)
    start = Students(1, 0).test_loss(0)
    assert sync_quality.trained(Job(task, method, 0)) < start


def test_the_table_compares_means_with_the_best_synchronous_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bars = ("BMUF", Bar(0.04)), ("1-bit", Bar(0.2, is_least=True))
    task = Task(workers=2, period=4, steps=8, bars=bars)
    losses = {
        Job(task, "synchronous", 0, 2.0): 1.0,
        Job(task, "synchronous", 1, 2.0): 3.0,
        Job(task, "synchronous", 0, 1.0): float("nan"),
        Job(task, "synchronous", 1, 1.0): 1.0,
        Job(task, "BMUF", 0): 1.5,
        Job(task, "BMUF", 1): 2.7,
        Job(task, "1-bit", 0): float("nan"),
    }
    sync_quality.table(task, losses)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["synchronous", "2.0000", "+0.0%"]
    assert lines[2].split() == ["BMUF", "2.1000", "+5.0%", "<=", "+4%", "NO"]
    assert lines[3].split() == ["1-bit", "nan", "+nan%", ">=", "+20%", "yes"]
