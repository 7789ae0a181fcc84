"""The error of every source."""

from __future__ import annotations


class TargetError(ValueError):
    """The target does not exist or does not give a model."""
