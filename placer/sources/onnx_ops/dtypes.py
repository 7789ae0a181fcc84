"""Data types of ONNX."""

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
"""{number of the type in ONNX (TensorProto.DataType): torch dtype}."""


def dtype_of(number: int) -> torch.dtype:
    """Return the dtype with this number in ONNX.

    Raises:
        UnsupportedError: torch has no such type, or its ops do not support it.
    """
    if number not in DTYPES:
        raise UnsupportedError(f"uses the ONNX type number {number}, which cannot be placed")
    return DTYPES[number]
