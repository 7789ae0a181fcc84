"""Devices of parameters and buffers, each of which has a home where its readers are.

They stay the same objects wherever torch allows it, so that optimizers, hooks and ties remain
valid; gradients move along.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from graphs.extract import Workload
from graphs.workload import LOSS

STATE_ROLES: Final = ("parameter", "buffer")
"""Roles of the sources of a program that are states."""


@dataclass(slots=True, eq=False)
class State:
    """A parameter or buffer by its first name: the modules that have it, and where."""

    name: str
    is_buffer: bool
    modules: list[nn.Module] = field(default_factory=list)
    slots: list[tuple[dict[str, Any], str]] = field(default_factory=list)

    @property
    def tensor(self) -> Any:
        """The tensor that its first module has; None if the model removed it."""
        holder, name = self.slots[0]
        return holder.get(name)

    def set_data(self, tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        """Give its tensor other data; return it, the same object if torch allows that."""
        if torch._has_compatible_shallow_copy_type(tensor, data):
            tensor.data = data
            return tensor
        is_parameter = isinstance(tensor, nn.Parameter)
        tensor = nn.Parameter(data, tensor.requires_grad) if is_parameter else data
        for holder, name in self.slots:
            holder[name] = tensor
        return tensor


def states_of(step: Workload) -> dict[str, State]:
    """Return the parameters and buffers of a step, by every name of each."""
    roots = {"": step.model}
    if step.training and isinstance(step.loss, nn.Module):
        roots[f"{LOSS}."] = step.loss
    by_tensor: dict[int, State] = {}
    states: dict[str, State] = {}
    for root, model in roots.items():
        for path, module in model.named_modules(remove_duplicate=False):
            for holder in (module._parameters, module._buffers):
                for name, tensor in holder.items():
                    if tensor is None:
                        continue
                    full = f"{root}{path}.{name}" if path else f"{root}{name}"
                    if tensor.is_meta:
                        raise ValueError(
                            f"{full} is on the meta device: give the model memory to run it"
                        )
                    new = State(full, is_buffer=holder is module._buffers)
                    state = states[full] = by_tensor.setdefault(id(tensor), new)
                    state.modules.append(module)
                    state.slots.append((holder, name))
    return states


def put_back(step: Workload, values: Mapping[str, torch.Tensor]) -> None:
    """Set parameters and buffers that are elsewhere to these values, by name; drop all gradients.

    Nothing is copied: a tensor that was elsewhere takes over the memory of its value.
    """
    for name, state in states_of(step).items():
        tensor: torch.Tensor = state.tensor
        tensor.grad = None
        if tensor.device != values[name].device:
            state.set_data(tensor, values[name])


def renew_recurrent(modules: Iterable[nn.Module]) -> None:
    """Flatten weights of recurrent layers: kernels of CUDA want them in one piece of memory."""
    for module in dict.fromkeys(modules):
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()


class StateDevices:
    """Keeps states on their home devices; ``moved_bytes`` counts the bytes sent so far."""

    def __init__(self, states: Sequence[State]) -> None:
        self._states = states
        self._homes: Sequence[torch.device | None] = [None] * len(states)
        self.moved_bytes = 0

    def place(self, homes: Sequence[torch.device | None]) -> None:
        """Set the home of every state, and move it there; a state without one stays put.

        If a device has no room, all homes stay as they were.
        """
        before = self._homes
        self._homes = homes
        try:
            self.tensors()
        except BaseException:
            self._homes = before
            raise

    def tensors(self) -> list[torch.Tensor]:
        """Return all states at home; those that were moved elsewhere are moved back."""
        tensors = []
        for state, home in zip(self._states, self._homes, strict=True):
            tensor = state.tensor
            if any(holder.get(name) is not tensor for holder, name in state.slots[1:]):
                raise ValueError(
                    f"{state.name} is tied no longer: extract and place the model again"
                )
            if tensor is not None and home is not None and tensor.device != home:
                tensor = self._move(state, tensor, home)
            tensors.append(tensor)
        return tensors

    def were_elsewhere(self) -> bool:
        """Move states home that were moved elsewhere; return whether there were any."""
        moved_bytes = self.moved_bytes
        self.tensors()
        return self.moved_bytes > moved_bytes

    @torch.no_grad()
    def _move(self, state: State, tensor: torch.Tensor, home: torch.device) -> torch.Tensor:
        self.moved_bytes += tensor.nbytes
        gradient, tensor.grad = tensor.grad, None
        tensor = state.set_data(tensor, tensor.detach().to(home))
        if gradient is not None:
            tensor.grad = gradient.to(home)
        return tensor
