"""Compiled functions are cached on disk, and compiled again when what they use has changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
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


def run_caller(folder: Path, *, factor: int, shift: int) -> list[int]:
    """What the function returns for 10, and how often its code came from the cache."""
    (folder / "caller.py").write_text(CALLER)
    (folder / "callee.py").write_text(CALLEE.format(factor=factor, shift=shift))
    done = subprocess.run(
        [sys.executable, "caller.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=True,
    )
    return [int(word) for word in done.stdout.split()]


@pytest.mark.parametrize(("factor", "shift", "answer"), [(3, 0, 30), (2, 1, 21)])
def test_a_change_of_what_a_cached_function_uses_compiles_it_again(
    tmp_path: Path, factor: int, shift: int, answer: int
) -> None:
    assert run_caller(tmp_path, factor=2, shift=0) == [20, 0]
    assert run_caller(tmp_path, factor=2, shift=0) == [20, 1]
    assert run_caller(tmp_path, factor=factor, shift=shift) == [answer, 0]
