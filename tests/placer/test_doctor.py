from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from envs.hardware.discover import physical_cores
from envs.hardware.noise import Noise, governors, noise_of, quota_cores
from placer.cli.main import main
from placer.report.doctor import Checkup
from tests.helpers.simulator_cases import one_kind

QUIET = Noise(core=0, median_s=2e-4, spread=0.01, contention=1.0)
HEALTHY = Checkup(
    versions={"torch": "2.13.0"},
    processor="a processor",
    cluster=one_kind(2),
    noise=(QUIET, replace(QUIET, core=1)),
    load=0.2,
    cores=2,
    quota_cores=None,
    governors=frozenset({"performance"}),
    free_bytes=8 * 10**9,
    cache="caches/device-placer",
    cache_writable=True,
)

MEASURED_BUSY = replace(
    HEALTHY.cluster,
    devices=(HEALTHY.cluster.devices[0], replace(HEALTHY.cluster.devices[1], contention=3.1)),
)


def test_a_quiet_machine_needs_no_advice() -> None:
    assert HEALTHY.advice == []
    assert replace(HEALTHY, quota_cores=2.0, governors=frozenset()).advice == []


@pytest.mark.parametrize(
    ("checkup", "words"),
    [
        (
            replace(HEALTHY, noise=(QUIET, replace(QUIET, core=1, contention=1.8)), load=2.5),
            "2.5 on 2 cores",
        ),
        (replace(HEALTHY, noise=(replace(QUIET, spread=0.4),)), "core 0"),
        (replace(HEALTHY, cluster=MEASURED_BUSY), "d1 3.1 x"),
        (replace(HEALTHY, quota_cores=1.5), "1.5 cores"),
        (replace(HEALTHY, governors=frozenset({"powersave"})), "powersave"),
        (replace(HEALTHY, free_bytes=3 * 10**8), "0.3 GB"),
        (replace(HEALTHY, cache_writable=False), "PLACER_CACHE"),
    ],
)
def test_each_fault_has_its_advice(checkup: Checkup, words: str) -> None:
    [advice] = checkup.advice
    assert words in advice


def test_quieter_cores_are_advised_only_where_there_are_enough_to_place_on() -> None:
    loud = replace(QUIET, core=1, contention=1.8)
    [alone] = replace(HEALTHY, noise=(QUIET, loud)).advice
    assert "--devices" not in alone
    [others] = replace(HEALTHY, noise=(QUIET, loud, replace(QUIET, core=2))).advice
    assert "cores 0, 2" in others
    assert "--devices" in others


def test_the_verdict_names_cores_and_thresholds() -> None:
    assert HEALTHY.is_good
    loud, wide = replace(QUIET, core=1, contention=1.8), replace(QUIET, core=2, spread=0.4)
    noisy = replace(HEALTHY, noise=(QUIET, loud, replace(loud, core=3, spread=0.5), wide))
    assert not noisy.is_good
    for words in ("cores 1, 3 ", "1.80", "core 2 ", "40%"):
        assert words in noisy.verdict
    throttled = replace(HEALTHY, quota_cores=1.5)
    assert not throttled.is_good
    for steady in (
        replace(HEALTHY, free_bytes=1),
        replace(HEALTHY, cache_writable=False),
        replace(HEALTHY, noise=(replace(QUIET, spread=0.2, contention=1.15),)),
    ):
        assert steady.is_good


def test_noise_leaves_the_process_where_it_was() -> None:
    before = os.sched_getaffinity(0)
    noise_of(physical_cores()[-1], bursts=2)
    assert os.sched_getaffinity(0) == before


def test_noise_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    wall_s = iter([0.0, 0.1, 0.1, 0.3, 0.3, 0.6, 0.6, 1.0, 1.0, 1.5])  # bursts of 0.1 to 0.5 s
    cpu_s = iter([0.0, 1.2])
    monkeypatch.setattr(time, "perf_counter", lambda: next(wall_s))
    monkeypatch.setattr(time, "thread_time", lambda: next(cpu_s))
    noise = noise_of(physical_cores()[0], bursts=5)
    assert noise.median_s == pytest.approx(0.3)
    assert noise.spread == pytest.approx((0.4 - 0.2) / 0.3)
    assert noise.contention == pytest.approx(1.5 / 1.2)


@pytest.mark.parametrize(("text", "cores"), [("150000 100000", 1.5), ("max 100000", None)])
def test_the_quota_of_a_control_group_counts_in_cores(
    tmp_path: Path, text: str, cores: float | None
) -> None:
    (tmp_path / "cpu.max").write_text(text + "\n")
    assert quota_cores(tmp_path) == cores
    assert quota_cores(tmp_path / "nowhere") is None


def test_governors_are_those_of_the_cores(tmp_path: Path) -> None:
    for core, name in enumerate(["performance", "powersave", "powersave"]):
        folder = tmp_path / f"cpu{core}" / "cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_governor").write_text(name + "\n")
    assert governors([0], tmp_path) == {"performance"}
    assert governors([0, 2], tmp_path) == {"performance", "powersave"}
    assert governors([7], tmp_path) == set()


def test_the_doctor_answers_for_people_and_machines(capsys: pytest.CaptureFixture[str]) -> None:
    name = f"core:{physical_cores()[0]}"
    assert main(["machine", "--devices", name, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [noise["core"] for noise in found["noise"]] == [physical_cores()[0]]
    assert main(["machine", "--devices", name]) == 0
    assert name in capsys.readouterr().out
    assert main(["machine", "--devices", "core:9999"]) == 2
