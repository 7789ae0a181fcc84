"""Reductions of a bucket: their error against the mean, and what they leave for later steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from placer.parallel.buckets import Bucket, filled_buckets
from placer.parallel.grad_sync import GradSync
from placer.parallel.methods.onebit import OneBit
from placer.parallel.methods.reductions import (
    AllReduce,
    BFloat16,
    Float16,
    Hierarchical,
    HookReduction,
    PowerSgd,
    Reduction,
    levels_of,
)
from placer.parallel.processes import new_group
from tests.helpers.ranks import RankError, on_ranks
from tests.helpers.replicas import backward, mlp, mse, own_batch, parameters

SIZES = ((5, 3), (7,), (40, 2))


def bucket_of(gradients: list[Tensor]) -> Bucket:
    members = {str(i): nn.Parameter(torch.zeros_like(one)) for i, one in enumerate(gradients)}
    [bucket] = filled_buckets(dict(reversed(members.items())), 1 << 20, 1)
    for view, gradient in zip(bucket.gradients(), gradients, strict=True):
        view.copy_(gradient)
    return bucket


def gradients_of(rank: int, step: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(size, generator=generator) for size in SIZES]


def reduced(make: Callable[[], Reduction], steps: int = 1) -> list[Tensor]:
    reduction = make()
    means = []
    for step in range(steps):
        bucket = bucket_of(gradients_of(dist.get_rank(), step))
        reduction.start(bucket).wait()
        means.append(bucket.flat.clone())
    return means


def flat_mean(ranks: int, step: int = 0) -> Tensor:
    every = [torch.cat([g.flatten() for g in gradients_of(rank, step)]) for rank in range(ranks)]
    return torch.stack(every).mean(0)


@pytest.mark.parametrize(
    ("ranks", "make", "tolerance"),
    [
        (4, AllReduce, 1e-6),
        (4, Float16, 3e-3),
        (4, BFloat16, 3e-2),
        (4, partial(Hierarchical, levels=(2, 2)), 1e-6),
        (4, partial(Hierarchical, levels=(4, 1)), 1e-6),
        (4, partial(Hierarchical, levels=(1, 4)), 1e-6),
        (8, partial(Hierarchical, levels=(2, 2, 2)), 1e-6),
        (2, partial(HookReduction, default_hooks.fp16_compress_hook, None), 3e-3),
    ],
    ids=["allreduce", "fp16", "bf16", "2x2", "4x1", "1x4", "2x2x2", "hook fp16"],
)
def test_the_mean_is_the_same_on_all_ranks(
    ranks: int, make: Callable[[], Reduction], tolerance: float
) -> None:
    results = on_ranks(ranks, reduced, make)
    for [mean] in results:
        torch.testing.assert_close(mean, flat_mean(ranks), rtol=0, atol=tolerance)
        assert torch.equal(mean, results[0][0])


def test_levels_that_do_not_fit_the_ranks_are_refused() -> None:
    with pytest.raises(RankError, match="levels 2x3 have 6 ranks"):
        on_ranks(2, reduced, partial(Hierarchical, levels=(2, 3)))


@pytest.mark.parametrize(
    ("hosts", "levels"),
    [("aaaa", (4,)), ("abcd", (4,)), ("aaabbb", (3, 2)), ("abab", (4,)), ("aaab", (4,))],
)
def test_levels_are_hosts_of_equally_many_consecutive_ranks(
    hosts: str, levels: tuple[int, ...]
) -> None:
    assert levels_of(list(hosts)) == levels


def levels_of_groups() -> dict[str, tuple[int, ...]]:
    """Return the default levels on simulated hosts of two ranks each."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("socket.gethostname", lambda: f"host{rank // 2}")
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        of_host = new_group([rank - rank % 2, rank - rank % 2 + 1])
        across = new_group(range(rank % 2, ranks, 2))
        groups = {"all": None, "of a host": of_host, "across": across}
        return {name: Hierarchical(group).levels for name, group in groups.items()}


def test_a_group_that_is_not_all_ranks_has_levels_of_its_own() -> None:
    expected = {"all": (2, 4), "of a host": (2,), "across": (4,)}
    assert on_ranks(8, levels_of_groups) == [expected] * 8


def one_bit_steps(steps: int) -> tuple[list[Tensor], dict[str, Any]]:
    reduction = OneBit(warmup_steps=1)
    means = reduced(lambda: reduction, steps)
    return means, reduction.state_dict()["residuals"]["0"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_bits_and_what_they_leave_out_add_up_to_all_gradients(ranks: int) -> None:
    steps = 6
    results = on_ranks(ranks, one_bit_steps, steps)
    truth = sum(flat_mean(ranks, step) for step in range(steps))
    left = torch.stack([kept["residual"] for _, kept in results]).mean(0)  # (ranks, length)
    left += torch.cat([kept["stripe"] for _, kept in results])
    sent = torch.stack(results[0][0]).sum(0)
    torch.testing.assert_close(sent + left.flatten()[: len(sent)], truth, rtol=1e-5, atol=1e-5)
    assert left.abs().max() > 0.1  # encoding in bits leaves errors
    for means, _ in results:
        torch.testing.assert_close(means, results[0][0], rtol=0, atol=0)
    torch.testing.assert_close(results[0][0][0], flat_mean(ranks))  # the warm-up step


def train_by_powersgd(under_ddp: bool) -> dict[str, Tensor]:
    replica = mlp()
    sgd = torch.optim.SGD(replica.parameters(), lr=0.1)
    module: nn.Module = replica
    if under_ddp:
        state = PowerSGDState(dist.group.WORLD, 2, start_powerSGD_iter=2)
        module = DistributedDataParallel(replica)
        module.register_comm_hook(state, powerSGD_hook)
    else:
        sync = GradSync(replica, reduction=partial(PowerSgd, warmup_steps=2))
    for number in range(8):
        sgd.zero_grad()
        backward(mse(module, own_batch(number, 16, 8)))
        if not under_ddp:
            sync.finish()
        sgd.step()
    return parameters(replica)


def test_hooks_reduce_as_under_ddp() -> None:
    # one bucket in both; DDP keeps its parameters in the same order after the first step
    ours, ddp = (on_ranks(2, train_by_powersgd, under_ddp) for under_ddp in (False, True))
    for result, expected in zip(ours, ddp, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
