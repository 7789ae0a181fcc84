"""The error of all sources, and suppression of torch's log for it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class TargetError(ValueError):
    """The target does not exist or does not define a model."""


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the tracebacks that torch logs when it refuses a model; the error has the reason."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
