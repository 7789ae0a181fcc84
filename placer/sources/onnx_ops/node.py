"""Nodes of ONNX files, and their tensors, data types and attributes in torch and Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

Function: TypeAlias = Callable[..., Any]
"""Takes the inputs of its node, None for omitted ones; returns a tensor or one for each output."""
Rule: TypeAlias = Callable[["Node"], Function]
"""Converts a node to a function of tensors."""

BFLOAT16: Final = 16
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
    BFLOAT16: torch.bfloat16,
}
"""{number of the type in ONNX (TensorProto.DataType): torch dtype}."""


class UnsupportedError(ValueError):
    """A node requires something without a counterpart here; the message says what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of an ONNX file with its known inputs.

    ``known`` holds the value of every input that does not depend on the data, and None for others.
    Inputs that a rule reads become part of the function it returns, which gets None for them.
    """

    op: str
    opset: int
    attributes: Mapping[str, Any]
    shapes: tuple[torch.Size | None, ...]  # of the inputs, None for omitted ones
    dtypes: tuple[torch.dtype | None, ...]
    known: tuple[torch.Tensor | None, ...]
    output_count: int
    read: set[int] = field(default_factory=set)  # inputs whose known value was read

    def has(self, position: int) -> bool:
        """Return whether an input is given."""
        return position < len(self.shapes) and self.shapes[position] is not None

    def shape(self, position: int) -> torch.Size:
        """Return the shape of an input."""
        shape = self.shapes[position] if self.has(position) else None
        if shape is None:
            raise UnsupportedError(f"lacks its input {position}")
        return shape

    def rank(self, position: int = 0) -> int:
        """Return the number of dimensions of an input."""
        return len(self.shape(position))

    def value(self, position: int) -> torch.Tensor | None:
        """Return the known value of an input, or None if it is omitted."""
        if not self.has(position):
            return None
        value = self.known[position]
        if value is None:
            raise UnsupportedError(
                f"has an input {position} that depends on the data, but decides sizes; only what "
                "follows from the shapes of the model's inputs can be placed"
            )
        self.read.add(position)
        return value

    def ints(self, position: int) -> list[int] | None:
        """Return a known input as integers, or None if it is omitted."""
        value = self.value(position)
        return None if value is None else [int(item) for item in value.reshape(-1).tolist()]

    def number(self, position: int, default: float) -> float:
        """Return a known input of one element as a number."""
        value = self.value(position)
        return default if value is None or value.numel() == 0 else value.item()

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute."""
        return self.attributes.get(name, default)

    def attribute_or_input(self, name: str, position: int) -> list[int] | None:
        """Return integers that are an attribute in old opsets, and an input in new ones."""
        attribute = self.get(name)
        return list(attribute) if attribute is not None else self.ints(position)

    def refuse_unless(self, holds: bool, what: str) -> None:
        """Raise an UnsupportedError about the node unless ``holds``."""
        if not holds:
            raise UnsupportedError(what)


def dtype_of(number: int) -> torch.dtype:
    """Return the dtype with this number in ONNX."""
    if number not in DTYPES:
        raise UnsupportedError(f"uses the ONNX type number {number}, which cannot be placed")
    return DTYPES[number]


def tensor_of(proto: Any) -> Tensor:
    """Return a copy of the tensor in a TensorProto."""
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

    def converted(value: Any) -> Any:
        match value:
            case bytes():
                return value.decode()
            case TensorProto():
                return tensor_of(value)
            case list():
                return tuple(map(converted, value))
        return value

    return {one.name: converted(helper.get_attribute_value(one)) for one in node.attribute}
