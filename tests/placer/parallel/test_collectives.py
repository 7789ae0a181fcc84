"""Collectives that are timed by ranks on this machine, and the files that keep their times."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from envs.collectives import MeasuredAllReduce
from envs.hardware.noise import Noise
from placer.parallel import collectives
from placer.parallel.collectives import (
    GLOO,
    NCCL,
    WARM_UP,
    Transport,
    known_collectives,
    measure,
    measure_levels,
    rank_counts,
    reduction_s,
    reduction_times_s,
    seat_of,
)
from placer.parallel.local_ranks import LocalRanks, RankError, Seat
from placer.parallel.methods import reductions
from tests.fake_cuda import fake_cuda
from tests.helpers.second_devices import on_gpus
from tests.placer.parallel.test_local_ranks import CORE, SEAT, answering

SMALL = replace(GLOO, sizes=(4, 4096))
NEW = replace(SMALL, forked=False)
TIMES = MeasuredAllReduce("gloo", ((2, 1000, 1e-3), (2, 2000, 2e-3)))
DAMAGED_LEVELS = json.dumps(
    {
        "format": "placer-collectives/1",
        "backend": "gloo",
        "times": TIMES.times,
        "by_level": [[[2, 1], 64, 0.1], [[2, 1], 65, 0.1]],
    }
)


def test_the_numbers_of_ranks_to_calibrate_are_few() -> None:
    assert [rank_counts(most) for most in (1, 2, 3, 8, 12)] == [
        [], [2], [2, 3], [2, 4, 8], [2, 4, 8, 12],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "transport",
    [
        pytest.param(SMALL, id="forks"),
        pytest.param(NEW, id="new processes", marks=pytest.mark.slow),
    ],
)
def test_all_reduces_are_timed_for_every_size_and_number_of_ranks(transport: Transport) -> None:
    measured = measure(transport, [SEAT] * 3, repeats=3)
    assert [each[:2] for each in measured.times] == [(2, 4), (2, 4096), (3, 4), (3, 4096)]
    assert all(0 < seconds < 100 for *_, seconds in measured.times)
    assert measured.backend == "gloo"


@pytest.mark.parametrize("count", [on_gpus(1, 1), on_gpus(2, 2)])
def test_all_reduces_of_nccl_are_timed_between_ranks_with_a_gpu_each(count: int) -> None:
    seats = [seat_of(f"cuda:{index}") for index in range(count)]
    times = reduction_s(replace(NCCL, sizes=(4096, 1 << 20)), seats, repeats=3)
    assert [size for size, _ in times] == [4096, 1 << 20]
    assert all(0 < seconds < 100 for _, seconds in times)


@pytest.mark.parametrize("device", [on_gpus(1, "cuda:0")])
def test_ranks_that_share_a_gpu_are_an_error_within_the_limit(device: str) -> None:
    with pytest.raises(RankError):
        reduction_s(replace(NCCL, limit_s=60.0), [seat_of(device)] * 2)


def test_all_reduces_of_gpus_are_kept_for_these_gpus_and_settings_of_nccl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACER_CACHE", str(tmp_path))
    used: list[tuple[Transport, list[Seat]]] = []

    def measured(transport: Transport, seats: list[Seat]) -> MeasuredAllReduce:
        used.append((transport, seats))
        return replace(TIMES, backend=transport.name)

    monkeypatch.setattr(collectives, "measure", measured)
    with fake_cuda(3):
        for names in (["cuda:0", "cuda:1"], ["cuda:0", "cuda:1"], ["cuda:0", "cuda:2"]):
            assert known_collectives(names).backend == "nccl"
        monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
        known_collectives(["cuda:0", "cuda:1"])
    assert [transport for transport, _ in used] == [NCCL] * 3
    assert [[seat.gpus for seat in seats] for _, seats in used] == [
        [("GPU-fake 0",), ("GPU-fake 1",)],
        [("GPU-fake 0",), ("GPU-fake 2",)],
        [("GPU-fake 0",), ("GPU-fake 1",)],
    ]
    assert len(list(tmp_path.glob("collectives-*.json"))) == 3


def test_a_rank_with_several_gpus_sees_them_in_their_order() -> None:
    with fake_cuda(3):
        assert seat_of("cuda:2", "cpu", "cuda:0") == Seat(gpus=("GPU-fake 0", "GPU-fake 2"))
        assert seat_of("cpu") == Seat()
    name = f"core:{CORE[0]}"
    assert seat_of(name, name) == Seat(cores=(*CORE, *CORE))


def sizes_reduced(_: object) -> tuple[int, list[str]]:
    """Return the number of reduced gradients, and the collectives that a reduction calls."""
    called: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "reduce_scatter", "all_gather"):
            of = dist if name == "all_reduce" else reductions
            real = getattr(of, name)

            def counted(
                *args: Any, real: Callable[..., Any] = real, name: str = name, **keywords: Any
            ) -> Any:
                called.append(name)
                return real(*args, **keywords)

            patch.setattr(of, name, counted)
        times_s = reduction_times_s("cpu", (2, 2), 4096, 1)
    return len(times_s), called


def test_hierarchical_all_reduces_are_timed_level_by_level() -> None:
    by_level = measure_levels(SMALL, [SEAT] * 4, [(2, 2)], repeats=3)
    assert [each[:2] for each in by_level] == [((2, 2), 4), ((2, 2), 4096)]
    assert all(0 < seconds < 100 for *_, seconds in by_level)
    with LocalRanks([SEAT] * 4, answering(sizes_reduced)) as ranks:
        for count, called in ranks.ask(None):
            assert count == 1
            assert called == ["reduce_scatter", "all_reduce", "all_gather"] * (1 + WARM_UP)


def test_levels_are_measured_once_and_kept_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACER_CACHE", str(tmp_path))
    monkeypatch.setattr(collectives, "contended", lambda cores: False)
    monkeypatch.setattr(collectives, "measure", lambda transport, seats: TIMES)
    monkeypatch.setattr(collectives, "GLOO", SMALL)
    names = [f"core:{CORE[0]}"] * 4
    assert known_collectives(names) == TIMES
    found = known_collectives(names, [(2, 2)])
    assert found.times == TIMES.times
    assert [each[:2] for each in found.by_level] == [((2, 2), 4), ((2, 2), 4096)]
    assert known_collectives(names, [(2, 2)]) == known_collectives(names) == found


@pytest.mark.parametrize(
    ("readings", "busy"), [([1.0], False), ([4.2, 1.1], False), ([4.2, 1.6, 1.2], True)]
)
def test_cores_are_busy_when_they_stay_so(
    readings: list[float], busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = iter(readings)

    def noise_of(core: int) -> Noise:
        return Noise(core=core, median_s=1e-3, spread=0.0, contention=next(noise))

    monkeypatch.setattr(collectives, "noise_of", noise_of)
    monkeypatch.setattr(collectives, "PAUSE_S", 0.0)
    assert collectives.contended(CORE) is busy
    assert not list(noise)


@pytest.mark.parametrize("busy", [False, True])
def test_calibrations_are_kept_unless_other_processes_used_the_cores(
    busy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACER_CACHE", str(tmp_path))
    calls: list[object] = []

    def counted(transport: Transport, seats: object) -> MeasuredAllReduce:
        calls.append(seats)
        return TIMES

    monkeypatch.setattr(collectives, "measure", counted)
    monkeypatch.setattr(collectives, "contended", lambda cores: busy)
    name = f"core:{CORE[0]}"
    assert known_collectives([name]) == known_collectives([name]) == TIMES
    assert len(calls) == 1 + busy
    known_collectives([name], fresh=True)
    assert len(calls) == 2 + busy


@pytest.mark.parametrize("damage", ["", "{", '{"format": "other", "backend": "g", "times": []}',
    '{"format": "placer-collectives/1", "backend": "gloo", "times": [[2, 64, 0.1]]}',
    '{"format": "placer-collectives/1", "backend": "gloo", "times": [[2, 64, 0.1], [2, 65, -1]]}',
    DAMAGED_LEVELS,
])  # fmt: skip
def test_a_damaged_file_is_measured_again(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACER_CACHE", str(tmp_path))
    monkeypatch.setattr(collectives, "measure", lambda transport, seats: TIMES)
    monkeypatch.setattr(collectives, "contended", lambda cores: False)
    name = f"core:{CORE[0]}"
    known_collectives([name])
    [path] = tmp_path.iterdir()
    path.write_text(damage)
    assert known_collectives([name]) == TIMES
    assert json.loads(path.read_text())["times"] == [list(each) for each in TIMES.times]
