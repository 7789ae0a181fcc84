"""Errors of exports."""

from __future__ import annotations


class ExportError(ValueError):
    """The format cannot express the placement; the message says what prevents it."""


class RenamingError(ExportError):
    """Device names are invalid or missing; the message says how to give them."""
