"""Forked ranks that answer requests, and the collectives that they calibrate."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from envs.collectives import MeasuredAllReduce
from envs.executors.process_settings import with_threads
from envs.hardware.discover import physical_cores
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
from tests.helpers.folders import ROOT
from tests.helpers.processes import all_end, descendants
from tests.helpers.second_devices import on_gpus

CORE = physical_cores()[:1]  # enough for any number of ranks
SEAT = Seat(cores=tuple(CORE))
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


def answering(answer: Callable[[Any], Any]) -> Callable[[], Callable[[Any], Any]]:
    return lambda: answer


def sum_of_ranks(request: int) -> tuple[int, float, int, list[int]]:
    mine = torch.full((3,), float(request + dist.get_rank()))
    dist.all_reduce(mine)
    return os.getpid(), mine[0].item(), torch.get_num_threads(), sorted(os.sched_getaffinity(0))


def naps() -> int:
    """Return how often threads of this process went to sleep by themselves."""
    statuses = [path.read_text() for path in Path("/proc/self/task").glob("*/status")]
    lines = (line for status in statuses for line in status.splitlines())
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt"))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_threads_of_a_rank_wait_for_the_next_op_awake() -> None:
    cores, ops = tuple(sorted(os.sched_getaffinity(0))[:2]), 500
    numbers = torch.zeros(1 << 18)

    def naps_in_ops(_: Any) -> int:
        before = naps()
        for _ in range(ops):
            numbers.add_(1)
        return naps() - before

    with with_threads(2):
        numbers.add_(1)  # threads of this process, which the rank does not have
        with LocalRanks([Seat(cores=cores)], answering(naps_in_ops)) as ranks:
            fewest = min(*ranks.ask(None), *ranks.ask(None), *ranks.ask(None))
    assert fewest < ops


def test_ranks_are_pinned_copies_of_this_process_in_one_group() -> None:
    def note() -> str:
        return "no pickle holds this"

    with LocalRanks([SEAT, SEAT], answering(lambda _: (note(), dist.get_rank()))) as ranks:
        assert ranks.ask(None) == [("no pickle holds this", 0), ("no pickle holds this", 1)]
    with LocalRanks([SEAT, SEAT], answering(sum_of_ranks)) as ranks:
        first, second = ranks.ask(10)
        assert [each[1:] for each in (first, second)] == [(21.0, 1, CORE)] * 2
        assert len({first[0], second[0], os.getpid()}) == 3
        assert ranks.ask(0)[0][1] == 1.0
    assert all_end([first[0], second[0]])


def policies(_: object) -> tuple[int, list[int]]:
    """Return the policy of the main thread, and those of the threads that gloo has named."""
    dist.all_reduce(torch.ones(1))  # by threads of gloo that run, and so have their names
    of_gloo = [task for task in Path("/proc/self/task").iterdir() if "gloo" in task_name(task)]
    return os.sched_getscheduler(os.getpid()), [os.sched_getscheduler(int(t.name)) for t in of_gloo]


def task_name(task: Path) -> str:
    try:
        return (task / "comm").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return ""


def test_threads_of_gloo_have_the_policy_for_batch_work_and_the_main_thread_does_not() -> None:
    with LocalRanks([SEAT, SEAT], answering(policies)) as ranks:
        for of_main, of_gloo in ranks.ask(None):
            assert set(of_gloo) == {os.SCHED_BATCH}
            assert of_main == os.sched_getscheduler(0)


def failing(request: str) -> int:
    if dist.get_rank() == 1 and request == "fail":
        raise ValueError("rank 1 cannot\ndo this")
    if dist.get_rank() == 1 and request == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


@pytest.mark.parametrize(("request_", "reason"), [("fail", "^rank 1 cannot$"), ("die", "died")])
def test_a_rank_that_fails_or_dies_is_an_error_and_all_end(request_: str, reason: str) -> None:
    with LocalRanks([SEAT, SEAT], answering(failing)) as ranks:
        pids = ranks.ask("work")
        with pytest.raises(RankError, match=reason):
            ranks.ask(request_)
    assert all_end(pids)


def who(_: object) -> tuple[str, int, int, list[int]]:
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return gpus, os.getpid(), torch.get_num_threads(), sorted(os.sched_getaffinity(0))


def answers_who() -> Callable[[Any], Any]:
    return who


def answers_unless_second() -> Callable[[Any], Any]:
    """Return what answers on the first rank, and fails, dies or hangs on the second one."""

    def answer(request: str) -> int:
        if dist.get_rank() == 1 and request == "hang":
            signal.pause()
        return failing(request)

    return answer


def test_ranks_may_be_new_processes_that_see_their_own_gpus() -> None:
    seats = [replace(SEAT, gpus=("GPU-a",)), replace(SEAT, gpus=("GPU-b", "GPU-c"))]
    with LocalRanks(seats, answers_who, forked=False) as ranks:
        first, second = ranks.ask(None)
    assert [(each[0], *each[2:]) for each in (first, second)] == [
        ("GPU-a", 1, CORE), ("GPU-b,GPU-c", 1, CORE),
    ]  # fmt: skip
    assert len({first[1], second[1], os.getpid()}) == 3
    assert all_end([first[1], second[1]])


@pytest.mark.slow  # fast where ranks are forks
@pytest.mark.parametrize(
    ("request_", "reason"),
    [("fail", "^rank 1 cannot$"), ("die", "died"), ("hang", "did not answer for 0.5 s")],
)
def test_a_new_process_that_fails_dies_or_hangs_is_an_error_and_all_end(
    request_: str, reason: str
) -> None:
    before = descendants()
    started = LocalRanks([SEAT, SEAT], answers_unless_second, forked=False)
    with started as ranks, pytest.raises(RankError, match=reason):
        ranks.ask(request_, 0.5 if request_ == "hang" else 60.0)
    assert all_end(descendants() - before)


def test_what_fails_at_the_start_is_an_error_and_leaves_no_process() -> None:
    before = descendants()

    def work() -> Callable[[Any], Any]:
        raise ValueError("no model")

    with pytest.raises(RankError, match="no model"):
        LocalRanks([SEAT, SEAT], work)
    assert all_end(descendants() - before)


def test_ctrl_c_while_ranks_work_ends_them() -> None:
    before = descendants()

    def interrupt(_: object) -> None:
        if dist.get_rank() == 0:
            os.kill(os.getppid(), signal.SIGINT)
        signal.pause()

    with pytest.raises(KeyboardInterrupt), LocalRanks([SEAT, SEAT], answering(interrupt)) as ranks:
        ranks.ask(None)
    assert all_end(descendants() - before)


PARENT = """
import os, signal, sys
from placer.parallel.local_ranks import LocalRanks, Seat
seat = Seat(cores=(int(sys.argv[1]),))
with LocalRanks([seat, seat], lambda: lambda _: os.getpid()) as ranks:
    print(*ranks.ask(None), flush=True)
    signal.pause()
"""


def test_ranks_end_with_a_parent_that_is_killed() -> None:
    words = [sys.executable, "-c", PARENT, str(CORE[0])]
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=ROOT, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        parent.kill()
    assert len(pids) == 2
    assert all_end(pids)


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
