"""Ctrl-C and SIGTERM as a request: searches stop at the next look, and what was found is kept."""

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
    """Use as a context manager around the main job.

    While a stage polls (``with interrupt.polled()``), the first Ctrl-C only sets ``requested``, a
    second one raises; elsewhere KeyboardInterrupt is raised at once, as usual. In threads other
    than the main one, where Python handles no signals, nothing changes. SIGTERM, which batch
    systems send, counts as Ctrl-C.
    """

    def __init__(self) -> None:
        self.requested = False
        self._polled = False
        self._before: dict[signal.Signals, _Handler] = {}

    def __enter__(self) -> Interrupt:
        """Take over SIGINT and SIGTERM."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        """Give them back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def asked(self) -> bool:
        """Whether somebody asked to stop."""
        return self.requested

    @contextlib.contextmanager
    def polled(self) -> Iterator[None]:
        """A stage that looks at :meth:`asked` itself, several times a second."""
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
    """Let Ctrl-C end this process at once while it imports modules; for the command line alone.

    Libraries catch what is raised within their imports, and go on half imported.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it is not ignored
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
    """A moment in which Ctrl-C does nothing, for writing what took long to find.

    In threads other than the main one, where Python handles no signals, nothing changes.
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
