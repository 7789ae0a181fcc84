"""Errors and warnings about devices; this module does not import torch."""

from __future__ import annotations

from typing import Final

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


class UnavailableError(ValueError):
    """This machine lacks a device that was named, or memory that was asked of it."""


class DeviceWarning(UserWarning):
    """A device of this machine cannot be used, and is left out."""
