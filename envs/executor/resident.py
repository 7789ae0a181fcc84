"""Resident memory of a worker process, as the kernel counts it."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path
from typing import Final

from envs.executor.arena import Arena

STATUS: Final = Path("/proc/self/status")
CLEAR_REFS: Final = Path("/proc/self/clear_refs")
RESET_PEAK: Final = "5"
"""Makes the kernel reset the peak of resident memory, see proc(5)."""


class Resident:
    """Peak memory of this process beyond its start, including shared memory that it touches.

    Besides tensors that includes workspaces of kernels and what libraries keep.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._start_bytes = _bytes("VmRSS")
        self._is_known = True

    def restart(self) -> None:
        """Release unused memory, and count from here on."""
        self._arena.let_go()
        with contextlib.suppress(AttributeError):  # only glibc has it
            ctypes.CDLL(None).malloc_trim(0)
        try:
            CLEAR_REFS.write_text(RESET_PEAK, encoding="ascii")
        except OSError:  # a kernel without page monitor
            self._is_known = False
        self._start_bytes = _bytes("VmRSS")

    def peak_bytes(self) -> int | None:
        """Return the peak since the last restart or the start; None if it could not be reset."""
        return max(_bytes("VmHWM") - self._start_bytes, 0) if self._is_known else None


def _bytes(name: str) -> int:
    lines = STATUS.read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields[name].split()[0]) * 1024
