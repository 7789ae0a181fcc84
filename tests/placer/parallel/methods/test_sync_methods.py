"""All methods that synchronize replicas, by name."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from placer.parallel import SyncConfig, make_sync
from placer.parallel.groups import new_group
from placer.parallel.methods.registry import METHODS, method_named
from tests.helpers.ranks import RankError, on_ranks
from tests.helpers.replicas import backward, batches, mlp, model, mse, own_batch, parameters

STEPS = 12
QUICK: dict[str, Any] = {"period": 3, "warmup_steps": 2}
sgd = partial(torch.optim.SGD, lr=0.1)


def config_of(name: str) -> SyncConfig:
    """Return short blocks and warm-up for methods with these options."""
    taken = method_named(name).options
    return SyncConfig(method=name, **{key: QUICK[key] for key in QUICK if key in taken})


def train(config: SyncConfig, slow_rank: int = -1) -> tuple[Any, Any, Any]:
    """Return losses on one batch before and after, the parameters and the report."""
    torch.manual_seed(dist.get_rank())
    replica = mlp()
    for parameter in replica.parameters():
        torch.nn.init.normal_(parameter, std=0.2 + 0.1 * dist.get_rank())  # rank 0's must win
    sync = make_sync(replica, sgd, config)
    judge = batches(10_000, 1, 16, 8)[0]
    before = float(mse(replica, judge))
    for number in range(STEPS):
        if dist.get_rank() == slow_rank:
            time.sleep(0.01)
        sync.zero_grad()
        backward(mse(replica, own_batch(number, 16, 8)))
        sync.step()
    sync.finish()
    return (before, float(mse(replica, judge))), parameters(replica), sync.report()


@pytest.mark.parametrize("name", [method.name for method in METHODS])
def test_a_method_trains_and_leaves_all_ranks_with_one_model(name: str) -> None:
    results = on_ranks(2, train, config_of(name))
    for (before, after), found, _ in results:
        assert before == results[0][0][0]  # all start from the parameters of rank 0
        assert after < 0.9 * before
        torch.testing.assert_close(found, results[0][1], rtol=0, atol=0)


def parameters_that_moved(name: str) -> set[str]:
    """Return which parameters change, with a frozen layer; weight decay changes all others."""
    replica = model()
    before = parameters(replica)
    decaying = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
    sync = make_sync(replica, decaying, config_of(name))
    for number in range(4):
        sync.zero_grad()
        backward(mse(replica, own_batch(number)))
        sync.step()
    sync.finish()
    return {key for key, own in parameters(replica).items() if not torch.equal(own, before[key])}


@pytest.mark.parametrize("name", ["allreduce", "bmuf", "asgd"])
def test_frozen_parameters_stay_bit_for_bit_what_they_are(name: str) -> None:
    for moved in on_ranks(3, parameters_that_moved, name):
        assert {"first.weight", "last.weight"} <= moved
        assert not moved & {"frozen.weight", "frozen.bias"}


def all_frozen() -> None:
    make_sync(mlp().requires_grad_(False), sgd, SyncConfig(method="asgd"))


def test_a_server_of_nothing_is_refused() -> None:
    with pytest.raises(RankError, match="no parameter needs a gradient"):
        on_ranks(1, all_frozen)


def test_gradients_for_the_server_are_counted_and_may_be_stale() -> None:
    results = on_ranks(3, train, SyncConfig(method="asgd"), 2)
    report = results[0][2]
    assert report["updates"] == 3 * STEPS
    assert 0 < report["staleness_mean"] <= report["staleness_max"] < 3 * STEPS
    assert results[1][2] == {}


def alone(name: str) -> dict[str, Tensor]:
    return train(SyncConfig(method=name))[1]  # type: ignore[no-any-return]


def test_with_one_worker_the_server_does_plain_sgd() -> None:
    [served], [plain] = on_ranks(1, alone, "asgd"), on_ranks(1, alone, "allreduce")
    torch.testing.assert_close(served, plain, rtol=0, atol=0)


def server_that_loses_a_worker() -> None:
    replica = mlp()
    sync = make_sync(replica, sgd, SyncConfig(method="asgd"))
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        return
    sync.finish()


def test_the_server_stops_when_a_worker_is_gone() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 0: .*the parameter server stopped"):
        on_ranks(2, server_that_loses_a_worker)


def refused_server() -> str:
    half = new_group([dist.get_rank()])
    try:
        make_sync(mlp(), sgd, SyncConfig(method="asgd"), group_of=lambda device: half)
    except ValueError as error:
        return str(error)
    return ""


def test_a_server_for_some_of_the_ranks_is_refused() -> None:
    for told in on_ranks(2, refused_server):
        assert told.startswith("asgd has one server for all 2 ranks")


def test_unknown_methods_and_options_that_would_be_ignored_are_refused() -> None:
    with pytest.raises(ValueError, match="no sync 'bmfu'"):
        method_named("bmfu")
    with pytest.raises(ValueError, match="sync 'fp16' takes no period"):
        SyncConfig(method="fp16", period=4)
    SyncConfig(method="bmuf", period=4, block_momentum=0.5)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"period": 0}, "period is 0, below 1"),
        ({"block_momentum": 1.0}, "block_momentum is 1.0"),
        ({"block_rate": 0.0}, "block_rate is 0.0"),
        ({"levels": (0, 2)}, "levels are"),
        ({"accumulate": 0}, "accumulate is 0, below 1"),
    ],
)
def test_options_out_of_range_are_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        SyncConfig(**given)
