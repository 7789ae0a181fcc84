"""Constants of a traced program, and the memory that they and the model's state lie in.

Constants are what a program holds besides parameters, buffers and tensors of the inputs: neither
the program nor its readers see a change of them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from graphs.arguments import contexts_by_name, leaves_by_path
from graphs.extract.errors import short_reason
from graphs.extract.module_calls import module_paths
from graphs.inputs import PLAIN, snapshot, tensors_within
from graphs.workload import ExtractionError, Workload

OF_MODULES: Final = frozenset(vars(nn.Module()))
Slot = tuple[str, dict[str, Any], str, list[torch.Tensor]]
"""Path of an attribute, the dict that it is in, its name there, and the tensors that it holds."""


def tensor_attributes(paths: Mapping[nn.Module, str]) -> list[Slot]:
    """Return the attributes of modules that hold tensors, but are no parameters or buffers."""
    return [
        (f"{path}.{name}" if path else name, vars(module), name, tensors)
        for module, path in paths.items()
        for name, value in vars(module).items()
        if name not in OF_MODULES and (tensors := [*tensors_within(value, nn.Module)])
    ]


def replaced(slots: Iterable[Slot]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor that is no longer in its attribute, with the path of that."""
    for path, owner, name, tensors in slots:
        now = owner.get(name)
        if now is not tensors[0] or len(tensors) > 1:
            kept = {id(tensor) for tensor in tensors_within(now, nn.Module)}
            yield from ((path, tensor) for tensor in tensors if id(tensor) not in kept)


def check_not_replaced(
    gone: Iterable[tuple[str, torch.Tensor]], is_read: Callable[[torch.Tensor], bool]
) -> None:
    """Raise if the tensor of an attribute was read, as a constant of a trace, and replaced."""
    for path, tensor in gone:
        if is_read(tensor):
            raise ExtractionError(
                f"the model assigns {path}, which it reads and which is neither a parameter "
                "nor a buffer; make it one with register_buffer"
            )


