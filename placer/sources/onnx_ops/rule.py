"""The contract of a rule, which converts a node of an ONNX file to a function of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch

Function: TypeAlias = Callable[..., Any]
"""Takes the inputs of its node, None for omitted ones; returns a tensor or one for each output."""
Rule: TypeAlias = Callable[["Node"], Function]

RULES: Final[dict[str, Rule]] = {}
"""{ONNX operator: rule}."""


class UnsupportedError(ValueError):
    """A node requires something without a counterpart here; the message says what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of an ONNX file with its known inputs.

    ``known`` holds the value of every input that does not depend on the data, and None for others.
    Inputs that a rule reads become part of the function it returns, and are not among its
    arguments.
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
        """Return the known value of an input, or None if it is omitted.

        Raises:
            UnsupportedError: it depends on the data.
        """
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
        given = self.get(name)
        return list(given) if given is not None else self.ints(position)

    def refuse_unless(self, holds: bool, what: str) -> None:
        """Raise an error about the node unless ``holds``.

        Raises:
            UnsupportedError: ``holds`` is false.
        """
        if not holds:
            raise UnsupportedError(what)


def rule(*ops: str) -> Callable[[Rule], Rule]:
    """Register a rule for these operators."""

    def register(make: Rule) -> Rule:
        RULES.update(dict.fromkeys(ops, make))
        return make

    return register
