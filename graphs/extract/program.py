"""A step as a list of torch calls that any device can replay: the program of an extracted graph.

A program is plain data (names, numbers, dtypes), so that it can be sent to another process. Views
belong to no op (``op == VIEW``): they are made wherever they are read, and only the tensors under
the views are sent between devices. Views that show a part of a computed tensor, though, are ops on
the tensor's device, so that only the part is sent.
"""

from __future__ import annotations

import copyreg
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import torch
from torch.utils._pytree import tree_leaves

VIEW: Final = -1
Role: TypeAlias = Literal[
    "parameter",
    "buffer",
    "constant",
    "input",
    "tangent",
    "optimizer",  # optimizer state of a parameter
    "step_count",  # the number of the parameter's update, from 1
    "learning_rate",
]
ResultRole: TypeAlias = Literal["output", "gradient", "state"]


def _memory_format(name: str) -> torch.memory_format:
    found: torch.memory_format = getattr(torch, name)
    return found


# By itself pickle names the first module that has imported torch, which may be the user's.
copyreg.pickle(
    torch.memory_format, lambda each: (_memory_format, (str(each).removeprefix("torch."),))
)


@dataclass(frozen=True, slots=True)
class Ref:
    """Placeholder for a tensor in the arguments of a call: ``program.values[value]``."""

    value: int


def values_in(tree: Any) -> tuple[int, ...]:
    """Return the values that nested arguments refer to, each once."""
    return tuple(dict.fromkeys(x.value for x in tree_leaves(tree) if isinstance(x, Ref)))


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the step; ``root`` is the value whose storage it shares, itself if no view."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    root: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def span(self) -> int:
        """Elements from the first to the last in storage, gaps included."""
        if not self.numel:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))

    @property
    def overlaps(self) -> bool:
        """Return whether elements may share memory, as those of an expanded tensor do."""
        inner = 0  # the last element of all dimensions with smaller strides
        for stride, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size > 1:
                if stride <= inner:
                    return True
                inner += (size - 1) * stride
        return False

    @property
    def is_dense(self) -> bool:
        """Return whether its elements fill their memory, in whatever order."""
        return self.span == self.numel and not self.overlaps

    def is_laid_out_as(self, other: Value) -> bool:
        """Return whether two tensors of one shape have their elements in the same memory order."""
        strides = zip(self.shape, self.stride, other.stride, strict=True)
        return all(stride == others for size, stride, others in strides if size > 1)

    @property
    def size_bytes(self) -> int:
        """Bytes without gaps and repetitions."""
        return min(self.span, self.numel) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a torch operator, ``target`` such as "aten.convolution.default".

    ``outputs`` gives the value of each result: of the one tensor that is returned (``tuple_result``
    False) or of the members of the tuple, None for a member nobody reads.
    """

    op: int  # index of the graph's op, or VIEW
    target: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[int | None, ...]
    tuple_result: bool
    reads: tuple[int, ...]  # values among the arguments, each once
    shows_part: bool = False  # an op that is a view of a part of the first value it reads
    writes: tuple[int, ...] = ()  # values read that change in place (optimizers only)

    @property
    def made(self) -> tuple[int, ...]:
        """Values of the results that something reads."""
        return tuple(value for value in self.outputs if value is not None)


@dataclass(frozen=True, slots=True)
class Source:
    """A value that exists before the step starts."""

    value: int
    role: Role
    name: str  # of a parameter, buffer, constant or state of a parameter; position of an input
    tensor: torch.Tensor | None = None  # of a constant


@dataclass(frozen=True, slots=True)
class Result:
    """A value that the step returns: an output, a gradient, the new value of mutated state."""

    value: int
    role: ResultRole
    name: str  # parameter or buffer name; position of an output


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProgram:
    """Calls in an order that can be run, with the inputs and outputs of the step.

    In a ``training`` step output 0 is the loss, and ``gradients`` says which value is the gradient
    of which parameter. These are results too, unless the step has an optimizer, which consumes
    them. A call that writes in place runs after all others that read what it writes.
    """

    values: tuple[Value, ...]
    calls: tuple[Call, ...]
    sources: tuple[Source, ...]
    results: tuple[Result, ...]
    op_count: int
    training: bool
    ties: Mapping[str, str] = field(default_factory=dict)  # {further name: first name} of a tensor
    gradients: Mapping[str, int] = field(default_factory=dict)  # {parameter: value}

    @property
    def op_calls(self) -> Iterator[Call]:
        """Yield the calls that belong to ops, all but those of whole views."""
        return (call for call in self.calls if call.op != VIEW)

    def producers(self) -> dict[int, int]:
        """Return {value: index of the call that makes it}, without sources."""
        return {value: index for index, call in enumerate(self.calls) for value in call.made}

    def makers(self) -> dict[int, int]:
        """Return {value: op that makes it}, without sources; a root is never made by a view."""
        return {value: call.op for call in self.calls for value in call.made}

    def roots(self, values: Iterable[int]) -> tuple[int, ...]:
        """Return the tensors under values, each once."""
        return tuple(dict.fromkeys(self.values[value].root for value in values))

    def whole_results(self) -> dict[int, int]:
        """Return {index of a result: tensor under it} of results that are all of a computed tensor.

        The tensor is written only by the op that makes it. Of several results with one tensor only
        the first counts, so that each has memory of its own.
        """
        computed = {value for call in self.calls for value in call.made}
        free = computed.difference(*(self.roots(call.writes) for call in self.calls))
        whole: dict[int, int] = {}
        for index, result in enumerate(self.results):
            shown = self.values[result.value]
            root = self.values[shown.root]
            same = shown.is_dense and root.is_dense and shown.numel == root.numel
            plain = shown.dtype == root.dtype and not shown.dtype.is_complex
            if shown.root in free and same and plain:
                free.remove(shown.root)
                whole[index] = shown.root
        return whole

    def first_name(self, name: str) -> str:
        """Return the first of the names that a parameter or buffer has."""
        return self.ties.get(name, name)

    def updates(self) -> dict[int, str]:
        """Return {op that writes in place: name of the parameter that it updates}."""
        names = {s.value: s.name for s in self.sources if s.role == "parameter"}
        names |= {r.value: r.name for r in self.results if r.role == "state"}
        return {call.op: names[call.writes[0]] for call in self.calls if call.writes}

    def overwritten(self) -> dict[int, set[int]]:
        """Return {op that writes in place: all other ops that read what it writes, or make it}."""
        first: dict[str, int] = {}
        same = {  # the first of tied names stands for all
            s.value: first.setdefault(self.first_name(s.name), s.value)
            for s in self.sources
            if s.role == "parameter"
        }

        def tensors(values: Iterable[int]) -> list[int]:
            return [same.get(root, root) for root in self.roots(values)]

        users: defaultdict[int, set[int]] = defaultdict(set)
        for call in self.op_calls:
            for tensor in tensors((*call.reads, *call.made)):
                users[tensor].add(call.op)
        return {
            call.op: set().union(*(users[tensor] for tensor in tensors(call.writes))) - {call.op}
            for call in self.calls
            if call.writes
        }
