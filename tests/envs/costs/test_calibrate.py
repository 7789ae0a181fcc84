"""Calibration: measured speeds and op costs, and their cache."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from envs.costs import calibrate
from envs.costs.ops import profile_runs
from envs.costs.torch_speeds import LinkSpeed
from envs.executors.cores.instruction_lists import Instruction, Receive, Run
from envs.executors.cores.pool import StepRun, WorkerPool
from envs.hardware.cluster import Cluster, Device, Link, cluster_to_toml, load_cluster
from envs.hardware.discover import discover
from envs.measurement import contention_warning
from envs.runtime import calibrated
from graphs.extract import extract
from graphs.extract.program import StepProgram
from tests.helpers import tiny_models

CORES = sorted(os.sched_getaffinity(0))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLACER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Cluster]:
    """Replace measurement by made-up numbers, on eight cores; return the measured clusters."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    seen: list[Cluster] = []

    def measure(cluster: Cluster) -> Cluster:
        seen.append(cluster)
        devices = tuple(
            replace(d, peak_flop_per_s=7e10 + len(seen), bandwidth_bytes_per_s=1e10, source="made")
            for d in cluster.devices
        )
        link = Link(between=cluster.names, latency_s=1e-5, bandwidth_bytes_per_s=math.inf)
        return replace(cluster, devices=devices, links=(link,))

    monkeypatch.setattr(calibrate, "calibrate", measure)
    return seen


def made_up(*names: str, memory_bytes: int = 1000) -> Cluster:
    devices = tuple(Device(name=n, kind="core", memory_bytes=memory_bytes) for n in names)
    return Cluster(name="cluster of " + ", ".join(names), devices=devices)


# --- speeds


class Pool:
    """Workers with made-up times: a product takes 10 ms of CPU, an addition 20 ms, a hand-off more.

    Wall times are ``BUSY`` times as long.
    """

    BUSY = 1.0
    OP_S: Final = {"aten.mm.default": 0.01, "aten.add.Tensor": 0.02, "aten.neg.default": 1e-6}
    HOP_S: Final = {calibrate.SMALL_BYTES: 2e-5, calibrate.LARGE_BYTES: 3e-3}

    def __init__(self, program: StepProgram, devices: Sequence[Device]) -> None:
        self.program, self.devices = program, devices

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def load(self, lists: Sequence[Sequence[Instruction]]) -> int:
        self.lists = lists
        return 1

    def run(self, number: int, *, each: bool = False) -> StepRun:
        cpu_s = tuple(np.array([self.seconds(i) for i in own]) for own in self.lists)
        return StepRun(self.BUSY * sum(float(own.sum()) for own in cpu_s), lambda: cpu_s)

    def seconds(self, instruction: Instruction) -> float:
        if isinstance(instruction, Run):
            return self.OP_S[self.program.calls[instruction.call].target]
        if isinstance(instruction, Receive):
            value = self.program.values[instruction.value]
            return self.HOP_S[4 * math.prod(value.shape)]
        return 0.0


def test_speeds_and_links_follow_from_the_times_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "WorkerPool", Pool)
    cluster = calibrate.calibrate(made_up("core:0", "core:1", "core:2"))
    assert cluster.names == ("core:0", "core:1", "core:2")
    for device in cluster.devices:
        assert device.peak_flop_per_s == pytest.approx(2 * 768**3 / 0.01)
        assert device.bandwidth_bytes_per_s == pytest.approx(2 * (96 << 20) / 0.02)
        assert device.source.startswith("measured 20")
        assert (device.memory_bytes, device.contention) == (1000, 0.0)
    assert [link.between for link in cluster.links] == [
        ("core:0", "core:1"),
        ("core:0", "core:2"),
        ("core:1", "core:2"),
    ]
    moved = (2 << 20) - 64
    for link in cluster.links:
        assert link.latency_s == pytest.approx(2e-5)
        assert link.bandwidth_bytes_per_s == pytest.approx(moved / (3e-3 - 2e-5))


def test_another_process_on_a_core_shows_while_it_is_calibrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "WorkerPool", Pool)
    monkeypatch.setattr(Pool, "BUSY", 2.0)
    cluster = calibrate.calibrate(made_up("core:0"))
    assert cluster.links == ()
    assert cluster.devices[0].contention == pytest.approx(2.0)
    assert "core:0 2 x" in contention_warning(cluster)
    (tmp_path / "cluster.toml").write_text(cluster_to_toml(cluster))
    assert load_cluster(tmp_path / "cluster.toml") == cluster


@pytest.mark.slow
def test_every_op_has_a_cost() -> None:
    extraction = extract(tiny_models.conv_net())
    reports: list[tuple[int, int]] = []
    devices = discover(f"core:{CORES[0]}").devices
    runs_s = profile_runs(extraction, devices, repeats=3, progress=lambda *at: reports.append(at))
    assert runs_s["core"].shape == (3, extraction.program.op_count)
    assert (np.median(runs_s["core"], axis=0) > 0).all()
    assert reports == [(i + 1, 5) for i in range(5)]


def test_the_speed_of_a_link_by_hand() -> None:
    assert LinkSpeed.of(2e-5, 2e-5 + 1e-3, 10**6, 8e9) == pytest.approx((2e-5, 1e9))
    for noise_s in (0.0, -1e-4, 1e-15):  # no faster than memory
        assert LinkSpeed.of(noise_s, noise_s, 10**6, 5e9) == pytest.approx((1e-6, 5e9))


