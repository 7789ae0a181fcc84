"""Ends this process when work within it hangs: nothing else ends an op of torch that does."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

STUCK: Final = 70
"""Exit status of a process that was ended so: an internal error, as in sysexits.h."""
PIECE_S: Final = 1.0
PROFILED_S: Final = 600.0
"""More than timing one call, or one speed of a device, ever takes."""


@contextmanager
def ended_after(seconds: float, why: str) -> Iterator[None]:
    """End the process, saying why on stderr, should what is within take longer.

    It must let other threads run meanwhile, as waiting for a device and most ops of torch do. Time
    for which the process is stopped does not count.
    """
    over = threading.Event()
    threading.Thread(target=_watch, args=(over, seconds, why), daemon=True).start()
    try:
        yield
    finally:
        over.set()


@contextmanager
def timed_within_bounds(what: str, device: object) -> Iterator[None]:
    """End the process should timing something on a device not come to an end."""
    with ended_after(
        PROFILED_S,
        f"timing {what} on {device} was not over after {PROFILED_S:g} s: an op hangs, or the "
        "device does not answer. This process ends, since nothing else ends such an op",
    ):
        yield


def _watch(over: threading.Event, seconds: float, why: str) -> None:
    left_s = seconds
    while left_s > 0:
        if over.wait(min(left_s, PIECE_S)):
            return
        left_s -= PIECE_S
    print(why, file=sys.stderr, flush=True)
    os._exit(STUCK)  # an exception would wait for the op
