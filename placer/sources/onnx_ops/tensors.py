"""Tensors, data types and attributes of ONNX files, converted to torch and Python."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

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


BFLOAT16: Final = 16


def tensor_of(proto: Any) -> Tensor:
    """Return a copy of the tensor in a TensorProto.

    Raises:
        UnsupportedError: torch has no such type.
        ValueError: its data do not match its shape.
    """
    from onnx import numpy_helper

    dtype = dtype_of(proto.data_type)
    array = np.array(numpy_helper.to_array(proto))
    if proto.data_type == BFLOAT16:
        return torch.from_numpy(array.view(np.uint16)).view(dtype)
    return torch.from_numpy(array)


def bytes_of(proto: Any) -> int:
    """Return the size of a TensorProto in memory."""
    count: int = math.prod(proto.dims)
    return count * dtype_of(proto.data_type).itemsize


def attributes_of(node: Any) -> dict[str, Any]:
    """Return {name: value} with strings as str, lists as tuples, tensors as torch tensors."""
    from onnx import TensorProto, helper

    found: dict[str, Any] = {}
    for attribute in node.attribute:
        value = helper.get_attribute_value(attribute)
        match value:
            case bytes():
                found[attribute.name] = value.decode()
            case TensorProto():
                found[attribute.name] = tensor_of(value)
            case list():
                parts = (part.decode() if isinstance(part, bytes) else part for part in value)
                found[attribute.name] = tuple(parts)
            case _:
                found[attribute.name] = value
    return found
