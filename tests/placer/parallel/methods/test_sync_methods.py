"""The contract of all methods that keep replicas in sync, and what is special to some of them."""

from __future__ import annotations

import copy
import time
from functools import cache, partial
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from placer.parallel import BlockAverager, BlockUpdate, Sync, SyncConfig, make_sync
from placer.parallel.methods.block_averager import AVERAGING, BMUF
from placer.parallel.methods.reductions import PowerSgd
from placer.parallel.methods.registry import METHODS, method_named
from placer.parallel.processes import new_group
from tests.helpers.ranks import RankError, each, on_ranks, refusal
from tests.helpers.replicas import (
    backward,
    batches,
    mean_gradients,
    mlp,
    model,
    mse,
    own_batch,
    parameters,
)

RANKS = 2
STEPS = 12  # two of warm-up, three blocks of three, and one step of an open block
STOP = 7  # within a block
QUICK: dict[str, Any] = {"period": 3, "warmup_steps": 2}
NAMES = [method.name for method in METHODS]
AVERAGES = {  # (momentum, rate, Nesterov) by name; momentum is 1 - 1 / ranks for BMUF
    "ma": (0.0, 1.0, False),
    "bmuf": (0.5, 1.0, True),
    "bmuf-classic": (0.5, 1.0, False),
    "slowmo": (0.5, 1.0, False),
    "diloco": (0.9, 0.7, True),
}
TOLERANCE = {"fp16": 1e-3, "bf16": 1e-2}
sgd = partial(torch.optim.SGD, lr=0.1)
momentum_sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.5)


def config_of(name: str, **options: Any) -> SyncConfig:
    """Return short blocks and warm-up for methods with these options."""
    accepted = method_named(name).options
    options = QUICK | options
    return SyncConfig(method=name, **{key: options[key] for key in options if key in accepted})


