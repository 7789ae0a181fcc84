"""What is said of placements that cannot be exported as they are asked for."""

from __future__ import annotations


class ExportError(ValueError):
    """A placement that a format cannot express; the message says what is in the way."""


class RenamingError(ExportError):
    """Devices are named wrongly, or not at all; the message says how to."""
