"""Costs and memory of calls on torch devices, with a fake second one."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from envs.costs import cache, cached_costs, torch_speeds
from envs.costs import calls as of_calls
from envs.costs import modules as of_modules
from envs.costs import torch_speeds as stopwatch
from envs.costs.cached_costs import conditions_of, first_of_kinds, launch_kind
from envs.costs.calibrate import torch_calibration
from envs.costs.calls import call_costs, profile_calls
from envs.costs.ops import node_signatures
from envs.executors.torch import watchdog
from envs.hardware import torch_devices
from envs.hardware.cluster import Device
from envs.hardware.discover import discover
from envs.hardware.host import Host
from envs.hardware.torch_devices import driver_version, matmul_precision
from envs.problem import Problem
from envs.torch_runtime import TorchRuntime
from envs.torch_runtime.runtime import FRAGMENTED_SHARE
from graphs.costs import with_costs
from graphs.extract import Workload, extract
from graphs.extract.placeable import call_graph
from graphs.graph import GraphArrays
from graphs.optimizer import Optimizer
from tests.helpers import tiny_models
from tests.helpers.clusters import linked, pair

pytestmark = [pytest.mark.usefixtures("second_device"), pytest.mark.slow_repeats]
KIND = "cuda:fake"
QUICK = {
    name: tiny_models.STEPS[name]
    for name in ("conv_net", "tied_weights", "norm_twice", "own_loss", "structured_output")
}


# --- costs


@pytest.mark.parametrize("make", QUICK.values(), ids=QUICK)
def test_every_node_has_a_cost_on_both_devices(make: Callable[[], Workload]) -> None:
    step = make()
    before = tiny_models.state_of(step)
    extraction = extract(step)
    calls = call_graph(extraction)
    costs_s = profile_calls(extraction, calls, pair().devices)
    assert costs_s.keys() == {KIND, launch_kind(KIND), f"cpu*{torch.get_num_threads()}"}
    for cost_s in costs_s.values():
        assert cost_s.shape == (len(calls.graph),)
        assert np.isfinite(cost_s).all()
        forward = [d["phase"] == "forward" for _, d in calls.graph.nodes(data=True)]
        assert (cost_s[forward] > 0).any()
        if step.training:
            assert (cost_s[np.logical_not(forward)] > 0).any()
    tiny_models.assert_same(tiny_models.state_of(step), before)
    assert all(p.grad is None for p in step.model.parameters())


def test_costs_follow_the_work_and_leave_the_launch_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_flop_a_second(work: Callable[[], object], _: object, count: int) -> float:
        with FlopCounterMode(display=False) as counter:
            for _ in range(count):
                work()
        return float(max(counter.get_total_flops(), 1))

    monkeypatch.setattr(stopwatch, "burst", one_flop_a_second)
    monkeypatch.setattr(of_calls, "burst", one_flop_a_second)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2048), nn.Linear(2048, 512))
    extraction = extract(
        Workload.of(model, (torch.randn(64, 16), torch.randn(64, 512)), nn.MSELoss())
    )
    calls = call_graph(extraction)
    cluster = discover("cpu")
    (cost_s,) = profile_calls(extraction, calls, cluster.devices).values()
    by_name = dict(zip(calls.graph, cost_s.tolist(), strict=True))
    assert by_name["0:linear"] == pytest.approx(2 * 64 * 16 * 16)
    assert by_name["3:linear"] == pytest.approx(2 * 64 * 2048 * 512)
    assert by_name["3:backward/linear"] == pytest.approx(2 * by_name["3:linear"])  # two products
    slow = replace(cluster, devices=(replace(cluster.devices[0], launch_s=100.0),))
    (less,) = profile_calls(extraction, calls, slow.devices).values()
    assert less == pytest.approx(np.maximum(cost_s - slow.devices[0].launch_s, 0.0))


def test_a_call_without_room_is_not_allowed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    extraction = extract(tiny_models.conv_net())
    calls = call_graph(extraction)
    linear = torch.ops.aten.linear.default
    real = linear._op

    def full(*args: object, **kwargs: object) -> object:
        if args and isinstance(args[0], torch.Tensor) and args[0].device.type == "cuda":
            raise torch.OutOfMemoryError("Tried to allocate 1 GiB")
        return real(*args, **kwargs)

    monkeypatch.setattr(linear, "_op", full)
    costs_s = profile_calls(extraction, calls, pair().devices)
    names = list(calls.graph)
    lacking = [names[i] for i in np.flatnonzero(np.isnan(costs_s[KIND]))]
    assert {name.rpartition(":")[2] for name in lacking} >= {"linear", "backward/linear"}
    graph = with_costs(calls.graph, costs_s, dict.fromkeys(costs_s, "measured"))
    problem = Problem.of(GraphArrays.from_graph(graph), linked())
    assert not problem.allowed[names.index(lacking[0]), 0]
    assert problem.allowed[:, 1].all()


@pytest.fixture
def most_held(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Run out of memory above ``most.room`` products of ``linear`` on cuda:0 at a time."""
    most = SimpleNamespace(room=1 << 30, seen=0)
    products: dict[int, weakref.ref[torch.Tensor]] = {}
    linear = torch.ops.aten.linear.default
    real = linear._op

    def counted(*args: object, **kwargs: object) -> object:
        made = real(*args, **kwargs)
        if made.device.type == "cuda":
            products[id(made)] = weakref.ref(made)
            alive = sum(product() is not None for product in products.values())
            most.seen = max(most.seen, alive)
            if alive > most.room:
                raise torch.OutOfMemoryError("Tried to allocate 1 GiB")
        return made

    monkeypatch.setattr(linear, "_op", counted)
    monkeypatch.setattr(of_calls, "calls_per_burst", lambda _: 8)
    return most


