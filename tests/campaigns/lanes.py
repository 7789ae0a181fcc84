"""Processes that work on a campaign in parallel and end with it, even if it is killed."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Final

LANES: Final = 2
PR_SET_PDEATHSIG: Final = 1


def lanes(prepare: Callable[[], object] = int) -> ProcessPoolExecutor:
    """Return a pool of forked processes; each runs ``prepare`` first."""
    fork = multiprocessing.get_context("fork")
    return ProcessPoolExecutor(LANES, fork, initializer=_begin, initargs=(os.getpid(), prepare))


def forked(work: Callable[[], object]) -> int:
    """Fork a child that runs ``work`` and return its id; it exits with 70 unless ``work`` exits."""
    parent = os.getpid()
    if pid := os.fork():
        return pid
    try:
        _end_with_parent(parent)
        work()
    except BaseException:  # noqa: BLE001 - it must not go on as its parent would
        traceback.print_exc()
    finally:
        os._exit(70)


def _end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, even if it has ended already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(70)


def _begin(parent: int, prepare: Callable[[], object]) -> None:
    _end_with_parent(parent)
    prepare()
