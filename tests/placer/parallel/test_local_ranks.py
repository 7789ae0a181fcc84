"""Ranks on this machine, forked or new, that answer requests."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from envs.executors.process_settings import with_threads
from envs.hardware.discover import physical_cores
from placer.parallel.local_ranks import LocalRanks, RankError, Seat
from tests.helpers.folders import ROOT
from tests.helpers.processes import all_end, descendants

CORE = physical_cores()[:1]  # enough for any number of ranks
SEAT = Seat(cores=tuple(CORE))


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


@pytest.mark.slow
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


@pytest.mark.parametrize("forked", [True, False])
def test_a_rank_that_cannot_be_watched_is_an_error_and_ends(
    forked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_many(pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    before = descendants()
    monkeypatch.setattr(os, "pidfd_open", too_many)
    with pytest.raises(OSError, match="Too many open files"):
        LocalRanks([SEAT], answers_who, forked=forked)
    assert descendants() <= before


def large(_: bytes) -> Callable[[Any], Any]:
    return who


def test_a_new_process_that_dies_before_it_reads_its_task_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(RankError, match="died"):
        LocalRanks([SEAT], partial(large, bytes(10_000_000)), forked=False)


def test_a_task_that_cannot_be_sent_is_an_error_and_leaves_no_process() -> None:
    before = descendants()
    with pytest.raises(RankError, match=r"cannot be sent: .*lambda"):
        LocalRanks([SEAT, SEAT], lambda: who, forked=False)
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


@pytest.mark.slow
def test_ranks_end_with_a_parent_that_is_killed() -> None:
    words = [sys.executable, "-c", PARENT, str(CORE[0])]
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=ROOT, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        parent.kill()
    assert len(pids) == 2
    assert all_end(pids)
