"""Where parameters and buffers live: each on one device, at home with the call that reads it first.

They stay the objects that they are wherever torch allows it, so that optimizers, hooks and ties
hold; gradients move along.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from graphs.extract import Step
from graphs.extract.forward import ForwardProgram
from graphs.extract.step import LOSS


class Homes:
    """The state of a step that a forward program reads, in the order of its sources.

    With ``keep_copies`` a tensor that moves on stays where it was, too, and is not sent there
    again as long as its value is the same. What the program itself writes is always sent. Writes
    through ``tensor.data`` are not seen. ``moved_bytes`` counts what was sent so far.
    """

    def __init__(self, step: Step, program: ForwardProgram, *, keep_copies: bool) -> None:
        slots = _slots(step)
        self._sources = [s for s in program.sources if s.role in ("parameter", "buffer")]
        self._slots = [slots[source.name] for source in self._sources]
        written = frozenset().union(*(call.writes for call in program.calls))
        self._may_stay = [
            keep_copies and program.storage_of[source.value] not in written
            for source in self._sources
        ]
        self._kept: list[dict[torch.device, torch.Tensor]] = [{} for _ in self._sources]
        self._known: list[tuple[torch.Tensor, int] | None] = [None] * len(self._sources)
        self._homes: list[torch.device | None] = [None] * len(self._sources)
        self.moved_bytes = 0

    def place(self, homes: Mapping[int, torch.device]) -> None:
        """Set the home of every state, by value, and move it; one without stays where it is."""
        before = self._homes
        self._homes = [homes.get(source.value) for source in self._sources]
        try:
            self.tensors()
        except BaseException:
            self._homes = before
            raise

    def tensors(self) -> list[torch.Tensor]:
        """All states at home; what was moved elsewhere is moved back.

        Raises:
            ValueError: names of one tensor have been given several.
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
        if known is None or known[0] is not tensor or known[1] != tensor._version:
            kept.clear()  # it has another value now
        kept[tensor.device] = tensor.detach()
        if home not in kept:
            kept[home] = tensor.detach().to(home)
            self.moved_bytes += tensor.nbytes
        tensor = with_data(tensor, kept[home], self._slots[index])
        self._known[index] = tensor, tensor._version
        if not self._may_stay[index]:
            kept.clear()
        return tensor


@torch.no_grad()
def with_data(
    tensor: torch.Tensor, data: torch.Tensor, slots: Sequence[tuple[dict[str, Any], str]]
) -> torch.Tensor:
    """Let a parameter or buffer have its data on another device, and its gradient there, too.

    Where torch does not allow that, a new tensor takes its slots. Returns the one that has them.
    """
    gradient, tensor.grad = tensor.grad, None
    if torch._has_compatible_shallow_copy_type(tensor, data):
        tensor.data = data
    else:
        tensor = nn.Parameter(data, tensor.requires_grad) if _is_parameter(tensor) else data
        for holder, name in slots:
            holder[name] = tensor
    if gradient is not None:
        tensor.grad = gradient.to(data.device)
    return tensor


def _slots(step: Step) -> dict[str, list[tuple[dict[str, Any], str]]]:
    """Where modules hold each parameter and buffer, by every name that it has."""
    roots = {"": step.model}
    if step.training and isinstance(step.loss, nn.Module):
        roots[f"{LOSS}."] = step.loss
    by_tensor: defaultdict[int, list[tuple[dict[str, Any], str]]] = defaultdict(list)
    found: dict[str, list[tuple[dict[str, Any], str]]] = {}
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
