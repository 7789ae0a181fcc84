"""Workers are forked by one server, which may die and which ends with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from envs.executors.cores import fork_server
from envs.executors.cores.fork_server import ForkServer, running_server
from tests.helpers.folders import ROOT
from tests.helpers.processes import all_end


def test_a_server_that_is_still_importing_ends_with_its_parent() -> None:
    start = (
        "from envs.executors.cores import fork_server; "
        "print(fork_server.ForkServer()._process.pid, flush=True)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", f"{start}; import time; time.sleep(600)"],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )
    assert parent.stdout is not None
    server = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert all_end([server])


def test_another_server_starts_where_one_is_killed_while_it_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = ForkServer(), running_server()
    monkeypatch.setattr(fork_server, "_server", first)
    os.kill(first._process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, first._process.pid, os.WEXITED | os.WNOWAIT)
    polled = iter([None])
    monkeypatch.setattr(first._process, "poll", lambda: next(polled, -signal.SIGKILL))
    monkeypatch.setattr(fork_server, "ForkServer", lambda: second)
    ours, theirs = os.pipe()
    with Path(os.devnull).open("wb") as errors:
        worker = fork_server.fork_worker(
            [min(os.sched_getaffinity(0))], ours, errors.fileno(), [], 120.0
        )
    try:
        assert worker.poll() is None
        worker.kill()
        assert worker.wait(60.0)
        assert worker.poll() == -signal.SIGKILL
    finally:
        worker.close()
        for end in (ours, theirs):
            os.close(end)
        first.end()
