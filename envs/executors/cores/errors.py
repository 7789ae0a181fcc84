"""Errors of a pool of workers, apart from the pool: catching them needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class WorkerError(RuntimeError):
    """A worker died, hung or could not run an op, which the message names. The pool is closed."""


class WorkerMemoryError(WorkerError):
    """An op of a worker ran out of memory."""


def once_more(work: Callable[[], Result]) -> Result:
    """Call ``work`` and retry once after a WorkerError: something may have killed a worker."""
    try:
        return work()
    except WorkerError:
        return work()
