"""Compiles what searches run, by two processes where it is not on disk yet.

The second process compiles other functions first, and waits where both come to the same one, see
:mod:`envs.compiled`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np

from envs.bounds import lower_bound_ns
from envs.compiled import is_cached
from envs.max_load import max_load_ns
from envs.problem import Problem
from envs.simulator import simulate_batch
from envs.toy_problem import toy_problem
from placer.search import annealing, decoder, etf
from placer.search.annealing import Annealing
from placer.search.decoder import HEFT
from placer.search.judge import Judge

LARGEST: Final = (simulate_batch, annealing._anneal, decoder._decode, etf._etf)
"""Functions that take most of the time; where they are on disk, so are mostly the others."""
HELPER: Final = """
import sys
sys.path.append(sys.argv[1])
from placer.search import compiling
compiling.help_compiling()
"""

_lock = threading.Lock()
_helper: subprocess.Popen[bytes] | None = None


@cache
def load_compiled_code() -> None:
    """Compile what a search runs, once for each installation, or load it from the cache."""
    with compiled_beside():
        problem = toy_problem()
        _simulated(problem)
        _scheduled(problem)


@contextmanager
def compiled_beside() -> Iterator[bool]:
    """Let another process compile what a search runs; False where there is nothing to compile.

    The process ends with the block. Where there is none, for want of cores or memory, it takes
    :func:`load_compiled_code` longer.
    """
    global _helper  # noqa: PLW0603 - one helper at a time is enough
    if all(map(is_cached, LARGEST)):
        yield False
        return
    with _lock:
        mine = _started() if _helper is None else None
        _helper = mine or _helper
    try:
        yield True
    finally:
        if mine is not None:
            _helper = None
            mine.kill()
            mine.communicate()


def help_compiling() -> None:
    """Compile everything, for as long as standard input is open."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    problem = toy_problem()
    _scheduled(problem)
    _simulated(problem)


def _simulated(problem: Problem) -> None:
    judge = Judge(problem)
    start = np.zeros(problem.op_count, np.int32)
    first = judge.candidate("first", start, np.zeros(problem.op_count))
    Annealing(judge, first, 0).run(1, first=0, stride=1, total=1)


def _scheduled(problem: Problem) -> None:
    judge = Judge(problem)
    devices, _ = decoder.decode(judge.outline, HEFT)
    etf.etf(judge.outline)
    max_load_ns(problem, devices)
    lower_bound_ns(problem)


def _started() -> subprocess.Popen[bytes] | None:
    """Another process that compiles, None where it would not help or cannot be had."""
    if len(os.sched_getaffinity(0)) < 2 or not sys.executable:
        return None
    # It must find this package, whatever lies in its working directory (hence -P); last on the
    # path, where what lies beside the package hides nothing.
    root = str(Path(__file__).resolve().parents[2])
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", HELPER, root],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C is for the parent
        )
    except OSError:
        return None


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)
