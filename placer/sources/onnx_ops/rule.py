"""The contract of a rule: from a node of an ONNX file to a function of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch

Function: TypeAlias = Callable[..., Any]
"""Takes the inputs of its node, None for those left out; gives a tensor or one for each output."""
Rule: TypeAlias = Callable[["Node"], Function]

RULES: Final[dict[str, Rule]] = {}
"""{ONNX operator: what makes its function}."""


class UnsupportedError(ValueError):
    """A node asks for something that has no counterpart here; says what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of an ONNX file, and what is known of its inputs before anything runs.

    ``known`` holds the value of every input that does not depend on the data, None elsewhere.
    Those that a rule reads go into the function it makes, and are not among its arguments.
    """

    op: str
    opset: int
    attributes: Mapping[str, Any]
    shapes: tuple[torch.Size | None, ...]  # of the inputs, None for those left out
    dtypes: tuple[torch.dtype | None, ...]
    known: tuple[torch.Tensor | None, ...]
    output_count: int
    read: set[int] = field(default_factory=set)  # inputs whose known value was asked for

    def has(self, position: int) -> bool:
        """Whether an input is given."""
        return position < len(self.shapes) and self.shapes[position] is not None

    def shape(self, position: int) -> torch.Size:
        """Sizes of an input."""
        shape = self.shapes[position] if self.has(position) else None
        if shape is None:
            raise UnsupportedError(f"lacks its input {position}")
        return shape

    def rank(self, position: int = 0) -> int:
        """Number of dimensions of an input."""
        return len(self.shape(position))

    def value(self, position: int) -> torch.Tensor | None:
        """The known value of an input, None if it is left out.

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
        """A known input as whole numbers, None if it is left out."""
        value = self.value(position)
        return None if value is None else [int(item) for item in value.reshape(-1).tolist()]

    def number(self, position: int, default: float) -> float:
        """A known input of one element as a number."""
        value = self.value(position)
        return default if value is None or value.numel() == 0 else value.item()

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute."""
        return self.attributes.get(name, default)

    def attribute_or_input(self, name: str, position: int) -> list[int] | None:
        """Whole numbers that old opsets have as an attribute, new ones as an input."""
        given = self.get(name)
        return list(given) if given is not None else self.ints(position)

    def refuse_unless(self, holds: bool, what: str) -> None:
        """Refuse the node for something it asks for.

        Raises:
            UnsupportedError: ``holds`` is false.
        """
        if not holds:
            raise UnsupportedError(what)


def rule(*ops: str) -> Callable[[Rule], Rule]:
    """Register what makes the functions of these operators."""

    def register(make: Rule) -> Rule:
        RULES.update(dict.fromkeys(ops, make))
        return make

    return register
