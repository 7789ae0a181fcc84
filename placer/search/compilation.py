"""Compilation of the search code, in two processes if it is not in the cache yet.

The second process compiles the functions in another order, and waits where both come to the same
one, see :mod:`envs.compiled`.
"""

from __future__ import annotations

import gc
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

from envs.compiled import is_cached, loading_stage, reporting_compilation
from envs.problem import Problem, toy_problem
from envs.simulator import simulate_batch
from envs.simulator.bounds import lower_bound_ns
from envs.simulator.max_load import max_load_ns
from placer.progress import Progress
from placer.search.annealing import step_time
from placer.search.annealing.blocks import blocks_of
from placer.search.annealing.step_time import StepTimeAnnealing
from placer.search.candidate import Kind
from placer.search.contiguous.parts import pipeline_parts
from placer.search.evaluator import Evaluator
from placer.search.list_scheduler import beam, decoder, etf
from placer.search.list_scheduler.decoder import HEFT

LARGEST: Final = (simulate_batch, step_time._anneal, decoder._decode, etf._etf)
"""Functions that take most of the compile time; if they are cached, so are mostly the others."""
COLLECTION_THRESHOLD: Final = 20_000
"""Objects to allocate between collections of garbage: compilation makes many, and keeps them."""
HELPER: Final = """
import sys
sys.path.append(sys.argv[1])
from placer.search import compilation
compilation.help_compiling()
"""

_lock = threading.Lock()
_helper: subprocess.Popen[bytes] | None = None


@cache
def load_compiled_code() -> None:
    """Compile the code of a search (once per installation), or load it from the cache."""
    with compiled_beside(), _rare_collections():
        problem = toy_problem()
        _simulated(problem)
        _scheduled(problem)


@cache
def load_compiled_beam() -> None:
    """Do the same for the code of beam searches, which only some problems need."""
    problem = toy_problem()
    start_ns = np.zeros(problem.op_count)
    with _rare_collections():
        beam.Beam(Evaluator(problem).scheduling, 1).search(start_ns, urgency=0.0, eager=True)


def is_compiled() -> bool:
    """Return whether the code of a search is in the cache."""
    return all(map(is_cached, LARGEST))


def load_compiled_code_in_a_stage(progress: Progress) -> None:
    """Load the compiled code in a stage of its own, none if it is loaded already."""
    if not load_compiled_code.cache_info().currsize:
        with compilation_stage(progress):
            load_compiled_code()


@contextmanager
def compilation_stage(progress: Progress) -> Iterator[None]:
    """Show how many functions are compiled in a block, as a stage of its own."""
    progress.stage(loading_stage(is_cached=is_compiled()))
    with reporting_compilation(
        lambda done, count: progress.advance(done / count, f"{done} of {count} functions")
    ):
        yield


@contextmanager
def compiled_beside() -> Iterator[bool]:
    """Let a helper process, if any can be started, compile as well; yield False if all is cached.

    The helper ends with the block.
    """
    global _helper  # noqa: PLW0603 - one helper at a time is enough
    if is_compiled():
        yield False
        return
    with _lock:
        started = _start_helper() if _helper is None else None
        _helper = started or _helper
    try:
        yield True
    finally:
        if started is not None:
            _helper = None
            started.kill()
            started.communicate()


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Collect garbage more rarely in a block that compiles."""
    threshold, *older = gc.get_threshold()
    gc.set_threshold(max(threshold, COLLECTION_THRESHOLD) if threshold else 0, *older)
    try:
        yield
    finally:
        gc.set_threshold(threshold, *older)


def help_compiling() -> None:
    """Compile everything, in another order, for as long as standard input is open."""

    def end_with_parent() -> None:
        sys.stdin.buffer.read()
        os._exit(0)

    threading.Thread(target=end_with_parent, daemon=True).start()
    problem = toy_problem()
    with _rare_collections():
        _scheduled(problem)
        _simulated(problem)


def _simulated(problem: Problem) -> None:
    evaluator = Evaluator(problem)
    start = np.zeros(problem.op_count, np.int32)
    first = evaluator.candidate(Kind.OTHER, start, np.zeros(problem.op_count))
    blocks = blocks_of(problem, sizes=(3,))
    StepTimeAnnealing(evaluator, first, 0, blocks=blocks).run(1, first=0, total=1)


def _scheduled(problem: Problem) -> None:
    evaluator = Evaluator(problem)
    devices, _ = decoder.decode(evaluator.scheduling, HEFT)
    etf.etf(evaluator.scheduling)
    max_load_ns(problem, devices)
    pipeline_parts(problem, problem.graph.topological)
    lower_bound_ns(problem)


def _start_helper() -> subprocess.Popen[bytes] | None:
    if len(os.sched_getaffinity(0)) < 2 or not sys.executable:
        return None
    # The helper must find this package whatever its working directory holds (hence -P). The root
    # is last on its path, so that modules beside the package shadow nothing.
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
