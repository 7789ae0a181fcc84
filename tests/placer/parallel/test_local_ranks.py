"""Forked ranks that answer requests, and the collectives that they calibrate."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
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
    WARM_UP,
    core_collectives,
    measure,
    measure_levels,
    rank_counts,
    reduction_times_s,
)
from placer.parallel.local_ranks import LocalRanks, RankError
from placer.parallel.methods import reductions
from tests.helpers.folders import ROOT
from tests.helpers.processes import all_end, descendants

CORE = physical_cores()[:1]  # enough for any number of ranks
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
    cores, ops = sorted(os.sched_getaffinity(0))[:2], 500
    numbers = torch.zeros(1 << 18)

    def naps_in_ops(_: Any) -> int:
        before = naps()
        for _ in range(ops):
            numbers.add_(1)
        return naps() - before

    with with_threads(2):
        numbers.add_(1)  # threads of this process, which the rank does not have
        with LocalRanks([cores], answering(naps_in_ops)) as ranks:
            fewest = min(*ranks.ask(None), *ranks.ask(None), *ranks.ask(None))
    assert fewest < ops


def test_ranks_are_pinned_copies_of_this_process_in_one_group() -> None:
    def note() -> str:
        return "no pickle holds this"

    with LocalRanks([CORE, CORE], answering(lambda _: (note(), dist.get_rank()))) as ranks:
        assert ranks.ask(None) == [("no pickle holds this", 0), ("no pickle holds this", 1)]
    with LocalRanks([CORE, CORE], answering(sum_of_ranks)) as ranks:
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
    with LocalRanks([CORE, CORE], answering(policies)) as ranks:
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
    with LocalRanks([CORE, CORE], answering(failing)) as ranks:
        pids = ranks.ask("work")
        with pytest.raises(RankError, match=reason):
            ranks.ask(request_)
    assert all_end(pids)


def test_what_fails_at_the_start_is_an_error_and_leaves_no_process() -> None:
    before = descendants()

    def work() -> Callable[[Any], Any]:
        raise ValueError("no model")

    with pytest.raises(RankError, match="no model"):
        LocalRanks([CORE, CORE], work)
    assert all_end(descendants() - before)


def test_ctrl_c_while_ranks_work_ends_them() -> None:
    before = descendants()

    def interrupt(_: object) -> None:
        if dist.get_rank() == 0:
            os.kill(os.getppid(), signal.SIGINT)
        signal.pause()

    with pytest.raises(KeyboardInterrupt), LocalRanks([CORE, CORE], answering(interrupt)) as ranks:
        ranks.ask(None)
    assert all_end(descendants() - before)


PARENT = """
import os, signal, sys
from placer.parallel.local_ranks import LocalRanks
core = [int(sys.argv[1])]
with LocalRanks([core, core], lambda: lambda _: os.getpid()) as ranks:
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


def test_all_reduces_are_timed_for_every_size_and_number_of_ranks() -> None:
    measured = measure([CORE, CORE, CORE], sizes=(4, 4096), repeats=3)
    assert [each[:2] for each in measured.times] == [(2, 4), (2, 4096), (3, 4), (3, 4096)]
    assert all(0 < seconds < 100 for *_, seconds in measured.times)
    assert measured.backend == "gloo"


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
        times_s = reduction_times_s((2, 2), 4096, 1)
    return len(times_s), called


def test_hierarchical_all_reduces_are_timed_level_by_level() -> None:
    by_level = measure_levels([CORE] * 4, [(2, 2)], sizes=(4, 4096), repeats=3)
    assert [each[:2] for each in by_level] == [((2, 2), 4), ((2, 2), 4096)]
    assert all(0 < seconds < 100 for *_, seconds in by_level)
    with LocalRanks([CORE] * 4, answering(sizes_reduced)) as ranks:
        for count, called in ranks.ask(None):
            assert count == 1
            assert called == ["reduce_scatter", "all_reduce", "all_gather"] * (1 + WARM_UP)


def test_levels_are_measured_once_and_kept_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACER_CACHE", str(tmp_path))
    monkeypatch.setattr(collectives, "contended", lambda cores: False)
    monkeypatch.setattr(collectives, "measure", lambda cores: TIMES)
    small = functools.partial(measure_levels, sizes=(4, 4096), repeats=3)
    monkeypatch.setattr(collectives, "measure_levels", small)
    names = [f"core:{CORE[0]}"] * 4
    assert core_collectives(names) == TIMES
    found = core_collectives(names, [(2, 2)])
    assert found.times == TIMES.times
    assert [each[:2] for each in found.by_level] == [((2, 2), 4), ((2, 2), 4096)]
    assert core_collectives(names, [(2, 2)]) == core_collectives(names) == found


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

    def counted(cores: object) -> MeasuredAllReduce:
        calls.append(cores)
        return TIMES

    monkeypatch.setattr(collectives, "measure", counted)
    monkeypatch.setattr(collectives, "contended", lambda cores: busy)
    name = f"core:{CORE[0]}"
    assert core_collectives([name]) == core_collectives([name]) == TIMES
    assert len(calls) == 1 + busy
    core_collectives([name], fresh=True)
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
    monkeypatch.setattr(collectives, "measure", lambda cores: TIMES)
    monkeypatch.setattr(collectives, "contended", lambda cores: False)
    name = f"core:{CORE[0]}"
    core_collectives([name])
    [path] = tmp_path.iterdir()
    path.write_text(damage)
    assert core_collectives([name]) == TIMES
    assert json.loads(path.read_text())["times"] == [list(each) for each in TIMES.times]
