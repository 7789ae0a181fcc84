"""The setting of the C library under which the unplaced model runs."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from typing import Final

import pytest

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


def test_large_tensors_are_no_longer_mapped_and_given_back_one_by_one() -> None:
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("needs glibc 2.33")
    settings = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(settings)}
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        env=plain | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    before, is_set, after = done.stdout.split()
    assert int(before) >= 64 << 20
    assert (is_set, after) == ("True", "0")
