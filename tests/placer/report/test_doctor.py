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
    for words in ("cores 1, 3 ", "1.80", "core 2 ", "40%"):
        assert words in noisy.verdict
    slightly_noisy = replace(QUIET, spread=0.2, contention=1.15)
    for checkup, is_good in (
        (noisy, False),
        (replace(HEALTHY, quota_cores=1.5), False),
        (replace(HEALTHY, free_bytes=1, cache_writable=False), True),
        (replace(HEALTHY, noise=(slightly_noisy,)), True),
    ):
        assert checkup.is_good == is_good


def test_noise_by_hand_and_the_process_stays_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    wall_s = iter([0.0, 0.1, 0.1, 0.3, 0.3, 0.6, 0.6, 1.0, 1.0, 1.5])  # bursts of 0.1 to 0.5 s
    cpu_s = iter([0.0, 1.2])
    monkeypatch.setattr(time, "perf_counter", lambda: next(wall_s))
    monkeypatch.setattr(time, "thread_time", lambda: next(cpu_s))
    noise = noise_of(physical_cores()[-1], bursts=5)
    assert noise.median_s == pytest.approx(0.3)
    assert noise.spread == pytest.approx((0.4 - 0.2) / 0.3)
    assert noise.contention == pytest.approx(1.5 / 1.2)
    assert os.sched_getaffinity(0) == before


def test_quotas_and_governors_are_read_where_they_are(tmp_path: Path) -> None:
    assert quota_cores(tmp_path) is None
    for text, cores in (("150000 100000", 1.5), ("max 100000", None)):
        (tmp_path / "cpu.max").write_text(text + "\n")
        assert quota_cores(tmp_path) == cores
    for core, name in enumerate(["performance", "powersave", "powersave"]):
        folder = tmp_path / f"cpu{core}" / "cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_governor").write_text(name + "\n")
    assert governors([0], tmp_path) == {"performance"}
    assert governors([0, 2], tmp_path) == {"performance", "powersave"}
    assert governors([7], tmp_path) == set()


@pytest.mark.slow
def test_the_doctor_answers_for_people_and_machines(capsys: pytest.CaptureFixture[str]) -> None:
    core = physical_cores()[0]
    command = ["machine", "--devices", f"core:{core}"]
    assert main([*command, "--json"]) == 0
    assert [noise["core"] for noise in json.loads(capsys.readouterr().out)["noise"]] == [core]
    assert main(command) == 0
    assert f"core:{core}" in capsys.readouterr().out
