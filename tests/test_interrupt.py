"""Ctrl-C while results are written."""

from __future__ import annotations

import signal
import threading

import pytest

from placer.interrupt import uninterrupted


def test_ctrl_c_does_nothing_while_results_are_written() -> None:
    before = signal.getsignal(signal.SIGINT)
    with uninterrupted():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_an_error_gives_ctrl_c_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(OSError, match="full"), uninterrupted():
        raise OSError("full")
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_write_too() -> None:
    written: list[int] = []

    def write() -> None:
        with uninterrupted():
            written.append(1)

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert written == [1]