def loss_on(module: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the loss against targets that can be learned: the first inputs."""
    inputs, targets = batch
    return mse(module, [inputs, inputs[:, : targets.shape[1]]])


def trained(module: nn.Module, sync: Sync, first: int, last: int) -> None:
    for number in range(first, last):
        sync.zero_grad()
        backward(loss_on(module, own_batch(number)))
        sync.step()


class Outcome(NamedTuple):
    before: float
    after: float
    result: dict[str, Tensor]
    resumed: dict[str, Tensor]
    plain: dict[str, Tensor]


@torch.no_grad()
def loss_of(module: nn.Module) -> float:
    every = [batch for number in range(STEPS) for batch in batches(number, RANKS)]
    return torch.stack([loss_on(module, batch) for batch in every]).mean().item()


def run(name: str) -> Outcome:
    """Train replicas that begin differently, at once and with a stop in between."""
    torch.manual_seed(dist.get_rank())
    replica = model(seed=dist.get_rank())  # the parameters of rank 0 must win
    sync = make_sync(replica, momentum_sgd, config_of(name))
    before = loss_of(replica)
    trained(replica, sync, 0, STEPS)
    sync.finish()
    result, after = parameters(replica), loss_of(replica)
    if name == "asgd":
        return Outcome(before, after, result, {}, {})
    states: list[Any] = []
    for first, last in ((0, STOP), (STOP, STEPS)):
        replica = model(seed=dist.get_rank())
        sync = make_sync(replica, momentum_sgd, config_of(name))
        if states:
            replica.load_state_dict(states[0])
            sync.load_state_dict(states[1])
        trained(replica, sync, first, last)
        states = copy.deepcopy([replica.state_dict(), sync.state_dict()])
    sync.finish()
    return Outcome(before, after, result, parameters(replica), plain(name))


@cache
def outcomes() -> list[dict[str, Outcome]]:
    """Return by rank the outcome of every method; one launch of ranks serves all tests."""
    found: list[dict[str, Outcome]] = on_ranks(RANKS, each, {name: (run, name) for name in NAMES})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_method_trains_and_leaves_all_ranks_with_one_model(name: str) -> None:
    first, *others = (of_rank[name] for of_rank in outcomes())
    start = parameters(model(seed=0))
    assert first.after < 0.9 * first.before
    for outcome in others:
        assert outcome.before == first.before  # all start from the parameters of rank 0
        torch.testing.assert_close(outcome.result, first.result, rtol=0, atol=0)
    moved = {key for key in start if not torch.equal(first.result[key], start[key])}
    assert {"first.weight", "last.weight"} <= moved
    assert not moved & {"frozen.weight", "frozen.bias"}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "asgd"])
def test_a_method_that_stops_and_resumes_ends_bit_for_bit_the_same(name: str) -> None:
    for of_rank in outcomes():
        torch.testing.assert_close(of_rank[name].resumed, of_rank[name].result, rtol=0, atol=0)


def plain(name: str) -> dict[str, Tensor]:
    """Train with plain SGD; coded gradients stay in their warm-up, in which they are plain."""
    replica = model(seed=0)
    options = {} if name in AVERAGES else {"warmup_steps": STEPS}
    sync = make_sync(replica, sgd, config_of(name, **options))
    trained(replica, sync, 0, STEPS)
    sync.finish()
    return parameters(replica)


def synchronous_twin() -> dict[str, Tensor]:
    """Train in one process on the mean gradient of all ranks."""
    alone = model(seed=0)
    optimizer = sgd(alone.parameters())
    for number in range(STEPS):
        optimizer.zero_grad()
        mean_gradients(loss_on(alone, batch) for batch in batches(number, RANKS))
        optimizer.step()
    return parameters(alone)


def averaged_twin(momentum: float, rate: float, nesterov: bool) -> dict[str, Tensor]:
    """Compute the common model by the equations of BlockUpdate, all workers in one process."""
    workers = [model(seed=0) for _ in range(RANKS)]
    optimizers = [sgd(worker.parameters()) for worker in workers]
    common = parameters(workers[0])  # W
    start = dict(common)  # W_g
    delta = {name: torch.zeros_like(tensor) for name, tensor in common.items()}
    for number in range(STEPS):
        for worker, optimizer, batch in zip(
            workers, optimizers, batches(number, RANKS), strict=True
        ):
            optimizer.zero_grad()
            backward(loss_on(worker, batch))
            optimizer.step()
        is_warming_up = number < QUICK["warmup_steps"]
        done = number + 1 - QUICK["warmup_steps"]
        if not is_warming_up and done % QUICK["period"] and number + 1 < STEPS:
            continue
        ends = [parameters(worker) for worker in workers]
        for name in common:
            mean = torch.stack([end[name] for end in ends]).mean(0)
            if is_warming_up:
                common[name] = start[name] = mean
                continue
            delta[name] = momentum * delta[name] + rate * (mean - start[name])
            common[name] = common[name] + delta[name]
            start[name] = common[name] + (momentum * delta[name] if nesterov else 0.0)
        for worker in workers:
            worker.load_state_dict(start)
    return common


@pytest.mark.slow_repeats
@pytest.mark.parametrize("name", [name for name in NAMES if name != "asgd"])
def test_a_method_equals_its_plain_twin(name: str) -> None:
    expected = averaged_twin(*AVERAGES[name]) if name in AVERAGES else synchronous_twin()
    tolerance = TOLERANCE.get(name, 1e-6)
    for of_rank in outcomes():
        torch.testing.assert_close(of_rank[name].plain, expected, rtol=0, atol=tolerance)


def test_with_one_worker_the_server_does_plain_sgd() -> None:
    [found] = on_ranks(1, each, {name: (plain, name) for name in ("asgd", "allreduce")})
    torch.testing.assert_close(found["asgd"], found["allreduce"], rtol=0, atol=0)


def reported(slow_rank: int) -> dict[str, Any]:
    replica = mlp()
    sync = make_sync(replica, sgd, SyncConfig(method="asgd"))
    for number in range(STEPS):
        if dist.get_rank() == slow_rank:
            time.sleep(0.01)
        sync.zero_grad()
        backward(mse(replica, own_batch(number, 16, 8)))
        sync.step()
    sync.finish()
    return sync.report()


def test_gradients_for_the_server_are_counted_and_may_be_stale() -> None:
    report, *others = on_ranks(3, reported, 2)
    assert report["updates"] == 3 * STEPS
    assert 0 < report["staleness_mean"] <= report["staleness_max"] < 3 * STEPS
    assert others == [{}, {}]


def server_of_nothing() -> None:
    make_sync(mlp().requires_grad_(False), sgd, SyncConfig(method="asgd"))


def server_of_some_ranks() -> None:
    half = new_group([dist.get_rank()])
    make_sync(mlp(), sgd, SyncConfig(method="asgd"), group_of=lambda device: half)


def server_with_other_parameters() -> None:
    module = mlp()
    make_sync(module, lambda _: sgd(module.parameters()), SyncConfig(method="asgd"))


def averages_of_nothing() -> None:
    make_sync(mlp().requires_grad_(False), sgd, SyncConfig(method="ma"))


def server_that_loses_a_worker() -> None:
    sync = make_sync(mlp(), sgd, SyncConfig(method="asgd"))
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        return
    sync.finish()


def test_the_server_refuses_what_it_cannot_serve() -> None:
    works = {
        "nothing": server_of_nothing,
        "some": server_of_some_ranks,
        "averages": averages_of_nothing,
    }
    for messages in on_ranks(2, each, {name: (refusal, work) for name, work in works.items()}):
        assert "no parameter needs a gradient" in messages["nothing"]
        assert "asgd has one server for all 2 ranks" in messages["some"]
        assert "nothing to average" in messages["averages"]
    [message] = on_ranks(1, refusal, server_with_other_parameters)
    assert "make the optimizer of those that it is given" in message


def test_a_server_that_loses_a_worker_says_so() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 0: .*the parameter server stopped"):
        on_ranks(2, server_that_loses_a_worker)


def after_a_block(update: BlockUpdate) -> tuple[float, Tensor]:
    """Return the largest local momentum and the running mean of a batch norm."""
    norm = nn.BatchNorm1d(8)
    worker = nn.Sequential(nn.Linear(16, 8), norm)
    inner = momentum_sgd(worker.parameters())
    averager = BlockAverager(worker, update, period=1, inner=inner)
    backward(mse(worker, own_batch(0, 16, 8)))
    inner.step()
    averager.after_step()
    momentum = max(float(state["momentum_buffer"].abs().max()) for state in inner.state.values())
    return momentum, norm.get_buffer("running_mean").clone()


def test_blocks_end_with_common_statistics_and_bmuf_forgets_local_momentum() -> None:
    updates = {"bmuf": BMUF, "averaging": AVERAGING}
    cases = {name: (after_a_block, update) for name, update in updates.items()}
    first, second = on_ranks(RANKS, each, cases)
    for name, update in updates.items():
        (momentum, mean), (_, other) = first[name], second[name]
        assert torch.equal(mean, other)
        assert mean.abs().max() > 0
        assert (momentum == 0.0) == update.reset_inner


class Replaced(nn.Module):
    """A model that replaces its buffer in every step."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 8)
        self.register_buffer("mean", torch.zeros(8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        self.mean = 0.5 * self.mean + found.detach().mean(0) * (1 + 1j)
        return found


def finished_twice() -> tuple[Tensor, bool]:
    """Return a replaced buffer, and whether ending twice within a block changed parameters."""
    replica = Replaced()
    sync = make_sync(replica, momentum_sgd, SyncConfig(method="bmuf", period=3))
    for number in range(4):
        sync.zero_grad()
        backward(mse(replica, own_batch(number, 16, 8)))
        sync.step()
    sync.finish()
    before = parameters(replica)
    sync.finish()
    after = parameters(replica)
    return replica.mean.clone(), any(not torch.equal(before[key], after[key]) for key in before)


def test_replaced_buffers_are_averaged_too_and_a_block_ends_once() -> None:
    (first, changed), (second, _) = on_ranks(RANKS, finished_twice)
    assert torch.equal(first, second)
    assert first.imag.abs().max() > 0
    assert not changed


def test_workers_may_be_stacked_in_one_process() -> None:
    worker = nn.Module()
    pair = nn.Parameter(torch.zeros(RANKS, 3))
    worker.register_parameter("pair", pair)

    def mean(flat: Tensor) -> Tensor:
        rows = flat.view(RANKS, -1)
        return rows.mean(0).expand_as(rows).flatten()

    averager = BlockAverager(worker, BMUF, period=1, workers=RANKS, mean=mean)
    for number in range(2):
        with torch.no_grad():
            pair.add_(torch.tensor([[1.0], [3.0]]) * (number + 1))
        averager.after_step()
    averager.finish()
    # G = 2, 4 and momentum 1/2: Δ = 2, then 1 + 4 = 5; W = 7
    torch.testing.assert_close(pair.detach(), torch.full((RANKS, 3), 7.0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(method_named, "bmfu"), "no sync 'bmfu'"),
        (partial(PowerSgd, warmup_steps=1), "after 2 steps"),
        (partial(SyncConfig, method="fp16", period=4), "sync 'fp16' takes no period"),
        (partial(SyncConfig, period=0), "period is 0, below 1"),
        (partial(SyncConfig, method="bmuf", block_momentum=1.0), "block_momentum is 1.0"),
        (partial(SyncConfig, method="bmuf", block_rate=0.0), "block_rate is 0.0"),
        (partial(SyncConfig, method="hierarchical", levels=(0, 2)), "levels are"),
        (
            partial(SyncConfig, method="ma", period=cast("int", 2.5)),
            "period is 2.5, not a whole number",
        ),
        (partial(SyncConfig, accumulate=0), "accumulate is 0, below 1"),
        (partial(BlockUpdate, momentum=1.0), "momentum 1.0 is not within 0 .. 1"),
        (partial(BlockUpdate, rate=0.0), "rate 0.0 is not above 0"),
        (partial(BlockAverager, nn.Linear(1, 1), period=0), "a block has 0 steps"),
    ],
)
def test_wrong_options_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