def _linear_costs(devices: tuple[Device, ...]) -> NDArray[np.float64]:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 64, bias=False))
    extraction = extract(
        Workload.of(model, (torch.randn(64, 64), torch.randn(64, 64)), nn.MSELoss())
    )
    return profile_calls(extraction, call_graph(extraction), devices)[KIND]


def test_a_call_whose_repetitions_run_out_of_memory_is_timed_alone(
    most_held: SimpleNamespace,
) -> None:
    most_held.room = 3
    assert np.isfinite(_linear_costs(pair().devices)).all()
    assert most_held.seen == 4
    most_held.room = 0
    assert np.isnan(_linear_costs(pair().devices)).any()


def test_repetitions_hold_at_most_half_of_the_free_memory(
    most_held: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = pair().devices
    _linear_costs(devices)
    assert most_held.seen >= 8
    most_held.seen = 0
    # the product and its gradient, those of the weight and at times of the input: 4 of 16 KiB
    monkeypatch.setattr(torch_devices, "free_bytes", lambda _: 2 * 12 * (64 * 64 * 4))
    assert np.isfinite(_linear_costs(devices)).all()
    assert most_held.seen in (3, 4)


def test_calls_are_timed_within_what_is_free_and_none_is_banned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices = pair().devices
    monkeypatch.setattr(of_calls, "calls_per_burst", lambda _: 24)
    monkeypatch.setattr(of_calls, "REPEATS", 1)
    _linear_costs(devices)
    plenty = torch.cuda.max_memory_allocated(0)
    product_bytes = 64 * 64 * 4
    limit = 20 * product_bytes
    assert plenty > 2 * limit
    with torch_devices.limited({torch.device("cuda", 0): limit}):
        torch.cuda.reset_peak_memory_stats(0)
        assert np.isfinite(_linear_costs(devices)).all()
        assert 8 * product_bytes < torch.cuda.max_memory_allocated(0) < limit


def test_costs_are_measured_in_all_free_memory_not_under_the_limit_of_the_placement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(limits: object) -> object:
        raise AssertionError(limits)

    monkeypatch.setattr(torch_devices, "limited", refused)
    extraction = extract(tiny_models.conv_net())
    profile_calls(extraction, call_graph(extraction), pair().devices)
    of_modules.torch_module_costs(extract(tiny_models.conv_net(), "modules"), pair())


@pytest.mark.parametrize(
    ("module", "hanging", "told"),
    [
        (of_calls, "call_time", "timing :linear on cpu"),
        (of_calls, "_timed_update", "timing an update by sgd on cpu"),
        (of_modules, "profile_modules_on", "timing the modules of a step on cpu"),
        (torch_speeds, "launch_s", "timing launches, products and memory on cpu"),
        (torch_speeds, "copy_speed", "timing copies from cuda:0 to cpu on cuda:0, cpu"),
    ],
)
def test_timing_that_hangs_ends_the_process_with_a_name(
    module: ModuleType,
    hanging: str,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    inputs = (torch.randn(5, 4), torch.randn(5, 3))
    step = Workload.of(nn.Linear(4, 3), inputs, nn.MSELoss(), optimizer=Optimizer.of("sgd"))
    extraction = extract(step if hanging == "_timed_update" else replace(step, optimizer=None))
    statuses: list[int] = []
    said: list[str] = []

    def hang(*_: object, **__: object) -> object:
        until = time.monotonic() + 60.0
        while f"{told} was not over after 0.05 s" not in "".join(said):
            assert time.monotonic() < until, "nothing ended it"
            time.sleep(0.01)
            said.append(capsys.readouterr().err)
        raise KeyboardInterrupt

    monkeypatch.setattr(watchdog, "PROFILED_S", 0.05)
    monkeypatch.setattr(os, "_exit", statuses.append)
    monkeypatch.setattr(module, hanging, hang)
    work: Callable[[], object]
    if module is torch_speeds:
        cluster = pair() if hanging == "copy_speed" else discover("cpu")
        work = partial(torch_speeds.measured_speeds, cluster)
    elif module is of_modules:
        work = partial(of_modules.torch_module_costs, extraction, discover("cpu"))
    else:
        work = partial(profile_calls, extraction, call_graph(extraction), discover("cpu").devices)
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        work()
    for watch in set(threading.enumerate()) - before:  # each ends the process after what it says
        watch.join(timeout=60)
        assert not watch.is_alive()
    assert set(statuses) == {watchdog.STUCK}


def test_costs_of_calls_are_known_after_three_profiles() -> None:
    extraction = extract(tiny_models.conv_net())
    calls = call_graph(extraction)
    devices = first_of_kinds(linked().devices)
    costs = call_costs(extraction, calls)
    for _ in range(3):
        assert costs.known(devices) is None
        measured = costs.costs(devices)
        assert all(s.startswith("measured") for own in measured.values() for s in own.sources)
    known = costs.known(devices)
    assert known is not None
    assert known.keys() == costs.costs(devices).keys() == devices.keys()
    for own in known.values():
        assert len(own.cost_s) == len(calls.graph)
        assert np.isfinite(own.cost_s).all()
        assert all(source.startswith("cached, measured") for source in own.sources)
    again = costs.costs(devices, fresh=True)
    assert all(s.startswith("measured") for own in again.values() for s in own.sources)


def test_calls_that_do_not_fit_are_known_too_while_no_more_memory_is_free(
    most_held: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = first_of_kinds(linked().devices)
    monkeypatch.setattr(cache, "SESSIONS_IF_NOISY", 1)
    monkeypatch.setattr(
        torch_devices, "free_bytes", lambda d: None if d.type == "cpu" else most_held.free
    )
    most_held.room, most_held.free = 0, 1 << 20
    step = Workload.of(nn.Linear(64, 64), (torch.randn(64, 64),) * 2, nn.MSELoss())
    extraction = extract(step)
    costs = call_costs(extraction, call_graph(extraction))
    measured = costs.costs(devices)[KIND].cost_s
    assert np.isnan(measured).any()
    known = costs.known(devices)
    assert known is not None
    assert np.array_equal(np.isnan(known[KIND].cost_s), np.isnan(measured))
    most_held.free = 2 << 20
    assert costs.known(devices) is None


def _signatures(width: int) -> tuple[str, ...]:
    model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4))
    step = Workload.of(model, (torch.randn(2, 4), torch.randn(2, 4)), nn.functional.mse_loss)
    extraction = extract(step)
    return node_signatures(extraction, call_graph(extraction))


def test_other_shapes_are_other_calls() -> None:
    assert _signatures(5) == _signatures(5)
    assert not set(_signatures(5)[:2]) & set(_signatures(6)[:2])


@pytest.mark.parametrize(
    ("backend", "flag", "value"),
    [
        (torch.backends.cuda.matmul, "fp32_precision", "tf32"),
        (torch.backends.cudnn, "allow_tf32", False),
        (torch.backends.cudnn, "benchmark", True),
        (torch.backends.cudnn, "deterministic", True),
    ],
)
def test_calls_with_other_settings_of_kernels_are_others(
    backend: Any, flag: str, value: object
) -> None:
    plain, speeds = _signatures(5), torch_calibration(discover("cpu")).path
    before = getattr(backend, flag)
    setattr(backend, flag, value)
    try:
        assert not set(plain) & set(_signatures(5))
        assert torch_calibration(discover("cpu")).path != speeds
        assert matmul_precision()  # torch's own function raises where one backend differs
    finally:
        setattr(backend, flag, before)
    assert _signatures(5) == plain


def test_times_on_a_gpu_are_those_of_its_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_costs, "device_kind", lambda name: name)
    file = tmp_path / "version"
    monkeypatch.setattr(cached_costs, "driver_version", lambda: driver_version(file))
    gpu, cpu = (Device(name=name, kind=name, memory_bytes=1) for name in ("cuda:0", "cpu"))
    none = conditions_of(gpu)
    file.write_text("580.65.06\n")
    assert conditions_of(gpu).hardware == f"{none.hardware}, driver 580.65.06"
    assert conditions_of(cpu).hardware == none.hardware