# --- the cache


@pytest.mark.usefixtures("cache")
def test_each_list_of_devices_is_measured_once_or_again_when_asked(
    measured: list[Cluster],
) -> None:
    first = calibrated(made_up("core:0", "core:1"))
    assert calibrated(made_up("core:0", "core:1")) == first
    assert len(measured) == 1
    again = calibrated(made_up("core:0", "core:1"), again=True)
    assert again.devices[0].peak_flop_per_s == first.devices[0].peak_flop_per_s + 1
    renamed = replace(made_up("core:0", "core:1", memory_bytes=77), name="renamed")
    cluster = calibrated(renamed)
    assert (cluster.name, cluster.links) == ("renamed", again.links)
    assert [device.memory_bytes for device in cluster.devices] == [77, 77]
    calibrated(made_up("core:0", "core:2"))
    calibrated(made_up("core:1", "core:0"))
    assert len(measured) == 4


@pytest.mark.usefixtures("cache")
def test_speeds_of_a_busy_machine_are_reported_and_count_for_an_hour(
    cache: Path, measured: list[Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = calibrate.calibrate

    def busy(cluster: Cluster) -> Cluster:
        first, second = quiet(cluster).devices
        links = (replace(KNOWN_LINK, between=cluster.names),)
        return replace(cluster, devices=(first, replace(second, contention=28.4)), links=links)

    monkeypatch.setattr(calibrate, "calibrate", busy)
    cluster = calibrated(made_up("core:0", "core:1"))
    assert "core:1 28.4 x" in contention_warning(cluster)
    assert "core:0" not in contention_warning(cluster)
    monkeypatch.setattr(calibrate, "calibrate", quiet)
    assert calibrated(made_up("core:0", "core:1")) == cluster
    [kept] = cache.glob("cores-*.toml")
    os.utime(kept, (time.time() - 3700, time.time() - 3700))
    cluster = calibrated(made_up("core:0", "core:1"))
    assert contention_warning(cluster) == ""
    assert calibrated(made_up("core:0", "core:1")) == cluster
    assert len(measured) == 2


KNOWN_LINK = Link(between=("core:0", "core:1"), latency_s=3.0, bandwidth_bytes_per_s=3.0)
PARTLY_KNOWN = Cluster(
    name="partly known",
    devices=(
        Device(name="core:0", kind="xpu", memory_bytes=5, launch_s=0.5, peak_flop_per_s=2.0),
        Device(name="core:1", kind="xpu", memory_bytes=6, source="a data sheet"),
    ),
    links=(KNOWN_LINK,),
    once_per_destination=False,
)


@pytest.mark.usefixtures("cache", "measured")
@pytest.mark.parametrize("warm", [True, False])
def test_what_a_cluster_says_is_kept_and_what_it_lacks_is_measured(warm: bool) -> None:
    if warm:
        calibrated(made_up("core:0", "core:1"))
    cluster = calibrated(PARTLY_KNOWN)
    first, second = cluster.devices
    assert replace(cluster, devices=PARTLY_KNOWN.devices) == PARTLY_KNOWN
    assert (first.kind, first.memory_bytes, first.launch_s) == ("xpu", 5, 0.5)
    assert (first.peak_flop_per_s, first.bandwidth_bytes_per_s) == (2.0, 1e10)
    assert second.peak_flop_per_s > 7e10
    assert first.source == "made"
    assert second.source == "a data sheet; made"
    assert calibrated(cluster) == cluster
    plain = calibrated(made_up("core:0", "core:1"))
    assert [(d.kind, d.launch_s, d.source) for d in plain.devices] == [("core", 0.0, "made")] * 2
    assert plain.links[0].latency_s == 1e-5


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("placer-cluster/1", "placer-cluster/9"),
        lambda text: text.replace("core:1", "core:5"),
        lambda text: "\0\xff",
    ],
)
def test_a_damaged_cache_is_measured_again(
    damage: object, cache: Path, measured: list[Cluster]
) -> None:
    assert callable(damage)
    first = calibrated(made_up("core:0", "core:1"))
    (file,) = cache.iterdir()
    file.write_text(damage(file.read_text()))
    assert calibrated(made_up("core:0", "core:1")).links == first.links
    assert len(measured) == 2
    assert list(cache.iterdir()) == [file]


def test_a_cache_that_cannot_be_written_is_no_failure(cache: Path, measured: list[Cluster]) -> None:
    cache.write_text("a file where the folder should be")
    assert calibrated(made_up("core:0", "core:1")).devices[0].source == "made"
    assert len(measured) == 1


@pytest.mark.slow
def test_a_worker_that_dies_once_while_costs_are_measured_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    extraction = extract(tiny_models.STEPS["conv_net"]())
    run = WorkerPool.run
    killed: list[int] = []

    def dying(pool: WorkerPool, number: int, *, each: bool) -> StepRun:
        if not killed:
            killed.append(pool._workers[0].process.pid)
            os.kill(killed[0], signal.SIGKILL)
        return run(pool, number, each=each)

    monkeypatch.setattr(WorkerPool, "run", dying)
    [cost_s] = profile_runs(extraction, discover(f"core:{CORES[0]}").devices, repeats=1)["core"]
    assert killed
    assert cost_s.shape == (extraction.program.op_count,)
    assert (cost_s > 0).all()
