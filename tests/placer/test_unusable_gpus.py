"""GPUs that are counted but cannot be used, or fail, from the devices named to the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import placer
from envs.costs import calls, torch_speeds
from envs.costs.torch_speeds import CallTime
from envs.executors.device_workers import placed_step
from envs.hardware.cluster import Link
from envs.hardware.discover import discover, present
from envs.hardware.errors import DeviceWarning
from envs.hardware.host import Host
from envs.hardware.torch_devices import DeviceError
from envs.placement import Placement
from envs.torch_runtime import TorchExecutor
from graphs.extract import Workload, extract
from graphs.extract.placeable import call_graph
from graphs.graph import GraphArrays
from graphs.optimizer import Optimizer
from placer.cli.main import main
from placer.pipeline import candidate_runs
from placer.sources.target import load_step
from tests.fake_cuda import fake_cuda
from tests.fake_cuda.machine import Machine
from tests.fake_cuda.sharing import FakeSharing, lost_when_placed
from tests.helpers.second_devices import measure_briefly

TARGET = """
import torch

def build():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    return model, (torch.ones(2, 4), torch.ones(2, 4)), torch.nn.MSELoss()
"""
LOST = "uncorrectable ECC error encountered"
ALL = "cuda:0,cuda:1,cpu"


def tiny() -> Workload:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return Workload.of(model, (torch.ones(2, 4), torch.ones(2, 4)), nn.MSELoss())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let speeds be measured with little work, and anew."""
    monkeypatch.setenv("PLACER_CACHE", str(tmp_path / "cache"))
    measure_briefly(monkeypatch, large_bytes=1 << 12)
    monkeypatch.setattr(torch_speeds, "LARGEST_MATRIX", 1)


@pytest.fixture
def target(tmp_path: Path) -> str:
    path = tmp_path / "model.py"
    path.write_text(TARGET)
    return f"{path}:build"


