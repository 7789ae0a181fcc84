"""Work that hangs ends its process; work that was only stopped does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from envs.watchdog import STUCK

WORK = """
import sys, time
from envs.watchdog import ended_after

with ended_after(float(sys.argv[1]), "it hangs"):
    print("begun", flush=True)
    time.sleep(float(sys.argv[2]))
print("done")
"""


def working(limit_s: float, work_s: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WORK, str(limit_s), str(work_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )


@pytest.mark.parametrize(
    ("limit_s", "work_s", "expected"),
    [(0.5, 60.0, (STUCK, "begun\n", "it hangs\n")), (60.0, 0.5, (0, "begun\ndone\n", ""))],
)
def test_only_what_takes_too_long_ends_the_process(
    limit_s: float, work_s: float, expected: tuple[int, str, str]
) -> None:
    with working(limit_s, work_s) as process:
        said, errors = process.communicate(timeout=50)
    assert (process.returncode, said, errors) == expected


@pytest.mark.slow
def test_time_for_which_the_process_is_stopped_does_not_count() -> None:
    with working(4.0, 1.0) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(5.0)
        process.send_signal(signal.SIGCONT)
        said, errors = process.communicate(timeout=50)
    assert (process.returncode, said, errors) == (0, "done\n", "")
