"""Reductions of a bucket: their error against the mean, and what they leave for later steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from envs.replication import BUCKET_BYTES
from placer.parallel.buckets import Bucket, filled_buckets
from placer.parallel.grad_sync import GradSync
from placer.parallel.methods import reductions
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
from tests.helpers.ranks import RankError, each, on_ranks
from tests.helpers.replicas import backward, mlp, mse, own_batch, parameters

SIZES = ((5, 3), (7,), (40, 2))
BIT_STEPS = 6


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


REDUCTIONS: dict[str, tuple[int, Callable[[], Reduction], float]] = {
    "allreduce": (4, AllReduce, 1e-6),
    "fp16": (4, Float16, 3e-3),
    "bf16": (4, BFloat16, 3e-2),
    "2x2": (4, partial(Hierarchical, levels=(2, 2)), 1e-6),
    "4x1": (4, partial(Hierarchical, levels=(4, 1)), 1e-6),
    "1x4": (4, partial(Hierarchical, levels=(1, 4)), 1e-6),
    "2x2x2": (8, partial(Hierarchical, levels=(2, 2, 2)), 1e-6),
    "hook fp16": (2, partial(HookReduction, default_hooks.fp16_compress_hook, None), 3e-3),
}
"""{name: (ranks, reduction, tolerance of the mean)}"""


@cache
def results(ranks: int) -> list[dict[str, Any]]:
    """Return by rank what all tests need of this number of ranks; one launch serves them all."""
    made = {name: (reduced, make) for name, (of, make, _) in REDUCTIONS.items() if of == ranks}
    further: dict[int, dict[str, Any]] = {
        2: {
            "bits": (one_bit_steps, BIT_STEPS),
            "powersgd": (train_by_powersgd, False),
            "powersgd under ddp": (train_by_powersgd, True),
            "powersgd, some buckets": (train_by_powersgd, False, 3000),
            "complex": (reduced_complex,),
            "overflow": (bits_after_an_overflow,),
        },
        3: {"bits": (one_bit_steps, BIT_STEPS)},
        4: {"fake gpu": (scattered_on_a_fake_gpu,)},
        8: {"levels": (levels_of_groups,)},
    }
    found: list[dict[str, Any]] = on_ranks(ranks, each, made | further.get(ranks, {}))
    return found


def scattered_on_a_fake_gpu() -> tuple[int, Tensor]:
    """Return the number of reduce-scatters of a bucket there, and the mean."""
    from tests.fake_cuda import fake_cuda

    scattered: list[Tensor] = []
    scatter = reductions.reduce_scatter

    def counted(part: Tensor, flat: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
        scattered.append(flat)
        return scatter(part, flat, group)

    with fake_cuda(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(reductions, "reduce_scatter", counted)
        bucket = bucket_of([gradient.to("cuda:0") for gradient in gradients_of(dist.get_rank())])
        Hierarchical(levels=(2, 2)).start(bucket).wait()
        return len(scattered), bucket.flat.cpu()


@pytest.mark.slow
def test_gloo_reduces_tensors_of_gpus_that_are_shared_in_one_level() -> None:
    for of_rank in results(4):
        scatters, mean = of_rank["fake gpu"]
        assert scatters == 0
        torch.testing.assert_close(mean, flat_mean(4), rtol=0, atol=1e-6)


@pytest.mark.slow_repeats
@pytest.mark.parametrize("name", REDUCTIONS)
def test_the_mean_is_the_same_on_all_ranks(name: str) -> None:
    ranks, _, tolerance = REDUCTIONS[name]
    [first], *_ = means = [of_rank[name] for of_rank in results(ranks)]
    for [mean] in means:
        torch.testing.assert_close(mean, flat_mean(ranks), rtol=0, atol=tolerance)
        assert torch.equal(mean, first)


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
    assert [of_rank["levels"] for of_rank in results(8)] == [expected] * 8


def one_bit_steps(steps: int) -> tuple[list[Tensor], dict[str, Any]]:
    reduction = OneBit(warmup_steps=1)
    means = reduced(lambda: reduction, steps)
    return means, reduction.state_dict()["residuals"]["0"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_bits_and_what_they_leave_out_add_up_to_all_gradients(ranks: int) -> None:
    found = [of_rank["bits"] for of_rank in results(ranks)]
    truth = sum(flat_mean(ranks, step) for step in range(BIT_STEPS))
    left = torch.stack([kept["residual"] for _, kept in found]).mean(0)  # (ranks, length)
    left += torch.cat([kept["stripe"] for _, kept in found])
    sent = torch.stack(found[0][0]).sum(0)
    torch.testing.assert_close(sent + left.flatten()[: len(sent)], truth, rtol=1e-5, atol=1e-5)
    assert left.abs().max() > 0.1  # encoding in bits leaves errors
    for means, _ in found:
        torch.testing.assert_close(means, found[0][0], rtol=0, atol=0)
    torch.testing.assert_close(found[0][0][0], flat_mean(ranks))  # the warm-up step


def reduced_complex() -> dict[str, tuple[Tensor, Tensor]]:
    """Return by reduction the mean of a complex gradient and what it should be."""
    generator = torch.Generator().manual_seed(0)
    every = torch.randn(2, 40, dtype=torch.complex64, generator=generator)
    found = {}
    for make in (AllReduce, Float16, BFloat16, partial(OneBit, warmup_steps=0)):
        reduction, bucket = make(), bucket_of([every[dist.get_rank()]])
        reduction.start(bucket).wait()
        found[type(reduction).__name__] = (bucket.flat.clone(), every.mean(0))
    with pytest.raises(ValueError, match="real gradients only"):
        PowerSgd().start(bucket_of([every[0]]))
    return found


def test_complex_gradients_keep_both_parts() -> None:
    tolerance = {"AllReduce": 1e-6, "Float16": 3e-3, "BFloat16": 3e-2, "OneBit": 2.0}
    for of_rank in results(2):
        for name, (mean, truth) in of_rank["complex"].items():
            torch.testing.assert_close(mean, truth, rtol=0, atol=tolerance[name])
            assert len(mean.imag.unique()) > 1


def bits_after_an_overflow() -> list[bool]:
    reduction = OneBit(warmup_steps=0)
    finite = []
    for step in range(4):
        gradients = gradients_of(dist.get_rank(), step)
        if step == 1 and dist.get_rank() == 0:
            gradients[0][0, 0] = torch.inf
        bucket = bucket_of(gradients)
        reduction.start(bucket).wait()
        finite.append(bool(bucket.flat.isfinite().all()))
    return finite


def test_bits_of_one_overflow_do_not_spoil_later_steps() -> None:
    for of_rank in results(2):
        assert of_rank["overflow"] == [True, False, True, True]


def train_by_powersgd(under_ddp: bool, bucket_bytes: int = BUCKET_BYTES) -> dict[str, Tensor]:
    replica = mlp()
    sgd = torch.optim.SGD(replica.parameters(), lr=0.1)
    module: nn.Module = replica
    if under_ddp:
        state = PowerSGDState(dist.group.WORLD, 2, start_powerSGD_iter=2)
        module = DistributedDataParallel(replica)
        module.register_comm_hook(state, powerSGD_hook)
    else:
        reduction = partial(PowerSgd, warmup_steps=2)
        sync = GradSync(replica, reduction=reduction, bucket_bytes=bucket_bytes)
    for number in range(8):
        sgd.zero_grad()
        backward(mse(module, own_batch(number, 16, 8)))
        if not under_ddp:
            sync.finish()
        sgd.step()
    return parameters(replica)


def test_hooks_reduce_as_under_ddp() -> None:
    # one bucket in both; DDP keeps its parameters in the same order after the first step
    for of_rank in results(2):
        ours, ddp = of_rank["powersgd"], of_rank["powersgd under ddp"]
        torch.testing.assert_close(ours, ddp, rtol=1e-5, atol=1e-6)


def test_buckets_of_powersgd_are_reduced_in_the_same_order_on_all_ranks() -> None:
    # torch's hook begins further collectives on other threads: ranks mixed them up, or hung
    first, second = (of_rank["powersgd, some buckets"] for of_rank in results(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    for name, parameter in mlp().named_parameters():
        assert not torch.equal(first[name], parameter)


def devices_of_state() -> tuple[set[str], str]:
    """Return where a hook finds residuals and factors, and why a bucket on the CPU is refused."""
    from tests.fake_cuda import fake_cuda

    found: set[str] = set()

    def hook(state: PowerSGDState, bucket: Bucket) -> torch.futures.Future[Tensor]:
        kept = (state.error_dict, state.p_memory_dict, state.q_memory_dict)
        found.update(str(tensors[bucket.index()].device) for tensors in kept)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    with fake_cuda():
        reduction = PowerSgd()
        names = ("error_dict", "p_memory_dict", "q_memory_dict")
        state = reduction.state_dict() | {name: {"0": torch.ones(3)} for name in names}
        reduction.load_state_dict(state)
        reduction.hook = hook
        reduction.start(bucket_of([torch.ones(3, device="cuda:0")])).wait()
        with pytest.raises(ValueError, match="PowerSGD") as error:
            reduction.start(bucket_of([torch.ones(3)]))
    return found, str(error.value)


def test_what_powersgd_keeps_is_where_its_bucket_is_and_the_cpu_is_refused_beside_gpus() -> None:
    [(devices, reason)] = on_ranks(1, devices_of_state)
    assert devices == {"cuda:0"}
    assert "on the CPU where there are GPUs" in reason
