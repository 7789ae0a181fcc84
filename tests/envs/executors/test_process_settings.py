"""The settings of a process: memory of the C library, and threads of OpenMP."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from typing import Final

import pytest
import torch

from envs.executors.process_settings import OnCores
from tests.helpers.folders import ROOT

PROBE: Final = """
import ctypes
import torch
from envs.executors.process_settings import keep_freed_memory

torch.set_num_threads(1)

class Heap(ctypes.Structure):  # struct mallinfo2
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
        "fordblks", "keepcost")]

mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Heap

def mapped_bytes():
    before = mallinfo2().hblkhd
    tensor = torch.empty(64 << 20, dtype=torch.uint8)
    return mallinfo2().hblkhd - before

before = mapped_bytes()
print(before, keep_freed_memory(), mapped_bytes())
"""


THREADS: Final = """
import os
import time
import torch
from envs.executors.process_settings import end_idle_threads

def threads():
    return len(os.listdir("/proc/self/task"))

def work():
    torch.set_num_threads(3)
    torch.ones(1 << 20).add_(1)

work()
working, limit_s = threads(), time.monotonic() + 60
end_idle_threads()
while threads() > working - 2 and time.monotonic() < limit_s:
    time.sleep(0.001)
idle = threads()
work()
print(working, idle, threads())
"""


@pytest.mark.slow
def test_large_tensors_are_no_longer_mapped_and_given_back_one_by_one() -> None:
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("needs glibc 2.33")
    before, is_set, after = printed(PROBE)
    assert int(before) >= 64 << 20
    assert (is_set, after) == ("True", "0")


@pytest.mark.slow
def test_threads_that_wait_for_work_end_and_start_again() -> None:
    if not hasattr(ctypes.CDLL(None), "omp_pause_resource_all"):
        pytest.skip("needs OpenMP 5.0")
    working, idle, again = map(int, printed(THREADS))
    assert (idle, again) == (working - 2, working)


def test_cores_and_threads_are_what_they_were_after_a_failure() -> None:
    allowed, threads = os.sched_getaffinity(0), torch.get_num_threads()
    core = max(allowed)
    with contextlib.suppress(ZeroDivisionError), OnCores({core}):
        assert (os.sched_getaffinity(0), torch.get_num_threads()) == ({core}, 1)
        raise ZeroDivisionError
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == (allowed, threads)


def test_cores_that_are_not_there_change_nothing() -> None:
    allowed, threads = os.sched_getaffinity(0), torch.get_num_threads()
    with pytest.raises(OSError, match="Invalid argument"), OnCores({max(allowed) + 4096}):
        pass
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == (allowed, threads)


def printed(program: str) -> list[str]:
    """Return the words that a program prints in a process of its own."""
    settings = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD", "OMP_", "GOMP_")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(settings)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=plain | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    return done.stdout.split()
