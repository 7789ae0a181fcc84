"""Kinds of targets by their names, and the error of all sources."""

from __future__ import annotations

from pathlib import Path
from typing import Final

PREFIX: Final = "hf:"
"""Prefix of models of Hugging Face's transformers."""


class TargetError(ValueError):
    """The target does not exist or does not define a model."""

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message)
        self.remedy = remedy


def is_huggingface(target: str) -> bool:
    """Return whether a target is a model of transformers."""
    return target.startswith(PREFIX)


def is_exported(target: str) -> bool:
    """Return whether a target is a file of torch.export."""
    return target.endswith(".pt2")


def is_onnx(target: str) -> bool:
    """Return whether a target is an ONNX file."""
    return target.partition("?")[0].endswith(".onnx")


def is_graph_file(target: str) -> bool:
    """Return whether a target is a graph file: .json without ``hf:``."""
    return target.endswith(".json") and not is_huggingface(target)


def file_named(target: str) -> Path | None:
    """Return the file that a target is, whatever its name contains; None for other kinds."""
    if is_huggingface(target):
        return None
    if is_onnx(target):
        return Path(target.partition("?")[0])
    return Path(target) if is_exported(target) or is_graph_file(target) else None
