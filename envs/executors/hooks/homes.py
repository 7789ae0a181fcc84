"""Home devices of parameters and buffers whose modules have a device each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from envs.executors.torch.homes import with_data
from graphs.extract import Workload
from graphs.extract.calls import module_paths


@dataclass(slots=True, eq=False)
class _State:
    """A parameter or buffer and the modules that have it; it lives with the first of them."""

    name: str
    is_buffer: bool
    home: torch.device
    slots: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    owners: list[nn.Module] = field(default_factory=list)


class ModuleHomes:
    """The state of a step, each tensor on the device of its module; tied ones with the first.

    Raises:
        ValueError: a parameter or buffer is on the meta device.
    """

    def __init__(self, step: Workload) -> None:
        self._states = _states(step)
        self._recurrent = [m for m in module_paths(step) if isinstance(m, nn.RNNBase)]
        self._first_homes = [state.home for state in self._states]

    def place(self, devices: Mapping[nn.Module, torch.device]) -> None:
        """Move all state to the devices of its modules.

        Raises:
            ValueError: modules on several devices share a buffer.
            torch.OutOfMemoryError: a device has no room; then all homes stay as they were.
        """
        for state in self._states:
            used = {devices[owner] for owner in state.owners}
            if state.is_buffer and len(used) > 1:
                raise ValueError(
                    f"the modules that share buffer {state.name} are on "
                    f"{', '.join(sorted(map(str, used)))}; give them one device"
                )
        self._move([devices[state.owners[0]] for state in self._states])

    def restore(self) -> None:
        """Move all state back to its first devices."""
        self._move(self._first_homes)

    def settle(self) -> None:
        """Move state home that was moved elsewhere.

        Raises:
            ValueError: modules that shared a parameter or buffer no longer do.
        """
        moved = False
        for state in self._states:
            holder, name = state.slots[0]
            tensor: torch.Tensor | None = holder[name]
            if any(other[own] is not tensor for other, own in state.slots[1:]):
                raise ValueError(
                    f"{state.name} is tied no longer: extract and place the model again"
                )
            if tensor is not None and tensor.device != state.home:
                _send(state, tensor)
                moved = True
        if moved:
            self._renew_lists()

    def _move(self, homes: list[torch.device]) -> None:
        before = [state.home for state in self._states]
        self._set(homes)
        try:
            self.settle()
            self._renew_lists()
        except BaseException:
            self._set(before)
            raise

    def _renew_lists(self) -> None:
        """Renew the lists of weights that torch passes to kernels of recurrent layers."""
        for module in self._recurrent:
            module._init_flat_weights()

    def _set(self, homes: list[torch.device]) -> None:
        for state, home in zip(self._states, homes, strict=True):
            state.home = home


@torch.no_grad()
def _send(state: _State, tensor: torch.Tensor) -> None:
    gradient, tensor.grad = tensor.grad, None
    tensor = with_data(state.slots, tensor, tensor.detach().to(state.home))
    if gradient is not None:
        tensor.grad = gradient.to(state.home)


def _states(step: Workload) -> list[_State]:
    found: dict[int, _State] = {}
    for module, path in module_paths(step).items():
        for holder in (module._parameters, module._buffers):
            for name, tensor in holder.items():
                if tensor is None:
                    continue
                full = f"{path}.{name}" if path else name
                if tensor.is_meta:
                    raise ValueError(
                        f"{full} is on the meta device: give the model memory to run it"
                    )
                is_buffer = holder is module._buffers
                state = found.setdefault(id(tensor), _State(full, is_buffer, tensor.device))
                state.slots.append((holder, name))
                state.owners.append(module)
    return list(found.values())
