"""Detection of the source of a target by its name."""

from __future__ import annotations

from typing import Final

PREFIX: Final = "hf:"
"""Prefix of models of Hugging Face's transformers."""
EXPORTED_SUFFIX: Final = ".pt2"
ONNX_SUFFIX: Final = ".onnx"


def is_huggingface(target: str) -> bool:
    """Return whether a target is a model of transformers."""
    return target.startswith(PREFIX)


def is_exported(target: str) -> bool:
    """Return whether a target is a file of torch.export."""
    return target.endswith(EXPORTED_SUFFIX)


def is_onnx(target: str) -> bool:
    """Return whether a target is an ONNX file."""
    return target.partition("?")[0].endswith(ONNX_SUFFIX)
