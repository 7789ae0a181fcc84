"""Types of tensors by the numbers that ONNX gives them."""

from __future__ import annotations

from typing import Final

import torch

from placer.sources.onnx_ops.rule import UnsupportedError

DTYPES: Final = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    5: torch.int16,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    11: torch.float64,
    16: torch.bfloat16,
}
"""Numbers that ONNX gives its types (TensorProto.DataType)."""


def dtype_of(number: int) -> torch.dtype:
    """The type that ONNX numbers so.

    Raises:
        UnsupportedError: torch has none, or none that its ops take.
    """
    if number not in DTYPES:
        raise UnsupportedError(f"uses the ONNX type number {number}, which cannot be placed")
    return DTYPES[number]
