"""Ctrl-C and SIGTERM as stop requests: a search stops at its next check and keeps its results."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final, TypeAlias

_Handler: TypeAlias = Callable[[int, FrameType | None], Any] | int | None
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
NOTHING_KEPT: Final = "placer: stopped before there was anything to keep"
EXIT_CODE: Final = 1
SHOW_CURSOR: Final = "\x1b[?25h"


class Interrupt:
    """Context manager around a job that turns Ctrl-C into a stop request.

    Inside ``with interrupt.polled()`` the first Ctrl-C only sets ``requested`` and a second one
    raises; elsewhere KeyboardInterrupt is raised at once, as usual. SIGTERM, which batch systems
    send, counts as Ctrl-C. Outside the main thread, where Python handles no signals, this does
    nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._polled = False
        self._before: dict[signal.Signals, _Handler] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def asked(self) -> bool:
        """Return whether a stop was requested."""
        return self.requested

    @contextlib.contextmanager
    def polled(self) -> Iterator[None]:
        """Mark a stage that calls :meth:`asked` itself, several times a second."""
        self._polled = True
        try:
            yield
        finally:
            self._polled = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again, self.requested = self.requested, True
        if not again and self._polled:
            return
        before = self._before.get(signal.SIGINT)
        if callable(before):
            before(number, frame)
        raise KeyboardInterrupt


def leave_imports_at_once() -> None:
    """Make Ctrl-C exit the process at once during imports; only for the command line.

    Libraries catch exceptions raised during their imports and continue half imported.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # SIGINT is not ignored
        signal.signal(signal.SIGINT, _leave_imports)


def _leave_imports(_number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            cursor = SHOW_CURSOR if sys.stderr.isatty() else ""
            os.write(sys.stderr.fileno(), f"{cursor}{NOTHING_KEPT}\n".encode())
            os._exit(EXIT_CODE)
        frame = frame.f_back
    raise KeyboardInterrupt


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C and SIGTERM in a block, for writing results that took long to compute.

    Outside the main thread, where Python handles no signals, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