# --- memory


def test_torch_devices_keep_room_for_gaps_between_tensors() -> None:
    runtime = TorchRuntime(extract(tiny_models.conv_net()), pair())
    planned = runtime.planned(pair())
    assert planned.devices[0].memory_bytes == int((1 << 30) * (1 - FRAGMENTED_SHARE))


# --- hosts


def test_the_host_of_torch_devices_overlaps_copies_if_the_runtime_does() -> None:
    extraction, cluster = extract(tiny_models.conv_net()), pair()
    assert [host.devices for host in cluster.hosts] == [("cuda:0", "cpu")]
    assert discover("cpu").hosts == discover("core:0,core:1").hosts == ()
    for overlap in (False, True):
        (host,) = TorchRuntime(extraction, cluster, overlap=overlap).planned(cluster).hosts
        assert host.overlap is overlap


@pytest.mark.parametrize("groups", [(), (("cuda:0",),), (("cuda:0", "cpu"),)])
def test_devices_of_one_process_have_one_host_whatever_their_file_says(
    groups: tuple[tuple[str, ...], ...],
) -> None:
    cluster = replace(linked(), hosts=tuple(Host(devices=names) for names in groups))
    runtime = TorchRuntime(extract(tiny_models.conv_net()), cluster)
    (host,) = runtime.planned(cluster).hosts
    assert host.devices == ("cuda:0", "cpu")
    assert host.autograd


def test_the_cpu_alone_has_no_host() -> None:
    cluster = discover("cpu")
    assert TorchRuntime(extract(tiny_models.conv_net()), cluster).planned(cluster).hosts == ()


def test_costs_on_a_host_are_whole_times_but_those_of_the_cpu() -> None:
    cluster = pair()
    launched = tuple(replace(device, launch_s=100.0) for device in cluster.devices)
    cluster = replace(cluster, devices=launched)
    runtime = TorchRuntime(extract(tiny_models.conv_net()), cluster)
    costs = runtime.costs(cluster).ops
    accelerator, cpu = (costs[device.kind].cost_s for device in cluster.devices)
    assert accelerator.max() > 0 == cpu.max()
    unnamed = runtime.costs(replace(cluster, hosts=())).ops  # this process runs it all the same
    assert unnamed[cluster.devices[0].kind].cost_s.max() > 0
