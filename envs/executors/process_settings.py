"""Settings of this process that decide how fast torch computes in it: threads, and freed memory."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Final, cast

import torch

M_TRIM_THRESHOLD: Final = -1
M_TOP_PAD: Final = -2
M_MMAP_MAX: Final = -4
OMP_PAUSE_SOFT: Final = 1
KEPT_MEMORY: Final = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: -1, M_TOP_PAD: 64 << 20}
"""Values of mallopt(3): allocate nothing by mmap, never return the end of the heap."""


@cache
def keep_freed_memory() -> bool:
    """Let the C library keep freed memory until this process ends, as the workers do.

    By default glibc returns large blocks to the kernel, and every step pays page faults to get them
    again. Return whether the C library has these settings; only glibc does.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return all(mallopt(parameter, value) == 1 for parameter, value in KEPT_MEMORY.items())


def end_idle_threads() -> None:
    """End the threads of OpenMP that wait for more work of this thread; new work starts them anew.

    They wait for some milliseconds without giving up their cores, which others may need by then.
    Do nothing where the C library or its OpenMP knows no such call.
    """
    pause = _openmp_pause()
    if pause is not None:
        pause(OMP_PAUSE_SOFT)


@cache
def _openmp_pause() -> Callable[[int], int] | None:
    try:
        found = ctypes.CDLL(None).omp_pause_resource_all  # OpenMP 5.0, section 3.2.44
    except (AttributeError, OSError):
        return None
    return cast("Callable[[int], int]", found)


class OnCores:
    """Lets a thread run on these cores in this context, and torch with a thread on each.

    Threads of torch that were started before stay where they may run. Each use needs an
    object of its own. A class rather than a generator, since it is entered in each step, and those
    of small models take a millisecond.
    """

    def __init__(self, cores: Collection[int]) -> None:
        self._cores = set(cores)

    def __enter__(self) -> None:
        self._allowed, self._threads = os.sched_getaffinity(0), torch.get_num_threads()
        if self._allowed != self._cores:
            os.sched_setaffinity(0, self._cores)
        if self._threads != len(self._cores):
            torch.set_num_threads(len(self._cores))

    def __exit__(self, *_: object) -> None:
        if self._threads != torch.get_num_threads():
            torch.set_num_threads(self._threads)
        if self._allowed != self._cores:
            os.sched_setaffinity(0, self._allowed)


@contextmanager
def with_threads(count: int) -> Iterator[None]:
    """Let torch compute with ``count`` threads in this context."""
    before = torch.get_num_threads()
    if before != count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)