@pytest.mark.slow_repeats
@pytest.mark.parametrize("extractor", ["export", "modules"])
def test_the_cpu_alone_is_used_where_cuda_counts_devices_without_being_usable(
    extractor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    # other tests have made an accelerator of their own
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    result = placer.optimize(
        tiny(), devices="cpu", budget="1e", extractor=extractor, progress=False
    )
    assert result.best.measurement is not None
    assert result.best.measurement.ok


def placed_on_gpu(target: str, file: Path) -> Path:
    """Write a placement on ``cuda:0``."""
    with fake_cuda(1):
        extraction = extract(load_step(target, training=True))
        graph = GraphArrays.from_graph(call_graph(extraction).graph)
        ops = len(graph)
        Placement.of(graph, present(["cuda:0"]), np.zeros(ops, int), np.zeros(ops)).save(file)
    return file


COMMANDS = {
    "optimize": "{target} --devices cuda:0,cpu --budget 1e --out {folder}/out.json",
    "evaluate": "{target} --placement {placement} --devices cuda:0,cpu",
    "machine": "--devices cuda:0,cpu",
    "run": "{target} --placement {placement} --steps 1",
}


@pytest.mark.slow_repeats
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("visible", ["", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"])
def test_a_gpu_that_is_named_but_hidden_is_the_fault_of_the_machine(
    command: str,
    visible: str,
    target: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    placement = placed_on_gpu(target, tmp_path / "placement.json")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    words = COMMANDS[command].format(target=target, placement=placement, folder=tmp_path)
    assert main([command, *words.split()]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("placer: ")
    assert "there is no device cuda:0: torch " in line
    assert line.endswith(f" sees no cuda devices with CUDA_VISIBLE_DEVICES={visible!r}")


@pytest.mark.slow_repeats
@pytest.mark.parametrize("command", ["optimize", "evaluate", "machine"])
def test_more_memory_than_is_free_is_the_fault_of_the_machine(
    command: str, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    placement = placed_on_gpu(target, tmp_path / "placement.json")
    words = COMMANDS[command].format(target=target, placement=placement, folder=tmp_path)
    with fake_cuda(1, memory_bytes=1 << 30):
        assert main([command, *words.split(), "--memory", "cuda:0=2GiB"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"placer: cuda:0 cannot have {2 << 30} bytes of memory: ")


def two_kinds(machine: Machine) -> None:
    machine.names[1] = "another fake"


@pytest.mark.slow
def test_gpus_of_two_kinds_have_costs_of_their_own() -> None:
    with fake_cuda(2) as machine:
        two_kinds(machine)
        result = placer.optimize(tiny(), devices=ALL, budget="1e", progress=False)
    assert set(result.cost_source) == {"cuda:fake", "cuda:another fake", "cpu*1"}


# --- lost while it works


def in_calibration(patch: pytest.MonkeyPatch, lose: Callable[[], None]) -> None:
    rate = torch_speeds.flop_per_s

    def losing(device: torch.device) -> float:
        if device.index == 1:
            lose()
        return rate(device)

    patch.setattr(torch_speeds, "flop_per_s", losing)


def in_copies(patch: pytest.MonkeyPatch, lose: Callable[[], None]) -> None:
    hop_s = torch_speeds.hop_s

    def losing(*ends: torch.device) -> float:
        lose()
        return hop_s(*ends)

    patch.setattr(torch_speeds, "hop_s", losing)


def in_profile(patch: pytest.MonkeyPatch, lose: Callable[[], None]) -> None:
    timed = torch_speeds.call_time

    def losing(work: Callable[[], object], device: torch.device, **named: Any) -> Any:
        if device.index == 1:
            lose()
        return timed(work, device, **named)

    patch.setattr(calls, "call_time", losing)


def in_buses(patch: pytest.MonkeyPatch, lose: Callable[[], None]) -> None:
    wait_for_each_other = torch_speeds._wait_for_each_other

    def losing(links: Any) -> bool:
        lose()
        return wait_for_each_other(links)

    patch.setattr(torch_speeds, "_wait_for_each_other", losing)


@pytest.mark.slow_repeats
@pytest.mark.parametrize("when", [in_calibration, in_copies, in_buses, in_profile])
def test_a_gpu_that_is_lost_before_the_search_ends_it_with_a_sentence(
    when: Callable[..., None],
    target: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sentence = f"cuda:1 cannot be used: CUDA error: {LOST}"
    command = ["optimize", target, "--budget", "1e", "--quiet"]
    with fake_cuda(2) as machine:
        two_kinds(machine)
        when(monkeypatch, lambda: machine.queues.lose(machine.devices[1], LOST))
        with pytest.raises(DeviceError, match=f"^{sentence}$"):
            placer.optimize(tiny(), devices=ALL, budget="1e", progress=False)
        # from now on it is known to fail
        assert main([*command, "--devices", ALL]) == 1
        assert capsys.readouterr().err == f"placer: {sentence}\n"
        assert main([*command, "--devices", "cuda:0,cuda:2"]) == 1
        assert "there is no device cuda:2: torch" in capsys.readouterr().err
        with pytest.warns(DeviceWarning, match=f"cuda:1 is left out: CUDA error: {LOST}$"):
            result = placer.optimize(tiny(), devices="auto", budget="1e", progress=False)
    assert result.problem.cluster.names == ("cuda:0", "cpu")
    assert result.best.measurement is not None, "cuda:1 fails beside it"
    assert result.best.measurement.ok


def lost_in_a_step(patch: pytest.MonkeyPatch, machine: Machine, number: int) -> None:
    """Lose the device of this number in the first step with an op on it; all steps take as long."""
    step = TorchExecutor._step

    def losing(executor: TorchExecutor, module: Any) -> float:
        if executor._there is not None and number in executor._there.devices:
            machine.queues.lose(machine.devices[number], LOST)
        step(executor, module)
        return 1e-3

    patch.setattr(TorchExecutor, "_step", losing)


def with_fixed_costs(patch: pytest.MonkeyPatch) -> None:
    """Let all calls and copies cost the same, so that the same placements run every time."""
    patch.setattr(torch_speeds, "seconds_per_call", lambda *_: 1e-5)
    forward = backward = CallTime(device_s=1e-5, launch_s=1e-6)
    patch.setattr(calls._Profiler, "cost", lambda *_: (forward, backward))


@pytest.mark.slow
def test_the_loss_of_the_only_device_in_a_run_ends_the_search_with_a_sentence(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_cuda(1) as machine:
        lost_in_a_step(monkeypatch, machine, 0)
        assert main(["optimize", target, "--devices", "cuda:0", "--budget", "1e", "--quiet"]) == 1
    assert capsys.readouterr().err == (
        "placer: Every candidate failed when it was run: cuda:0 cannot be used: "
        f"CUDA error: {LOST}\n"
    )


@pytest.mark.slow
def test_the_search_goes_on_without_a_gpu_that_is_lost_in_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_fixed_costs(monkeypatch)
    monkeypatch.setattr(candidate_runs, "has_headroom", lambda *_: True)
    with fake_cuda(2) as machine:
        two_kinds(machine)  # of each kind a single device runs
        lost_in_a_step(monkeypatch, machine, 1)
        result = placer.optimize(tiny(), devices=ALL, budget="40e", progress=False)
    sentence = f"cuda:1 cannot be used: CUDA error: {LOST}"
    tried = [each for each in result.candidates if each.measurement is not None]
    with_it = [each for each in tried if 1 in each.devices]
    assert [1] in [sorted(set(each.devices)) for each in with_it]
    assert {each.failure for each in with_it} == {sentence}
    others = [each for each in tried if each not in with_it]
    alone = [sorted(set(each.devices)) for each in others]
    assert [0] in alone
    assert [2] in alone
    assert [each.failure for each in others if each.failure] == []
    assert 1 not in result.best.devices


@pytest.mark.slow  # every turn of a candidate starts its processes
def test_with_a_process_for_each_device_the_search_goes_on_without_one_that_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("cuda:0", "cuda:1")
    with_fixed_costs(monkeypatch)
    monkeypatch.setattr(candidate_runs, "has_headroom", lambda *_: True)
    monkeypatch.setattr(placed_step, "SHARING", FakeSharing(2))
    with fake_cuda(2) as machine:
        two_kinds(machine)
        lost_when_placed(machine, 1, monkeypatch)
        link = Link(between=names, latency_s=1e-6, bandwidth_bytes_per_s=1e9)
        hosts = tuple(Host(devices=(name,)) for name in names)
        cluster = replace(discover(",".join(names)), links=(link,), hosts=hosts)
        step = replace(tiny(), optimizer=Optimizer.of("sgd"))
        result = placer.optimize(step, cluster, budget="20e", progress=False)
    tried = [each for each in result.candidates if each.measurement is not None]
    with_it = [each for each in tried if 1 in each.devices]
    assert with_it
    for each in with_it:
        assert "cuda:1 " in each.failure
        assert LOST in each.failure
    assert [each.failure for each in tried if each not in with_it and each.failure] == []
    assert {*result.best.devices} == {0}
