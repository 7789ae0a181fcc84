"""Home devices of parameters and buffers: each lives with the call that reads it first.

They stay the same objects wherever torch allows it, so that optimizers, hooks and ties remain
valid; gradients move along.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from graphs.extract import Workload
from graphs.extract.export.forward import ForwardProgram
from graphs.workload import LOSS


class Homes:
    """The state of a step that a forward program reads, in the order of its sources.

    With ``keep_copies`` a tensor that moves also stays where it was, and is not sent there again as
    long as its value is the same. State that the program itself writes is always sent, and so is
    state that has a gradient or got one: writes of fused optimizers are not detected. Neither are
    writes through ``tensor.data``. ``moved_bytes`` counts the bytes sent so far.
    """

    def __init__(self, step: Workload, program: ForwardProgram, *, keep_copies: bool) -> None:
        slots = _slots(step)
        self._sources = [s for s in program.sources if s.role in ("parameter", "buffer")]
        self._slots = [slots[source.name] for source in self._sources]
        written = frozenset().union(*(call.writes for call in program.calls))
        self._may_stay = [
            keep_copies and program.storage_of[source.value] not in written
            for source in self._sources
        ]
        self._kept: list[dict[torch.device, torch.Tensor]] = [{} for _ in self._sources]
        self._known: list[_Known | None] = [None] * len(self._sources)
        self._homes: list[torch.device | None] = [None] * len(self._sources)
        self.moved_bytes = 0

    def place(self, homes: Mapping[int, torch.device]) -> None:
        """Set the home of every state, by value, and move it; a state without one stays put."""
        before = self._homes
        self._homes = [homes.get(source.value) for source in self._sources]
        try:
            self.tensors()
        except BaseException:
            self._homes = before
            raise

    def tensors(self) -> list[torch.Tensor]:
        """Return all states at home; those that were moved elsewhere are moved back.

        Raises:
            ValueError: names that were tied now refer to several tensors.
        """
        found = []
        for i, (slots, home) in enumerate(zip(self._slots, self._homes, strict=True)):
            holder, name = slots[0]
            tensor: torch.Tensor = holder[name]
            if any(other[own] is not tensor for other, own in slots[1:]):
                name = self._sources[i].name
                raise ValueError(f"{name} is tied no longer: extract and place the model again")
            if home is not None and tensor.device != home:
                tensor = self._move(i, tensor, home)
            found.append(tensor)
        return found

    @torch.no_grad()
    def _move(self, index: int, tensor: torch.Tensor, home: torch.device) -> torch.Tensor:
        kept, known = self._kept[index], self._known[index]
        if not _same(known, tensor):
            kept.clear()  # its value has changed
        kept[tensor.device] = tensor.detach()
        if home not in kept:
            kept[home] = tensor.detach().to(home)
            self.moved_bytes += tensor.nbytes
        gradient, tensor.grad = tensor.grad, None
        tensor = with_data(self._slots[index], tensor, kept[home])
        if gradient is not None:
            tensor.grad = gradient.to(home)
        if gradient is not None or not self._may_stay[index]:
            kept.clear()
        elif tensor.requires_grad and not (known and known[0]() is tensor and known[2]):
            self._watch(index, tensor)
        self._known[index] = weakref.ref(tensor), tensor._version, tensor.requires_grad
        return tensor

    def _watch(self, index: int, tensor: torch.Tensor) -> None:
        """Drop the copies of a tensor once it gets a gradient."""
        own = weakref.ref(self)  # the model's hook must not keep the copies alive

        def arrived(_: torch.Tensor) -> None:
            homes = own()
            if homes is not None:
                homes._kept[index].clear()

        # torch leaves this call untyped.
        tensor.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]


def put_back(step: Workload, values: Mapping[str, torch.Tensor]) -> None:
    """Set parameters and buffers that are elsewhere to these values, by name; drop all gradients.

    Nothing is copied: a tensor that was elsewhere takes over the memory of its value.
    """
    for name, slots in _slots(step).items():
        holder, own = slots[0]
        tensor: torch.Tensor = holder[own]
        tensor.grad = None
        if tensor.device != values[name].device:
            with_data(slots, tensor, values[name])


_Slots: TypeAlias = list[tuple[dict[str, Any], str]]
_Known: TypeAlias = tuple["weakref.ref[torch.Tensor]", int, bool]


def _same(known: _Known | None, tensor: torch.Tensor) -> bool:
    """Return whether it is the known tensor, with no change of value or requires_grad seen."""
    if known is None or known[0]() is not tensor:
        return False
    return known[1:] == (tensor._version, tensor.requires_grad)


def with_data(slots: _Slots, tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Return the tensor with other data, as the same object if torch allows it."""
    if torch._has_compatible_shallow_copy_type(tensor, data):
        tensor.data = data
        return tensor
    tensor = nn.Parameter(data, tensor.requires_grad) if _is_parameter(tensor) else data
    for holder, name in slots:
        holder[name] = tensor
    return tensor


def _slots(step: Workload) -> dict[str, _Slots]:
    """Return where modules hold each parameter and buffer, by every name of its tensor."""
    roots = {"": step.model}
    if step.training and isinstance(step.loss, nn.Module):
        roots[f"{LOSS}."] = step.loss
    by_tensor: defaultdict[int, _Slots] = defaultdict(list)
    found: dict[str, _Slots] = {}
    for root, model in roots.items():
        for path, module in model.named_modules(remove_duplicate=False):
            for holder in (module._parameters, module._buffers):
                for name, tensor in holder.items():
                    if tensor is not None:
                        slots = by_tensor[id(tensor)]
                        slots.append((holder, name))
                        found[f"{root}{path}.{name}" if path else f"{root}{name}"] = slots
    return found


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)
