"""Links between torch devices: of each pair, kept for these very GPUs, with the latency of hops."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from envs.costs import calibrate, torch_speeds
from envs.costs.calibrate import torch_calibration
from envs.costs.torch_speeds import HOPS, LinkSpeed, copy_speed, hop_s, measured_speeds
from envs.hardware.cluster import Cluster, Device, cluster_from_dict, cluster_to_toml
from tests.fake_cuda import fake_cuda
from tests.helpers.vdev import TRANSFERS

CPU = torch.device("cpu")


def gpus(count: int) -> Cluster:
    names = [f"cuda:{i}" for i in range(count)]
    devices = [Device(name=name, kind="cuda:H200", memory_bytes=1 << 40) for name in names]
    return Cluster(name="gpus", devices=(*devices, Device(name="cpu", kind="c", memory_bytes=1)))


def test_the_link_of_each_ordered_pair_of_equal_gpus_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def speed(
        source: torch.device, destination: torch.device, _: float, *, pinned: bool = False
    ) -> LinkSpeed:
        at = [-1 if end.index is None else end.index for end in (source, destination)]
        return LinkSpeed(1e-5, 1e9 * (100 * pinned + 10 * (at[0] + 2) + at[1] + 2))

    rates = {"launch_s": 1e-6, "peak_flop_per_s": 1e12, "bandwidth_bytes_per_s": 1e12}
    monkeypatch.setattr(torch_speeds, "torch_device", torch.device)
    monkeypatch.setattr(torch_speeds, "_rates", lambda device: rates)
    monkeypatch.setattr(torch_speeds, "copy_speed", speed)
    monkeypatch.setattr(torch_speeds, "host_buses", lambda _: {("cpu", "cuda:1"): "one"})
    cluster = measured_speeds(gpus(3))
    assert {link.between: link.bus for link in cluster.links if link.sharing == "bus"} == {
        ("cpu", "cuda:1"): "one"
    }
    found = {link.between: link.bandwidth_bytes_per_s for link in cluster.links}
    number = {"cpu": 1, "cuda:0": 2, "cuda:1": 3, "cuda:2": 4}
    assert found == {
        (a, b): 1e9 * (10 * number[a] + number[b])
        for a, b in itertools.permutations(cluster.names, 2)
    }
    pinned = {link.between: link.pinned_bandwidth_bytes_per_s for link in cluster.links}
    assert pinned == {
        (a, b): 0.0 if "cpu" not in (a, b) else 1e9 * (100 + 10 * number[a] + number[b])
        for a, b in itertools.permutations(cluster.names, 2)
    }
    assert cluster_from_dict(tomllib.loads(cluster_to_toml(cluster))) == cluster


@pytest.mark.parametrize("pinned", [False, True])
def test_copies_with_the_host_are_timed_from_and_to_memory_of_one_kind(
    pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = torch.device("cuda", 0)
    copies: list[tuple[bool, bool]] = []

    def seconds(copy: Any, _: Sequence[torch.device]) -> float:
        source, made = copy.func.__self__, copy()
        copies.append((source.is_pinned(), made.is_pinned()))
        return 1e-5

    monkeypatch.setattr(torch_speeds, "seconds_per_call", seconds)
    with fake_cuda():
        copy_speed(CPU, gpu, 1e9, pinned=pinned)
        assert copies == [(pinned, False)] * 2
        copies.clear()
        copy_speed(gpu, CPU, 1e9, pinned=pinned)
        assert copies == [(False, pinned)] * 2


def test_gpus_whose_copies_with_the_host_wait_for_each_other_share_a_bus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [f"cuda:{number}" for number in range(4)]
    links = [ends for name in names for ends in (("cpu", name), (name, "cpu"))]
    slow: dict[tuple[str, ...], float] = {
        ("cuda:0", "cuda:2"): 2.0,
        ("cuda:2", "cuda:3"): 1.6,
        ("cuda:0", "cuda:1"): 1.4,
    }

    def seconds(copies: Callable[[], Any], devices: Sequence[torch.device]) -> float:
        made = copies()
        gpus = tuple(str(device) for device in devices if device != CPU)
        to_host = isinstance(made, list) and made[0].device == CPU
        return 1e-3 * (slow.get(gpus, 1.1) if isinstance(made, list) and not to_host else 1.0)

    monkeypatch.setattr(torch_speeds, "seconds_per_call", seconds)
    monkeypatch.setattr(torch_speeds, "LARGE_BYTES", 64)
    with fake_cuda(4):
        found = torch_speeds.host_buses(links)
    assert found == dict.fromkeys([("cpu", f"cuda:{n}") for n in (0, 2, 3)], "cpu -> cuda:0")


def test_speeds_are_kept_for_these_very_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    visible = ["GPU-a", "GPU-b", "GPU-c"]
    monkeypatch.setattr(calibrate, "torch_device", torch.device)
    monkeypatch.setattr(
        calibrate, "uuid_of", lambda device: "" if device.index is None else visible[device.index]
    )
    first = torch_calibration(gpus(2)).path
    assert torch_calibration(gpus(2)).path == first
    visible.pop(0)  # as by CUDA_VISIBLE_DEVICES
    assert torch_calibration(gpus(2)).path != first


@pytest.mark.usefixtures("second_device")
def test_a_hop_costs_what_alternating_devices_adds_to_a_chain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def seconds(work: Callable[[], object], devices: Sequence[torch.device]) -> float:
        TRANSFERS.clear()
        work()
        return 1e-6 * HOPS + 1.5e-5 * len(TRANSFERS)  # a copy takes 15 us to be through

    monkeypatch.setattr(torch_speeds, "seconds_per_call", seconds)
    assert hop_s(torch.device("cuda", 0), CPU) == pytest.approx(1.5e-5)


@pytest.mark.usefixtures("second_device")
def test_small_copies_between_accelerators_take_as_long_as_a_hop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accelerator = torch.device("cuda", 0)
    monkeypatch.setattr(torch_speeds, "seconds_per_call", lambda *_: 3e-6)
    monkeypatch.setattr(torch_speeds, "hop_s", lambda *_: 2e-5)
    assert copy_speed(accelerator, accelerator, 1e9).latency_s == 2e-5
    assert copy_speed(accelerator, CPU, 1e9).latency_s == 3e-6
    monkeypatch.setattr(torch_speeds, "hop_s", lambda *_: -1e-6)  # by noise
    assert copy_speed(accelerator, accelerator, 1e9).latency_s == 3e-6