class Constants:
    """Constants of a traced program: objects among the inputs, and tensors.

    Made before the trace; ``hold`` adds the tensors of the program.
    """

    def __init__(self, step: Workload) -> None:
        """Remember the objects among the inputs of a step.

        Raises:
            ExtractionError: whether one changes cannot be seen.
        """
        self._model = type(step.model).__name__
        self._paths = module_paths(step)
        self._objects = [
            (path, leaf, _snapshot(path, leaf))
            for path, leaf in leaves_by_path(step.step_inputs, step.keywords).items()
            if type(leaf) not in PLAIN and not isinstance(leaf, torch.Tensor)
        ]
        self._inputs = step.step_inputs, step.keywords
        self._contexts = contexts_by_name(*self._inputs)
        self._tensors: list[tuple[torch.Tensor, int]] = []
        self._attributes: list[Slot] = []

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Remember the tensors of the traced program, and the attributes that they are in.

        Raises:
            ExtractionError: the trace has changed an object.
        """
        for what in self._changed_objects():
            raise ExtractionError(
                f"the model changes {what}, which a placed step would not; return what it computes"
            )
        held = [tensor for tensor in tensors if has_memory(tensor)]
        self._tensors = [(tensor, version_of(tensor)) for tensor in held]
        self._attributes = [
            slot
            for slot in tensor_attributes(self._paths)
            if any(is_part_of(held, tensor) for tensor in slot[3])
        ]

    def check(self) -> None:
        """Check that all is as it was when the step was extracted.

        Raises:
            ValueError: an object or a tensor has changed.
        """
        for what in self._changed_objects():
            raise ValueError(
                f"{what}, has changed since the step was extracted, and is a constant of the "
                "placed step: only tensors may change from batch to batch; place the model again"
            )
        for path, _ in replaced(self._attributes):
            raise ValueError(self._changed(path))
        for tensor, version in self._tensors:
            if version_of(tensor) != version:
                paths = (slot[0] for slot in self._attributes if is_part_of(slot[3], tensor))
                raise ValueError(self._changed(next(paths, "a tensor outside of the modules")))

    def _changed_objects(self) -> Iterator[str]:
        for path, leaf, before in self._objects:
            if _snapshot(path, leaf) != before:
                yield f"input {path}, a {type(leaf).__name__}"
        if self._contexts and (now := contexts_by_name(*self._inputs)) != self._contexts:
            name = next(name for name in now if now[name] != self._contexts.get(name))
            yield f"input [{name!r}], in more than its tensors"

    def _changed(self, what: str) -> str:
        return (
            f"{what} of {self._model} has changed since the step was extracted, and is a constant "
            "of the placed step: it is neither a parameter nor a buffer; make it one with "
            "register_buffer, or place the model again"
        )


def check_dense(step: Workload) -> None:
    """Raise ExtractionError if state or an input is sparse, or in the format of a library."""
    inputs = leaves_by_path(step.step_inputs, step.keywords).items()
    for what, leaf in (*step.named_state().items(), *((f"input {path}", x) for path, x in inputs)):
        if isinstance(leaf, torch.Tensor) and leaf.layout != torch.strided:
            raise ExtractionError(
                f"{what} has the layout {leaf.layout}, and ops are placed with dense tensors"
            )


def check_apart(step: Workload, constants: Iterable[torch.Tensor], changed: Container[str]) -> None:
    """Check that no tensor which a step changes or trains overlaps another one in memory.

    Args:
        step: the step.
        constants: tensors that the program holds.
        changed: names of parameters and buffers that the step itself changes.

    Raises:
        ExtractionError: it shares elements with another parameter or buffer, or a constant.
    """
    named = [*step.named_state().items(), *(("", tensor) for tensor in constants)]
    found = [(_span(tensor), name, tensor) for name, tensor in named if _is_in_memory(tensor)]
    found.sort(key=lambda each: each[0].start)
    around: list[tuple[range, str, torch.Tensor]] = []
    for span, name, tensor in found:
        around = [each for each in around if each[0].stop > span.start]
        for _, other, one in around:
            written = [
                which
                for which, of in ((name, tensor), (other, one))
                if which in changed or (which and step.training and of.requires_grad)
            ]
            if written and one is not tensor and _share_an_element(one, tensor):
                if not (name and other):
                    raise ExtractionError(read_elsewhere(written[0]))
                raise ExtractionError(
                    f"{name} and {other} overlap in memory, and a placed step would update them "
                    "separately; make them one tensor, or give each its own"
                )
        around.append((span, name, tensor))


def read_elsewhere(name: str) -> str:
    """Return why a step cannot be traced that reads a parameter or buffer apart from its module."""
    return (
        f"{name} is also read as a tensor of its own, from a list, a closure or an attribute, "
        "which a placed step would not see change; read it from its module"
    )


def _is_in_memory(tensor: torch.Tensor) -> bool:
    return (
        has_memory(tensor)
        and tensor.layout == torch.strided
        and tensor.numel() > 0
        and not is_traceable_wrapper_subclass(tensor)
    )


def _share_an_element(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors whose spans overlap have an element in common."""
    spans = _span(one), _span(other)
    begin = min(span.start for span in spans)
    offsets = [span.start - begin for span in spans]
    size = one.itemsize
    if other.itemsize != size or any(offset % size for offset in offsets):
        return True
    marked = torch.zeros((max(span.stop for span in spans) - begin) // size, dtype=torch.bool)
    first, second = (
        marked.as_strided(tensor.shape, tensor.stride(), offset // size)
        for tensor, offset in zip((one, other), offsets, strict=True)
    )
    first.fill_(1)
    return bool(second.any())


def _span(tensor: torch.Tensor) -> range:
    """Return the addresses from the first to the last element."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in pairs)
    return range(tensor.data_ptr(), tensor.data_ptr() + extent * tensor.itemsize)


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has values; fake ones and those on the meta device have none."""
    return not isinstance(tensor, FakeTensor) and not tensor.is_meta


def version_of(tensor: torch.Tensor) -> int:
    """Return the number of writes into a tensor, 0 if it does not count them."""
    return 0 if tensor.is_inference() else tensor._version


def is_part_of(tensors: Iterable[torch.Tensor], one: torch.Tensor) -> bool:
    """Return whether a tensor begins where one of others does."""
    return has_memory(one) and any(
        has_memory(tensor) and tensor.data_ptr() == one.data_ptr() for tensor in tensors
    )


def _snapshot(path: str, value: Any) -> Any:
    try:
        return snapshot(value)
    except Exception as error:
        raise ExtractionError(
            f"input {path} is a {type(value).__name__}, which would be a constant of the placed "
            f"step, but whether it changes cannot be seen ({short_reason(error)}); make it in the "
            "model's forward, or give the numbers and tensors that it stands for"
        ) from error
