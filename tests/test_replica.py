"""Which devices a replica takes, and which batches."""

from __future__ import annotations

import os

import pytest
import torch
from tiny_models import conv_net, tied_weights

from envs.placement import Placement
from placer.parallel.data import FromFunction, MadeUp, number_of
from placer.parallel.replica import on_own_devices

CORES = sorted(os.sched_getaffinity(0))
TWO_CORES = pytest.mark.skipif(
    len(CORES) < 2 or CORES[1] != CORES[0] + 1, reason="needs two cores, one after the other"
)


def on(*names: str) -> Placement:
    return Placement(
        graph="",
        cluster="",
        ops=names,
        device_names=names,
        devices=tuple(range(len(names))),
        priority=(0.0,) * len(names),
    )


@TWO_CORES
def test_each_replica_of_a_host_takes_the_devices_that_follow() -> None:
    first, second = (f"core:{core}" for core in CORES[:2])
    assert on_own_devices(on(first), 0, 2) == (on(first), False)
    own, is_shared = on_own_devices(on(first), 1, 2)
    assert (own.device_names, is_shared) == ((second,), False)
    assert own.ops == (first,)


@TWO_CORES
def test_replicas_share_devices_where_there_are_no_others() -> None:
    whole = on(*(f"core:{core}" for core in CORES))
    assert on_own_devices(whole, 1, 2) == (whole, True)
    assert on_own_devices(whole, 0, 1) == (whole, False)
    assert on_own_devices(on("cuda:90"), 0, 1) == (on("cuda:90"), False)  # told when it is placed


def test_the_cpu_is_every_replicas() -> None:
    assert on_own_devices(on("cpu"), 1, 2) == (on("cpu"), False)


def test_made_up_batches_have_the_form_of_the_example_and_come_again() -> None:
    step = tied_weights()
    batches = MadeUp(step, seed=3)
    (tokens, targets), keywords = batches(5)
    assert tokens.shape == step.inputs[0].shape
    assert tokens.dtype == step.inputs[0].dtype
    assert sorted(tokens.flatten().tolist()) == sorted(step.inputs[0].flatten().tolist())
    assert not keywords
    for again, once in zip(batches(5)[0], (tokens, targets), strict=True):
        assert torch.equal(again, once)
    assert not torch.equal(batches(6)[0][0], tokens)
    images = MadeUp(conv_net())(0)[0][0]
    assert abs(images.std() - conv_net().inputs[0].std()) < 0.1


def test_batches_of_a_function_are_taken_apart_like_the_targets() -> None:
    step = conv_net()
    images, labels = step.inputs
    batches = FromFunction(lambda number: {"input": images + number, "y": labels}, step)
    found, keywords = batches(2)
    assert torch.equal(found[0], labels)
    assert torch.equal(keywords["input"], images + 2)


def test_every_batch_is_taken_once() -> None:
    taken = [number_of(step, rank, 3) for step in range(4) for rank in range(3)]
    assert taken == list(range(12))
