"""Times of calls on a GPU that is asleep until all are launched, on a fake one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from envs.costs import calls, torch_speeds
from envs.costs.cached_costs import launch_kind, with_op_costs
from envs.costs.factors import LAUNCH
from envs.costs.torch_speeds import CallTime, burst_time, call_time, launched, seconds_per_call
from envs.hardware.cluster import Device
from graphs.extract import extract
from graphs.extract.placeable import call_graph
from tests.fake_cuda import fake_cuda
from tests.fake_cuda.machine import Machine
from tests.helpers.tiny_models import conv_net
from tests.helpers.trained_alike import with_optimizer

GPU = torch.device("cuda", 0)
SEEDS = range(4)


@pytest.fixture(params=SEEDS)
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    with fake_cuda(2, seed=request.param) as made:
        yield made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each look at the clock of the host come a second after the last."""
    ticks = itertools.count()
    monkeypatch.setattr(
        torch_speeds, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    )


def noted(machine: Machine, log: list[str]) -> Callable[[], object]:
    """Return work on a GPU that notes whether the GPU slept when it was launched."""
    tensor = torch.ones(4, device=GPU)

    def work() -> object:
        log.append("asleep" if machine.default[0].is_asleep else "awake")
        return tensor * 2

    return work


def test_all_calls_of_a_burst_are_launched_while_the_gpu_sleeps(machine: Machine) -> None:
    log: list[str] = []
    bursts: list[list[str]] = []

    def prepared() -> Callable[[], object]:
        bursts.append(log.copy())
        log.clear()
        assert not machine.default[0].is_asleep
        return work

    work = noted(machine, log)
    found = burst_time(prepared, GPU, 3, repeats=4)
    bursts.append(log)
    # one awake, to know how long launches take, then the bursts that count
    assert bursts[1:] == [["awake"] * 3, *[["asleep"] * 3] * 4]
    assert min(found) >= torch_speeds.LEAST_CALL_S
    assert not machine.default[0].pending


def test_the_gpu_sleeps_on_the_stream_and_device_of_the_calls(machine: Machine) -> None:
    other = torch.device("cuda", 1)
    tensor = torch.ones(4, device=other)
    asleep = []

    def work() -> None:
        asleep.append([stream.is_asleep for stream in machine.default])
        tensor.mul_(2)

    _, is_ahead = launched(work, other, 2, 1e-3)
    assert is_ahead
    assert asleep == [[False, True]] * 2
    assert not launched(work, other, 2)[1]


def test_a_call_that_waits_for_the_gpu_is_timed_as_it_runs(machine: Machine) -> None:
    log: list[str] = []
    work = noted(machine, log)

    def waiting() -> float:
        work()
        return torch.ones(1, device=GPU).item()

    found = call_time(waiting, GPU, repeats=2)
    assert all(math.isfinite(seconds) for seconds in found)
    assert log[-2:] == ["awake"] * 2


@pytest.mark.usefixtures("clock")
def test_the_host_is_timed_from_the_first_launch_to_the_last(machine: Machine) -> None:
    found, _ = launched(noted(machine, []), GPU, 4, 1e-3)
    assert found.launch_s == 0.25


def test_without_sleep_calls_are_timed_as_they_run(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.cuda, "_sleep")
    log: list[str] = []
    found = call_time(noted(machine, log), GPU, repeats=2)
    assert set(log) == {"awake"}
    assert min(found) > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_on_a_gpu_are_told_from_their_launches() -> None:
    small, large = torch.ones(64, device=GPU), torch.ones(64 << 20, device=GPU)
    of_small = call_time(lambda: torch.neg(small), GPU)
    assert of_small.device_s < 0.8 * of_small.launch_s
    of_large = call_time(lambda: torch.neg(large), GPU)
    assert of_large.device_s > 10 * of_large.launch_s
    assert of_large.launch_s == pytest.approx(of_small.launch_s, rel=1.0)
    whole_s = seconds_per_call(lambda: torch.neg(large), [GPU])
    assert of_large.device_s == pytest.approx(whole_s, rel=0.2)


def test_launches_of_other_devices_are_unknown() -> None:
    found = call_time(lambda: torch.ones(3) * 2, torch.device("cpu"), repeats=1)
    assert found.device_s > 0
    assert math.isnan(found.launch_s)


@pytest.mark.slow
def test_costs_of_calls_and_of_their_launches_are_kept_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each burst takes the GPU 3 s, and the thread 2 s."""
    monkeypatch.setenv("PLACER_CACHE", str(tmp_path))
    times = CallTime(3.0, 2.0)
    monkeypatch.setattr(calls, "burst_time", lambda prepared, *_, **__: prepared()() and times)
    monkeypatch.setattr(calls, "call_time", lambda *_, **__: times)
    monkeypatch.setattr(calls, "calls_per_burst", lambda *_: 1)
    gpu = Device(name="cuda:0", kind="cuda:fake", memory_bytes=1 << 30)
    extraction = extract(with_optimizer(conv_net(), "sgd"))
    graph = call_graph(extraction)
    with fake_cuda():
        profiled = calls.profile_calls(extraction, graph, [gpu])
        assert set(profiled) == {gpu.kind, launch_kind(gpu.kind)}
        cost_s, launch_s = profiled[gpu.kind], profiled[launch_kind(gpu.kind)]
        np.testing.assert_allclose(launch_s, cost_s * 2 / 3)
        costs = calls.call_costs(extraction, graph)
        for _ in range(3):
            assert costs.known({gpu.kind: gpu}) is None
            measured = costs.costs({gpu.kind: gpu})
        known = costs.known({gpu.kind: gpu})
        assert known is not None
        costs.keep_factors({gpu.kind: gpu}, {gpu.kind: {LAUNCH: 1.25}})
        fitted = costs.known({gpu.kind: gpu})
        assert fitted is not None
    for found, factor in ((measured, 1.0), (known, 1.0), (fitted, 1.25)):
        assert found[gpu.kind].cost_s.tolist() == cost_s.tolist()
        nodes = with_op_costs(graph.graph, found).nodes.values()
        assert [node["launch_s"] for node in nodes] == [{gpu.kind: factor * s} for s in launch_s]
