"""The part of a plan that a rank runs, and its devices."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from envs.placement import Placement
from envs.replication import Replication
from placer.parallel.methods.registry import WARMUP_STEPS, SyncConfig
from placer.parallel.plan import launch_command, run_plan
from placer.parallel.rank_devices import on_next_devices, on_own_group

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
def test_replicas_share_the_cpu_and_devices_where_there_are_no_others() -> None:
    whole = on(*(f"core:{core}" for core in CORES))
    assert on_next_devices(whole, 1, 2) == (whole, True)
    assert on_next_devices(whole, 0, 1) == (whole, False)
    assert on_next_devices(on("cpu"), 1, 2) == (on("cpu"), False)
    assert on_next_devices(on("cuda:90"), 0, 1) == (on("cuda:90"), False)  # reported on placement


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
    ("plan", "method", "remark"),
    [
        (Replication(), "allreduce", ""),
        (Replication(payload="fp16"), "fp16", ""),
        (Replication(payload="bf16", reduction="ring"), "bf16", "ring"),
        (Replication(payload="1-bit"), "onebit", ""),
        (Replication(reduction="hierarchical"), "hierarchical", ""),
        (Replication(reduction="hierarchical", payload="fp16"), "fp16", "in one level"),
        (Replication(reduction="tree"), "allreduce", "tree"),
        (Replication(average_every=4), "ma", ""),
        (Replication(algorithms=("ring",)), "allreduce", ""),
        (Replication(algorithms=("hierarchical",)), "hierarchical", ""),
        (Replication(algorithms=("hierarchical", "tree")), "hierarchical", "tree"),
        (Replication(algorithms=("ring", "hierarchical")), "allreduce", "ring and hierarchical"),
        (Replication(algorithms=("hierarchical",), payload="bf16"), "bf16", "in one level"),
        (Replication(algorithms=("hierarchical",), average_every=4), "ma", "in one level"),
    ],
)
def test_a_plan_runs_as_planned_or_a_remark_says_how(
    plan: Replication, method: str, remark: str
) -> None:
    plan = replace(plan, groups=PAIR, accumulate=3, levels=(1, 2))
    run = run_plan(replace(on("cuda:0"), replicas=plan), ranks=2)
    assert (run.sync.method, run.sync.accumulate, run.parts) == (method, 3, 1)
    assert run.sync.period == (4 if plan.average_every > 1 else None)
    assert run.sync.levels == ((1, 2) if method == "hierarchical" else None)
    assert remark in " ".join(run.remarks)
    assert bool(remark) == bool(run.remarks)


def test_a_command_has_as_many_steps_more_as_its_method_warms_up() -> None:
    plain, bits = (Replication(groups=PAIR, payload=name) for name in ("bf16", "1-bit"))
    assert launch_command(plain, "m.py:build", "p.json") == (
        "torchrun --nproc-per-node=2 -m placer.run m.py:build --placement p.json --steps 100"
    )
    assert launch_command(bits, "m.py:build").endswith(f" --steps {WARMUP_STEPS + 100}")


def test_options_of_the_user_override_the_plan() -> None:
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
