"""Block averaging: its defining equations and the limiting cases of its settings."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from placer.parallel.grad_sync import GradSync
from placer.parallel.methods.block_averager import (
    AVERAGING,
    BMUF,
    BMUF_CLASSIC,
    BlockAverager,
    BlockUpdate,
)
from tests.helpers.ranks import on_ranks
from tests.helpers.replicas import backward, batches, mlp, mse, own_batch, parameters

LR = 0.2
PERIOD = 3
RANKS = 2


def trained(
    steps: int, update: BlockUpdate, period: int = PERIOD, momentum: float = 0.0, warmup: int = 0
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the parameters before and after finish()."""
    worker = mlp()
    inner = torch.optim.SGD(worker.parameters(), lr=LR, momentum=momentum)
    averager = BlockAverager(worker, update, period=period, inner=inner, warmup_steps=warmup)
    for number in range(steps):
        local_step(worker, inner, number)
        averager.after_step()
    before = parameters(worker)
    averager.finish()
    return before, parameters(worker)


def local_step(worker: nn.Module, inner: torch.optim.Optimizer, number: int) -> None:
    inner.zero_grad()
    backward(mse(worker, own_batch(number, 16, 8)))
    inner.step()


def block_by_hand(
    blocks: int, momentum: float, rate: float, nesterov: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Compute W_g and W after some blocks by the equations, all workers in one process."""
    start = mlp()
    common = parameters(start)  # W
    looked_ahead = dict(common)  # W_g
    delta = {name: torch.zeros_like(tensor) for name, tensor in common.items()}
    for block in range(blocks):
        mean = {name: torch.zeros_like(tensor) for name, tensor in common.items()}
        for rank in range(RANKS):
            worker = copy.deepcopy(start)
            worker.load_state_dict(looked_ahead)
            sgd = torch.optim.SGD(worker.parameters(), lr=LR)
            for number in range(block * PERIOD, (block + 1) * PERIOD):
                sgd.zero_grad()
                backward(mse(worker, batches(number, RANKS, 16, 8)[rank]))
                sgd.step()
            for name, tensor in parameters(worker).items():
                mean[name] += tensor / RANKS
        for name in common:
            gain = mean[name] - looked_ahead[name]
            delta[name] = momentum * delta[name] + rate * gain
            common[name] = common[name] + delta[name]
            ahead = momentum * delta[name] if nesterov else 0.0
            looked_ahead[name] = common[name] + ahead
    return looked_ahead, common


@pytest.mark.parametrize(
    ("momentum", "rate", "nesterov"), [(0.5, 1.0, True), (0.5, 1.0, False), (0.9, 0.7, True)]
)
def test_blocks_follow_the_equations(momentum: float, rate: float, nesterov: bool) -> None:
    update = BlockUpdate(momentum=momentum, rate=rate, nesterov=nesterov)
    start_of_next, result = block_by_hand(4, momentum, rate, nesterov)
    for before, after in on_ranks(RANKS, trained, 4 * PERIOD, update):
        torch.testing.assert_close(before, start_of_next, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(after, result, rtol=1e-5, atol=1e-6)
    moved = max(float((result[name] - start_of_next[name]).abs().max()) for name in result)
    assert (moved > 1e-3) == nesterov  # the result is not the start of the next block


def averaged_plainly(steps: int) -> dict[str, Tensor]:
    worker = mlp()
    sgd = torch.optim.SGD(worker.parameters(), lr=LR)
    for number in range(steps):
        local_step(worker, sgd, number)
        if (number + 1) % PERIOD == 0:
            for parameter in worker.parameters():
                dist.all_reduce(parameter.detach().div_(dist.get_world_size()))
    return parameters(worker)


def test_momentum_0_and_rate_1_is_model_averaging_bit_for_bit() -> None:
    expected = on_ranks(RANKS, averaged_plainly, 4 * PERIOD)
    found = on_ranks(RANKS, trained, 4 * PERIOD, BlockUpdate(momentum=0.0, rate=1.0))
    for (before, after), plain in zip(found, expected, strict=True):
        torch.testing.assert_close(before, plain, rtol=0, atol=0)
        torch.testing.assert_close(after, plain, rtol=0, atol=0)


def outer_sgd(blocks: int, nesterov: bool) -> dict[str, Tensor]:
    """Return blocks whose negated progress is the gradient of torch's SGD."""
    worker = mlp()
    common = copy.deepcopy(worker)
    outer = torch.optim.SGD(common.parameters(), lr=1.0, momentum=1 - 1 / RANKS, nesterov=nesterov)
    for block in range(blocks):
        inner = torch.optim.SGD(worker.parameters(), lr=LR)
        for number in range(block * PERIOD, (block + 1) * PERIOD):
            local_step(worker, inner, number)
        for base, own in zip(common.parameters(), worker.parameters(), strict=True):
            mean = own.detach().clone()
            dist.all_reduce(mean)
            base.grad = base.detach() - mean / RANKS
        outer.step()
        worker.load_state_dict(common.state_dict())
    return parameters(worker)


@pytest.mark.parametrize("update", [BMUF, BMUF_CLASSIC], ids=["nesterov", "classic"])
def test_bmuf_is_sgd_with_momentum_on_the_updates_of_blocks(update: BlockUpdate) -> None:
    expected = on_ranks(RANKS, outer_sgd, 5, update.nesterov)
    for (before, _), plain in zip(
        on_ranks(RANKS, trained, 5 * PERIOD, update), expected, strict=True
    ):
        torch.testing.assert_close(before, plain, rtol=1e-5, atol=1e-6)


def synchronous(steps: int) -> dict[str, Tensor]:
    replica = mlp()
    sync = GradSync(replica)
    sgd = torch.optim.SGD(replica.parameters(), lr=LR)
    for number in range(steps):
        sync.zero_grad()
        backward(mse(replica, own_batch(number, 16, 8)))
        sync.finish()
        sgd.step()
    return parameters(replica)


@pytest.mark.parametrize("warmup", [0, 8], ids=["blocks of one step", "warming up"])
def test_averaging_after_every_step_of_sgd_is_synchronous_sgd(warmup: int) -> None:
    expected = on_ranks(RANKS, synchronous, 8)
    period = PERIOD if warmup else 1
    found = on_ranks(RANKS, trained, 8, AVERAGING, period, 0.0, warmup)
    for (before, after), plain in zip(found, expected, strict=True):
        torch.testing.assert_close(before, plain, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(after, plain, rtol=1e-5, atol=1e-6)


def stopped_and_resumed(at: int, steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the results of an uninterrupted run and of one that is resumed in new objects."""
    whole = trained(steps, BMUF, momentum=0.5)[1]
    saved: dict[str, Any] = {}
    for first, last in ((0, at), (at, steps)):
        worker = mlp()
        inner = torch.optim.SGD(worker.parameters(), lr=LR, momentum=0.5)
        averager = BlockAverager(worker, BMUF, period=PERIOD, inner=inner)
        if saved:
            worker.load_state_dict(saved["worker"])
            inner.load_state_dict(saved["inner"])
            averager.load_state_dict(saved["averager"])
        for number in range(first, last):
            local_step(worker, inner, number)
            averager.after_step()
        saved = copy.deepcopy(
            {
                "worker": worker.state_dict(),
                "inner": inner.state_dict(),
                "averager": averager.state_dict(),
            }
        )
    averager.finish()
    return whole, parameters(worker)


@pytest.mark.parametrize("at", [2 * PERIOD, 2 * PERIOD + 1], ids=["at a border", "within a block"])
def test_a_run_that_stops_and_goes_on_ends_bit_for_bit_the_same(at: int) -> None:
    for whole, resumed in on_ranks(RANKS, stopped_and_resumed, at, 5 * PERIOD):
        torch.testing.assert_close(resumed, whole, rtol=0, atol=0)


def after_a_block(update: BlockUpdate) -> tuple[list[float], Tensor]:
    """Return the largest local momentum and the running mean of a batch norm."""
    norm = nn.BatchNorm1d(8)
    worker = nn.Sequential(nn.Linear(16, 8), norm)
    inner = torch.optim.SGD(worker.parameters(), lr=LR, momentum=0.9)
    averager = BlockAverager(worker, update, period=1, inner=inner)
    local_step(worker, inner, 0)
    averager.after_step()
    buffers = [state["momentum_buffer"] for state in inner.state.values()]
    return [float(b.abs().max()) for b in buffers], norm.get_buffer("running_mean").clone()


@pytest.mark.parametrize("update", [BMUF, AVERAGING], ids=["bmuf", "averaging"])
def test_blocks_end_with_common_statistics_and_bmuf_forgets_local_momentum(
    update: BlockUpdate,
) -> None:
    (momentum, own), (_, other) = on_ranks(RANKS, after_a_block, update)
    assert torch.equal(own, other)
    assert own.abs().max() > 0
    assert (max(momentum) == 0.0) == update.reset_inner


def test_a_block_that_is_open_is_ended_by_finish() -> None:
    (own, result), (other, same) = on_ranks(RANKS, trained, PERIOD + 1, AVERAGING)
    assert not torch.equal(own["0.weight"], other["0.weight"])
    torch.testing.assert_close(result, same, rtol=0, atol=0)


def stacked(steps: int) -> dict[str, Tensor]:
    """Run both workers in one process; the mean function is a parameter."""
    worker = nn.Module()
    worker.register_parameter("all", nn.Parameter(torch.zeros(RANKS, 3)))
    pair = worker.get_parameter("all")

    def mean(flat: Tensor) -> Tensor:
        rows = flat.view(RANKS, -1)
        return rows.mean(0).expand_as(rows).flatten()

    averager = BlockAverager(worker, BMUF, period=1, workers=RANKS, mean=mean)
    for number in range(steps):
        with torch.no_grad():
            pair.add_(torch.tensor([[1.0], [3.0]]) * (number + 1))
        averager.after_step()
    averager.finish()
    return parameters(worker)


def test_workers_may_be_stacked_in_one_process() -> None:
    # G = 2, 4 and eta = 1/2: Δ = 2, then 1 + 4 = 5; W = 7
    torch.testing.assert_close(stacked(2)["all"], torch.full((RANKS, 3), 7.0))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (partial(BlockUpdate, momentum=1.0), "momentum 1.0 is not within 0 .. 1"),
        (partial(BlockUpdate, rate=0.0), "rate 0.0 is not above 0"),
        (partial(BlockAverager, nn.Linear(1, 1), period=0), "a block has 0 steps"),
    ],
)
def test_settings_that_mean_nothing_are_refused(make: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make()
