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


@contextmanager
def ended_after(seconds: float, why: str) -> Iterator[None]:
    """End the process, saying why on stderr, should what is within take longer.

    It must let other threads run meanwhile, as waiting for a device and most ops of torch do.
    """
    timer = threading.Timer(seconds, _end, [why])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end(why: str) -> None:
    print(why, file=sys.stderr, flush=True)
    os._exit(STUCK)  # an exception would wait for the op
