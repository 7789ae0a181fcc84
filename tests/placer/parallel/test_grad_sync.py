"""Gradients reduced across replicas equal those of one process and of DDP."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from functools import cache
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from placer.parallel.buckets import filled_buckets
from placer.parallel.grad_sync import GradSync, broadcast_state
from placer.parallel.processes import groups_of_slots
from tests.fake_cuda import fake_cuda
from tests.helpers.ranks import each, on_ranks, refusal
from tests.helpers.replicas import (
    backward,
    batches,
    gradients,
    mean_gradients,
    mlp,
    model,
    mse,
    own_batch,
    parameters,
)

LR = 0.1


def train(
    replica: nn.Module,
    batch_of: Callable[[int], list[Tensor]] = own_batch,
    *,
    steps: int = 3,
    momentum: float = 0.0,
    **options: Any,
) -> dict[str, Tensor]:
    """Return the parameters of a replica after some steps."""
    sync = GradSync(replica, **options)
    sgd = torch.optim.SGD(replica.parameters(), lr=LR, momentum=momentum)
    for number in range(steps):
        sync.zero_grad()
        for part in range(sync.accumulate):
            batch = batch_of(number * sync.accumulate + part)
            backward(mse(replica, batch) / sync.accumulate)
        sync.finish()
        sgd.step()
    return parameters(replica)


def train_alone(module: nn.Module, steps: int = 3) -> dict[str, Tensor]:
    """Return the parameters after training in one process on the batches of two replicas."""
    sgd = torch.optim.SGD(module.parameters(), lr=LR)
    for number in range(steps):
        sgd.zero_grad()
        mean_gradients(mse(module, batch) for batch in batches(number, 2))
        sgd.step()
    return parameters(module)


def wide_batch(number: int) -> list[Tensor]:
    return own_batch(number, 16, 8)


def train_with_ddp(steps: int, accumulate: int) -> tuple[dict[str, Tensor], Any]:
    replica = mlp()
    ddp = DistributedDataParallel(replica)
    sgd = torch.optim.SGD(replica.parameters(), lr=LR, momentum=0.9)
    for number in range(steps):
        sgd.zero_grad()
        for part in range(accumulate):
            ddp.require_backward_grad_sync = part == accumulate - 1
            backward(mse(ddp, wide_batch(number * accumulate + part)) / accumulate)
        sgd.step()
    return parameters(replica), gradients(replica)


def beside_ddp(steps: int, accumulate: int) -> Any:
    replica = mlp()
    # small buckets, so that several are in flight at once
    sync: dict[str, Any] = {"accumulate": accumulate, "bucket_bytes": 1024}
    ours = train(replica, wide_batch, steps=steps, momentum=0.9, **sync)
    return (ours, gradients(replica)), train_with_ddp(steps, accumulate)


@cache
def on_two_ranks() -> list[dict[str, Any]]:
    """Return by rank what several tests need of two ranks; one launch serves them all."""
    cases: dict[str, Any] = {f"ddp {count}": (beside_ddp, 10, count) for count in (1, 3)}
    cases |= {zero: (one_branched_step, zero) for zero in ("to none", "to zero")}
    found: list[dict[str, Any]] = on_ranks(2, each, cases | {"buffers": (buffers_after_a_step,)})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 3])
def test_two_replicas_train_as_under_ddp_bit_for_bit(accumulate: int) -> None:
    for of_rank in on_two_ranks():
        ours, ddp = of_rank[f"ddp {accumulate}"]
        torch.testing.assert_close(ours, ddp, rtol=0, atol=0)


def branched_losses(number: int, replicas: int, module: nn.Module) -> list[Tensor]:
    """Return the losses of all replicas; only one replica uses a certain branch."""
    return [
        F.mse_loss(module(x, use_seldom=rank == 1), y)
        for rank, (x, y) in enumerate(batches(number, replicas))
    ]


def one_branched_step(zero: str) -> dict[str, Tensor | None]:
    replica = model(seed=dist.get_rank())  # replicas start from the parameters of rank 0
    sync = GradSync(replica, bucket_bytes=600)
    sgd = torch.optim.SGD(replica.parameters(), lr=0.0)
    for number in (7, 8):  # no gradient of the first step may remain
        if zero == "own":
            sync.zero_grad()
        else:
            sgd.zero_grad(set_to_none=zero == "to none")
        x, y = own_batch(number)
        backward(F.mse_loss(replica(x, use_seldom=dist.get_rank() == 1), y))
        sync.finish()
        sgd.step()
    return gradients(replica)


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "ranks"), [("own", 4), ("to none", 2), ("to zero", 2)])
def test_gradients_equal_those_of_one_process(zero: str, ranks: int) -> None:
    alone = model(seed=0)
    mean_gradients(branched_losses(8, ranks, alone))
    expected = gradients(alone)
    found = (
        on_two_ranks() if ranks == 2 else on_ranks(ranks, each, {zero: (one_branched_step, zero)})
    )
    for result in (of_rank[zero] for of_rank in found):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-7)
        assert result["frozen.weight"] is None


class TwoDevices(nn.Module):
    """First half on one device, second on the other, and the output on the first again."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.here = nn.Linear(6, 16)
        self.there = nn.Linear(16, 4)
        self.device = device
        self.there.to(device)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.here(x))
        out: Tensor = self.there(hidden.to(self.device)).cpu()
        return out


