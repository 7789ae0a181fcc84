"""The error of every source, and silence about what is told by it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class TargetError(ValueError):
    """The target does not exist or does not give a model."""


@contextmanager
def quiet() -> Iterator[None]:
    """Without the tracebacks that torch logs of what it refuses; its reason is told."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
