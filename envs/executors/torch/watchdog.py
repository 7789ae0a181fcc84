"""A watchdog that ends this process when work in it hangs: nothing else can end a hung torch op."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from envs.hardware.torch_devices import failures_named

STUCK: Final = 70
"""Exit status of a process ended this way: an internal error, as in sysexits.h."""
PIECE_S: Final = 1.0
PROFILED_S: Final = 600.0
"""Longer than timing one call, or one speed of a device, ever takes."""


@contextmanager
def ended_after(seconds: float, why: str) -> Iterator[None]:
    """End the process, with ``why`` on stderr, if the body takes longer than ``seconds``.

    The body must let other threads run, as waiting for a device and most torch ops do. Time during
    which the process is suspended does not count.
    """
    over = threading.Event()
    threading.Thread(target=_watch, args=(over, seconds, why), daemon=True).start()
    try:
        yield
    finally:
        over.set()


@contextmanager
def timed_within_bounds(what: str, *devices: torch.device) -> Iterator[None]:
    """End the process if timing something on devices hangs; if one of them fails, say which."""
    hung = (
        f"timing {what} on {', '.join(map(str, devices))} was not over after {PROFILED_S:g} s: an "
        "op hangs, or a device does not answer. This process ends, since nothing else ends such "
        "an op"
    )
    with ended_after(PROFILED_S, hung), failures_named(*devices):
        yield


def _watch(over: threading.Event, seconds: float, why: str) -> None:
    left_s = seconds
    while left_s > 0:
        if over.wait(min(left_s, PIECE_S)):
            return
        left_s -= PIECE_S
    print(why, file=sys.stderr, flush=True)
    os._exit(STUCK)  # raising an exception would wait for the op