def train_on_two_device_types(groups: bool) -> dict[str, Tensor]:
    with fake_cuda() as machine:
        [device] = machine.devices
        by_type = {kind: dist.new_group() for kind in ("cpu", "cuda")} if groups else {}
        return train(TwoDevices(device), group_of=lambda device: by_type.get(device.type))


@cache
def on_two_device_types() -> list[dict[str, Any]]:
    """Return by rank what tests of replicas with a second device need; one launch serves them."""
    cases: dict[str, Any] = {}
    for several in (False, True):
        cases[f"groups {several}"] = train_on_two_device_types, several
        cases[f"slots {several}"] = starts_where_half_of_a_replica_is_done, several
    found: list[dict[str, Any]] = on_ranks(2, each, cases)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("groups", [False, True])
def test_a_replica_on_two_types_of_devices_trains_as_one_process_does(groups: bool) -> None:
    expected = train_alone(TwoDevices(torch.device("cpu")))
    for of_rank in on_two_device_types():
        result = of_rank[f"groups {groups}"]
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


def starts_where_half_of_a_replica_is_done(slots: bool) -> dict[str, bool]:
    """Return for each device type whether its bucket has started once all CPU gradients exist."""
    with fake_cuda() as machine:
        [device] = machine.devices
        replica = TwoDevices(device)
        groups = groups_of_slots([torch.device("cpu"), device]) if slots else lambda device: None
        sync = GradSync(replica, group_of=groups)
        backward(replica.here(own_batch(0)[0]).sum())
        started = {b.flat.device.type: b.pending is not None for b in sync.buckets}
        sync.finish()
        return started


@pytest.mark.parametrize("slots", [False, True])
def test_with_a_group_for_each_device_none_waits_for_another(slots: bool) -> None:
    expected = {"cuda": False, "cpu": slots}  # in one group buckets start in one order
    assert [of_rank[f"slots {slots}"] for of_rank in on_two_device_types()] == [expected] * 2


def buffers_after_a_step() -> tuple[Tensor, Tensor]:
    norm = nn.BatchNorm1d(4)
    mean = norm.get_buffer("running_mean")
    mean.fill_(dist.get_rank() + 1.0)
    replica = nn.Sequential(nn.Linear(6, 4), norm)
    sync = GradSync(replica)
    before = mean.clone()
    backward(mse(replica, own_batch(0)))
    sync.finish()
    return before, mean.clone()


def test_buffers_begin_as_those_of_rank_0_and_are_then_each_replicas_own() -> None:
    (first, own), (second, other) = (of_rank["buffers"] for of_rank in on_two_ranks())
    assert torch.equal(first, torch.ones(4))
    assert torch.equal(second, first)
    assert not torch.equal(own, other)


@pytest.mark.slow
@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=12),
    kinds=st.lists(st.sampled_from([torch.float32, torch.float64]), min_size=12, max_size=12),
    frozen=st.sets(st.integers(0, 11)),
    largest_bytes=st.integers(1, 400),
)
def test_buckets_hold_every_parameter_once_in_reverse_order_and_few_bytes(
    sizes: list[int], kinds: list[torch.dtype], frozen: set[int], largest_bytes: int
) -> None:
    parameters = {
        str(i): nn.Parameter(torch.zeros(size, dtype=kinds[i]), requires_grad=i not in frozen)
        for i, size in enumerate(sizes)
    }
    buckets = filled_buckets(parameters, largest_bytes, accumulate=1)
    names = [[int(name) for name in bucket.names] for bucket in buckets]
    assert sorted(chain.from_iterable(names)) == [i for i in range(len(sizes)) if i not in frozen]
    for members, bucket in zip(names, buckets, strict=True):
        assert members == sorted(members, reverse=True)
        assert {kinds[i] for i in members} == {bucket.flat.dtype}
        assert len(members) == 1 or bucket.flat.nbytes <= largest_bytes


