"""Memory that a worker process has in use, as the kernel counts it."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path
from typing import Final

from envs.executor.arena import Arena

STATUS: Final = Path("/proc/self/status")
CLEAR_REFS: Final = Path("/proc/self/clear_refs")
RESET_PEAK: Final = "5"
"""What tells the kernel to count the peak of resident memory anew, see proc(5)."""


class Resident:
    """The most that this process holds beyond its start, shared memory that it touches included.

    Beside tensors that is scratch memory of kernels and what libraries keep.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._start_bytes = _bytes("VmRSS")
        self._is_known = True

    def restart(self) -> None:
        """Give back what is not in use, and count from here on."""
        self._arena.let_go()
        with contextlib.suppress(AttributeError):  # only glibc has it
            ctypes.CDLL(None).malloc_trim(0)
        try:
            CLEAR_REFS.write_text(RESET_PEAK, encoding="ascii")
        except OSError:  # a kernel without page monitor
            self._is_known = False
        self._start_bytes = _bytes("VmRSS")

    def peak_bytes(self) -> int | None:
        """The peak since the last restart, or since the start; None if the kernel does not tell."""
        return max(_bytes("VmHWM") - self._start_bytes, 0) if self._is_known else None


def _bytes(name: str) -> int:
    lines = STATUS.read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields[name].split()[0]) * 1024
