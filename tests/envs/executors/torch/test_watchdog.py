"""A hanging job ends its process; a job that was only paused does not."""

from __future__ import annotations

import os
import threading

import pytest

from envs.executors.torch import watchdog
from envs.executors.torch.watchdog import STUCK, ended_after


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event that is set when the process would have ended."""
    event = threading.Event()

    def leave(status: int) -> None:
        assert status == STUCK
        event.set()

    monkeypatch.setattr(os, "_exit", leave)
    return event


def test_work_that_is_done_ends_the_watch(left: threading.Event) -> None:
    before = set(threading.enumerate())
    with ended_after(1e6, "it hangs"):
        (watch,) = set(threading.enumerate()) - before
    watch.join(timeout=60)
    assert not watch.is_alive()
    assert not left.is_set()


class Waits(threading.Event):
    """Records the requested wait times, whatever the real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_s: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.asked_s.append(timeout)
        return False


def test_time_for_which_the_process_is_stopped_counts_as_one_piece(left: threading.Event) -> None:
    waits = Waits()
    watchdog._watch(waits, 3.5, "it hangs")
    assert waits.asked_s == [1.0, 1.0, 1.0, 0.5]
    assert left.is_set()
