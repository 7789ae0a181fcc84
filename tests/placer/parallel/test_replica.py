"""Devices and batches of a replica."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from envs.placement import Placement
from envs.replication import Replication
from placer.parallel.data import FromFunction, MadeUp, Shards, numbers_of
from placer.parallel.methods.registry import WARMUP_STEPS, SyncConfig
from placer.parallel.plan import launch_command, run_plan
from placer.parallel.processes import on_next_devices, on_own_group
from tests.helpers.tiny_models import conv_net, tied_weights

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
    assert on_next_devices(on(first), 0, 2) == (on(first), False)
    own, is_shared = on_next_devices(on(first), 1, 2)
    assert (own.device_names, is_shared) == ((second,), False)
    assert own.ops == (first,)


@TWO_CORES
def test_replicas_share_devices_where_there_are_no_others() -> None:
    whole = on(*(f"core:{core}" for core in CORES))
    assert on_next_devices(whole, 1, 2) == (whole, True)
    assert on_next_devices(whole, 0, 1) == (whole, False)
    assert on_next_devices(on("cuda:90"), 0, 1) == (on("cuda:90"), False)  # reported on placement


def test_the_cpu_is_every_replicas() -> None:
    assert on_next_devices(on("cpu"), 1, 2) == (on("cpu"), False)


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
    for accumulate in (1, 2):
        taken = [
            number
            for step in range(4)
            for rank in range(3)
            for number in numbers_of(step, rank, 3, accumulate)
        ]
        assert taken == list(range(12 * accumulate))


def test_shards_of_a_batch_are_the_whole_of_it() -> None:
    step = conv_net()
    whole = MadeUp(step, seed=1)
    shards = Shards(whole, 2)
    parts = [shards(number)[0] for number in (6, 7)]
    for shard, tensor in zip(zip(*parts, strict=True), whole(3)[0], strict=True):
        assert torch.equal(torch.cat(shard), tensor)
    with pytest.raises(ValueError, match="3 equal parts"):
        Shards(whole, 3)(0)


def planned(*groups: tuple[str, ...]) -> Placement:
    return replace(on(*groups[0]), replicas=Replication(groups=groups))


def test_a_rank_takes_the_devices_of_its_group_slot_by_slot() -> None:
    strided = planned(("cuda:0", "cuda:2"), ("cuda:3", "cuda:1"))
    assert on_own_group(strided, 0, 0, 2) == strided
    own = on_own_group(strided, 1, 0, 2)
    assert own.device_names == ("cuda:3", "cuda:1")
    assert own.devices == strided.devices


def test_devices_of_hosts_are_those_that_torch_has_there() -> None:
    hosts = planned(("n0:g0", "n0:g1"), ("n0:g2", "n0:g3"), ("n1:g0", "n1:g1"), ("n1:g2", "n1:g3"))
    assert on_own_group(hosts, 1, 0, 2).device_names == ("cuda:2", "cuda:3")
    assert on_own_group(hosts, 2, 2, 2).device_names == ("cuda:0", "cuda:1")
    with pytest.raises(ValueError, match="replicas 2, 3 are on host n1"):
        on_own_group(hosts, 2, 0, 4)
    across = planned(("n0:g0", "n1:g0"), ("n0:g1", "n1:g1"))
    with pytest.raises(ValueError, match="devices of 2 hosts"):
        on_own_group(across, 0, 0, 1)


PAIR = (("cuda:0",), ("cuda:1",))


@pytest.mark.parametrize(
    ("how", "method", "remark"),
    [
        (Replication(), "allreduce", ""),
        (Replication(payload="fp16"), "fp16", ""),
        (Replication(payload="bf16", reduction="ring"), "bf16", "ring"),
        (Replication(payload="1-bit"), "onebit", ""),
        (Replication(reduction="hierarchical"), "hierarchical", ""),
        (Replication(reduction="hierarchical", payload="fp16"), "fp16", "in one level"),
        (Replication(reduction="tree"), "allreduce", "tree"),
        (Replication(average_every=4), "ma", ""),
    ],
)
def test_what_was_planned_is_what_runs(how: Replication, method: str, remark: str) -> None:
    plan = replace(how, groups=PAIR, accumulate=3)
    found = run_plan(replace(on("cuda:0"), replicas=plan), ranks=2)
    assert (found.sync.method, found.sync.accumulate, found.parts) == (method, 3, 1)
    assert found.sync.period == (4 if how.average_every > 1 else None)
    assert remark in " ".join(found.remarks)
    assert bool(remark) == bool(found.remarks)


def test_what_is_to_be_started_comes_to_send_bits_where_they_were_planned() -> None:
    groups = (("cuda:0",), ("cuda:1",))
    plain = Replication(groups=groups, payload="bf16")
    bits = Replication(groups=groups, payload="1-bit")
    assert launch_command(plain, "m.py:build").endswith(" --steps 100")
    assert launch_command(bits, "m.py:build").endswith(f" --steps {WARMUP_STEPS + 100}")


@pytest.mark.parametrize(
    ("payload", "every", "algorithms", "method", "remark"),
    [
        ("fp32", 1, ("hierarchical",), "hierarchical", ""),
        ("fp32", 1, ("hierarchical", "tree"), "hierarchical", "tree"),
        ("fp32", 1, ("ring",), "allreduce", ""),
        ("fp32", 1, ("ring", "hierarchical"), "allreduce", "ring and hierarchical"),
        ("bf16", 1, ("hierarchical",), "bf16", "in one level"),
        ("fp32", 4, ("hierarchical",), "ma", "in one level"),
    ],
)
def test_what_was_chosen_for_the_plan_is_what_runs_or_it_is_told(
    payload: str, every: int, algorithms: tuple[str, ...], method: str, remark: str
) -> None:
    plan = Replication(
        groups=PAIR, payload=payload, average_every=every, algorithms=algorithms, levels=(1, 2)
    )
    placement = replace(on("cuda:0"), replicas=plan)
    found = run_plan(placement, ranks=2)
    assert found.sync.method == method
    assert remark in " ".join(found.remarks)
    assert bool(remark) == bool(found.remarks)
    assert found.sync.levels == ((1, 2) if method == "hierarchical" else None)
    own = {"method": "hierarchical", "levels": (2,)}
    assert run_plan(placement, ranks=2, overrides=own).sync.levels == (2,)


def test_what_the_user_says_wins_over_the_plan() -> None:
    plan = Replication(groups=PAIR, average_every=4, bucket_bytes=1000)
    placement = replace(on("cuda:0"), replicas=plan)

    def sync(**overrides: object) -> SyncConfig:
        return run_plan(placement, ranks=2, overrides=overrides).sync

    assert sync(method="bmuf", accumulate=2) == SyncConfig(
        method="bmuf", period=4, accumulate=2, bucket_bytes=1000
    )
    assert sync(period=2) == SyncConfig(method="ma", period=2, bucket_bytes=1000)
    assert sync(method="fp16") == SyncConfig(method="fp16", bucket_bytes=1000)


def test_a_plan_for_other_ranks_or_another_division_is_refused() -> None:
    plan = Replication(groups=PAIR, batch="global", accumulate=2)
    placement = replace(on("cuda:0"), replicas=plan)
    assert run_plan(placement, ranks=2).parts == 4
    with pytest.raises(ValueError, match=r"this run has 3.*--nproc-per-node=2"):
        run_plan(placement, ranks=3, target="m.py:build")
    with pytest.raises(ValueError, match="2 passes, not for 3"):
        run_plan(placement, ranks=2, overrides={"accumulate": 3})