class Arrived:
    """A reduction that is done."""

    def wait(self) -> None:
        """Return at once."""


def test_a_finished_reduction_is_held_until_the_next_is_finished() -> None:
    # Dropped by gloo's thread instead, it aborted ranks that ended at that moment.
    [bucket] = filled_buckets({"weight": nn.Parameter(torch.zeros(3))}, 1 << 20, accumulate=1)
    reduction = Arrived()
    bucket.pending, seen = reduction, weakref.ref(reduction)
    del reduction
    bucket.begin()
    assert seen() is not None
    bucket.begin()
    assert seen() is None


LAYOUTS: dict[str, Tensor] = {
    "contiguous": torch.empty(4, 3, 2, 2),
    "channels last": torch.empty(4, 3, 2, 2).to(memory_format=torch.channels_last),
    "transposed": torch.empty(3, 5).t(),
    "single channel": torch.empty(4, 1, 2, 2).to(memory_format=torch.channels_last),
    "part of another": torch.empty(4, 6)[:, :3],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_gradient_has_the_strides_of_its_parameter_where_those_leave_no_gaps(name: str) -> None:
    without, parameter = nn.Parameter(torch.zeros(7)), nn.Parameter(LAYOUTS[name])
    [bucket] = filled_buckets({"with": parameter, "without": without}, 1 << 20, accumulate=1)
    bucket.flat.fill_(7.0)
    gradient = torch.arange(1.0, 1 + parameter.numel()).view(parameter.shape)
    parameter.grad, without.grad = gradient.clone(), None
    bucket.adopt_all()
    for one in (parameter, without):
        assert one.grad is not None
        assert one.grad.untyped_storage().data_ptr() == bucket.flat.data_ptr()
    assert torch.equal(parameter.grad, gradient)
    assert bucket.flat[:7].tolist() == [0.0] * 7
    assert set(bucket.flat[7:].tolist()) == set(gradient.flatten().tolist())
    expected = parameter if name != "part of another" else gradient
    assert parameter.grad.stride() == expected.stride()


def backward_twice_without_finish() -> None:
    replica = mlp()
    GradSync(replica)
    for _ in range(2):
        backward(mse(replica, own_batch(0, 16, 8)))


def of_different_shapes() -> None:
    GradSync(mlp(width=32 if dist.get_rank() != 1 else 33))


def of_different_strides() -> None:
    layer = nn.Conv2d(3, 4, 2)
    layout = "channels last" if dist.get_rank() == 1 else "contiguous"
    layer.weight = nn.Parameter(LAYOUTS[layout])
    GradSync(layer)


def nothing_to_train() -> None:
    GradSync(mlp().requires_grad_(False))


def test_replicas_that_cannot_be_reduced_are_refused() -> None:
    works = {
        "shapes": of_different_shapes,
        "strides": of_different_strides,
        "nothing": nothing_to_train,
        "twice": backward_twice_without_finish,  # the last: what it started goes on
    }
    for messages in on_ranks(3, each, {name: (refusal, work) for name, work in works.items()}):
        for name in ("shapes", "strides"):
            assert re.search(r"ranks differ \(ranks 0, 2: \w+; rank 1: ", messages[name])
        assert "no parameter needs a gradient" in messages["nothing"]
        assert re.search(r"gradient of 4\.\w+ arrived once more", messages["twice"])


def state_of_rank_0() -> tuple[dict[str, Tensor], list[bool]]:
    """Return this rank's state after a broadcast, and whether what was sent is contiguous."""
    rank = dist.get_rank()
    values = torch.arange(15.0).reshape(3, 5) + 100 * rank
    module = nn.Module()
    module.register_buffer("scale", values.t().contiguous().t() if rank else values)
    module.register_buffer("short", torch.tensor(7 + rank, dtype=torch.int16))  # not in gloo
    module.weight = nn.Parameter(values.t())
    sent: list[bool] = []
    broadcast = dist.broadcast

    def watched(tensor: Tensor, *options: Any, **named: Any) -> Any:
        sent.append(tensor.is_contiguous())
        return broadcast(tensor, *options, **named)

    dist.broadcast = watched
    broadcast_state(module)
    dist.broadcast = broadcast
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}, sent


def test_state_is_broadcast_by_value_whatever_its_layout() -> None:
    (expected, sent), (found, _) = on_ranks(2, state_of_rank_0)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert torch.equal(expected["scale"], torch.arange(15.0).reshape(3, 5))
    assert expected["short"] == 7
    assert sent == [True] * 3
