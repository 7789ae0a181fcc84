"""The benchmark of losses uses the same code as ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.replicas import sync_quality
from benchmarks.replicas.sync_quality import Bits, Students
from placer.parallel.methods.onebit import OneBit
from tests.helpers.ranks import on_ranks
from tests.placer.parallel.methods.test_reductions import SIZES, bucket_of, gradients_of

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


@pytest.mark.slow
def test_workers_stacked_in_one_process_code_gradients_as_ranks_do() -> None:
    bits = Bits([torch.Size(size).numel() for size in SIZES], RANKS, feedback=True)
    found = []
    for step in range(STEPS):
        every = [torch.cat([g.flatten() for g in gradients_of(r, step)]) for r in range(RANKS)]
        found.append(bits.mean(torch.stack(every)))
    torch.testing.assert_close(found, on_ranks(RANKS, by_ranks)[0], rtol=1e-5, atol=1e-6)


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
