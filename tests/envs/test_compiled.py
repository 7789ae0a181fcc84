"""Compiled functions are cached on disk and recompiled when their dependencies change."""

from __future__ import annotations

import copy
import fcntl
import io
import os
import pickle
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from envs.compiled import (
    by_pointer,
    compiled,
    compiled_borrowing,
    compiled_inline,
    loading_stage,
    reporting_compilation,
)
from tests.helpers.folders import ROOT

CALLER = """
from envs.compiled import compiled
from callee import SHIFT, double

@compiled
def double_and_shift(x: int) -> int:
    return double(x) + SHIFT

if __name__ == "__main__":
    print(double_and_shift(10), sum(double_and_shift.stats.cache_hits.values()))
"""
CALLEE = """
from envs.compiled import compiled

SHIFT = {shift}

@compiled
def double(x: int) -> int:
    return x * {factor}
"""


def start_caller(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "caller.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(folder / "cache")},
        stdout=subprocess.PIPE,
        text=True,
    )


def run_caller(folder: Path, *, factor: int, shift: int) -> list[int]:
    """Return the function's result for 10, and how often its code came from the cache."""
    (folder / "caller.py").write_text(CALLER)
    (folder / "callee.py").write_text(CALLEE.format(factor=factor, shift=shift))
    printed, _ = start_caller(folder).communicate()
    return [int(word) for word in printed.split()]


@pytest.mark.slow
def test_a_change_of_what_a_cached_function_uses_compiles_it_again(tmp_path: Path) -> None:
    assert run_caller(tmp_path, factor=2, shift=0) == [20, 0]
    assert run_caller(tmp_path, factor=2, shift=0) == [20, 1]
    assert run_caller(tmp_path, factor=3, shift=0) == [30, 0]
    assert run_caller(tmp_path, factor=3, shift=1) == [31, 0]


@pytest.mark.slow
def test_code_whose_types_were_renamed_is_compiled_again(tmp_path: Path) -> None:
    assert run_caller(tmp_path, factor=2, shift=0) == [20, 0]
    for index in tmp_path.rglob("*.nbi"):
        stream = io.BytesIO(index.read_bytes())
        version = pickle.load(stream)
        index.write_bytes(pickle.dumps(version) + b"cenvs.gone\nTables\n.")  # refers to a type
    assert run_caller(tmp_path, factor=2, shift=0) == [20, 0]
    assert run_caller(tmp_path, factor=2, shift=0) == [20, 1]


@pytest.fixture
def nowhere_to_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no folder keep the code of functions that a test compiles."""

    def no_folder(*_: object) -> None:
        raise RuntimeError("cannot cache function: no locator available for file")

    monkeypatch.setattr("envs.compiled.functions._uncached", set())
    monkeypatch.setattr("envs.compiled.functions._SharedCache", no_folder)


@pytest.mark.usefixtures("nowhere_to_cache")
def test_code_that_no_folder_can_keep_is_said_to_be_compiled_in_every_run() -> None:
    assert loading_stage(is_cached=True) == "Loading compiled code"
    assert loading_stage(is_cached=False) == "Compiling code (once, 10 s)"
    compiled(lambda x: x)
    assert loading_stage(is_cached=True).startswith("Compiling code (10 s, in every run: ")
    assert "NUMBA_CACHE_DIR" in loading_stage(is_cached=True)


@pytest.mark.usefixtures("nowhere_to_cache")
def test_compilation_is_reported_function_by_function() -> None:
    @compiled_inline
    def double(x: int) -> int:
        return 2 * x

    @compiled
    def double_twice(x: int) -> int:
        return double(double(x))

    reported: list[tuple[int, int]] = []
    with reporting_compilation(lambda done, count: reported.append((done, count))):
        assert double_twice(3) == 12
        assert double_twice(4) == 16
    assert [done for done, _ in reported] == [1, 2]
    [count] = {count for _, count in reported}
    assert count >= 2


def is_waiting_for_a_lock(process: subprocess.Popen[str]) -> bool:
    locks = Path("/proc/locks").read_text().splitlines()
    return any("->" in line and f" {process.pid} " in line for line in locks)


@pytest.mark.slow
def test_a_function_that_another_process_compiles_is_waited_for(tmp_path: Path) -> None:
    assert run_caller(tmp_path, factor=2, shift=0) == [20, 0]
    cache, compiled = tmp_path / "cache", tmp_path / "compiled"
    shutil.copytree(cache, compiled)
    for code in cache.rglob("*.nb[ic]"):
        code.unlink()
    (lock,) = cache.rglob("*double_and_shift*.lock")
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        process = start_caller(tmp_path)
        while process.poll() is None and not is_waiting_for_a_lock(process):
            time.sleep(0.01)
        shutil.copytree(compiled, cache, dirs_exist_ok=True)
    printed, _ = process.communicate()
    assert printed.split() == ["20", "1"]


@by_pointer
class Sums(NamedTuple):
    """A table with every kind of field."""

    rows: NDArray[np.float64]  # (N, M)
    places: NDArray[np.int32]
    factor: float
    first: int
    doubles: bool


@compiled_inline
def last_of(sums: Sums, row: int) -> float:
    return float(sums.rows[row, -1])


@compiled_borrowing
def total(sums: Sums) -> float:
    result = 0.0
    for k in range(sums.first, len(sums.places)):
        result += last_of(sums, sums.places[k])
    result *= sums.factor
    return 2.0 * result if sums.doubles else result


def sums_of(rows: NDArray[np.float64]) -> Sums:
    return Sums(rows, np.array([3, 0, 1], np.int32), factor=0.5, first=1, doubles=True)


def test_compiled_functions_read_tables_and_what_is_in_their_arrays_now() -> None:
    sums = sums_of(np.arange(8.0).reshape(4, 2))
    assert total(sums) == 1.0 + 3.0
    sums.rows[1, 1] = 30.0
    assert total(sums) == 1.0 + 30.0
    assert total(sums._replace(first=2, doubles=False)) == 15.0
    copied = copy.deepcopy(sums)
    sums.rows[:] = 0.0
    assert total(copied) == 1.0 + 30.0


@pytest.mark.parametrize("rows", [np.zeros((4, 2)).T, np.broadcast_to(0.0, (4, 2))])
def test_arrays_that_compiled_functions_cannot_take_by_pointer_are_refused(
    rows: NDArray[np.float64],
) -> None:
    with pytest.raises(TypeError, match="array rows"):
        total(sums_of(rows))


def test_an_inline_function_refuses_to_be_called_from_python() -> None:
    sums = sums_of(np.zeros((4, 2)))
    for _ in range(2):  # before and after compiled functions have used it
        with pytest.raises(TypeError, match="last_of can only"):
            last_of(sums, 0)
        total(sums)
