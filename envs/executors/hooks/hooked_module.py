"""A placed model that runs its own code in one process: hooks put its modules on torch devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from envs.executors.hooks.module_hooks import ModuleDevice, ModuleHooks
from envs.executors.modes import Modes
from envs.executors.state_devices import State, StateDevices, renew_recurrent, states_of
from envs.executors.torch.placed_module import SHARED, full_device
from graphs.extract import Extraction
from graphs.extract.autocast import autocast
from graphs.extract.module_calls import and_outer, module_paths
from graphs.text import suggestion
from graphs.workload import check_inputs, training_loss


class HookedModule(nn.Module):
    """Runs a model unchanged, each of its modules on the torch device of a placement.

    For models that cannot be exported: their control flow may depend on the data, and inputs may
    have other shapes than the example. Called with the inputs of the step, it returns what the
    model returns; for a training step that is the loss, ready for ``backward()``.

    Hooks send the inputs of a module to its device, and its outputs to the device of the module
    that called it, where the code between two calls runs. Other tensors that this code combines,
    such as attributes, are sent there, too. So the result is that of the model for every placement;
    only the number of transfers depends on it.

    Parameters and buffers are those of the model, under the same names: train it with any torch
    optimizer, made after placing. They live with their module, tied ones with the first that has
    them; the next call moves them back there if they were moved elsewhere. The hooks are on the
    model itself until :meth:`close`, so direct calls of the model run placed, too.

    ``eval()`` of a training step makes it return what the model returns in eval mode, without
    gradients; a target may be given or left out. ``train()`` switches back. Every kind of device
    has its own random numbers, so dropout depends on the placement. A model that writes its own
    backward pass, or computes outside of torch, must support any device.
    """

    def __init__(
        self,
        extraction: Extraction,
        devices: Mapping[str, torch.device | str],
        order: Sequence[str] = (),
    ) -> None:
        """Move the state and register the hooks.

        Args:
            extraction: the step that was placed; its model must not be on the meta device.
            devices: {path of a module: device}, see :meth:`place`.
            order: unused: the model's own code decides the order.

        Raises:
            ValueError: as for :meth:`place`; or a parameter or buffer is on the meta device.
        """
        super().__init__()
        step = extraction.step
        vars(self).update({name: vars(step.model)[name] for name in SHARED})
        self._step = step
        self._paths = module_paths(step)
        self._states = list(dict.fromkeys(states_of(step).values()))
        self._first_devices = [state.tensor.device for state in self._states]
        self._state_devices = StateDevices(self._states)
        self._hooks: ModuleHooks | None = None
        self.training = step.training
        if step.model.training is not step.training:
            step.model.train(step.training)
        self._modes = Modes(step)
        self.place(devices, order)

    def place(self, devices: Mapping[str, torch.device | str], order: Sequence[str] = ()) -> None:
        """Apply another placement.

        A module that is not named is on the device of the nearest one around it; "" stands for the
        model and the code that calls it, the loss.

        Raises:
            ValueError: there is no such module, a device cannot be used, or modules that share
                a buffer are on several devices. The old placement stays.
            torch.OutOfMemoryError: a device has no room for its parameters. The old placement
                stays; the next call moves its parameters back.
        """
        del order
        placed = self._checked(devices)
        on = {module: _device_of(module, path, placed) for module, path in self._paths.items()}
        self._state_devices.place([_home(state, on) for state in self._states])
        renew_recurrent(self._paths)
        outside = ModuleDevice(placed.get("", next(iter(placed.values()))), gathers="" in placed)
        if self._hooks is None:
            self._hooks = ModuleHooks(on, outside)
        else:
            self._hooks.devices, self._hooks.outside = on, outside
        self._types = sorted({device.type for device in placed.values()})

    def close(self) -> None:
        """Remove the hooks and move parameters and buffers back to their first devices."""
        if self._hooks is not None:
            self._hooks.close()
            self._hooks = None
            self._state_devices.place(self._first_devices)
            renew_recurrent(self._paths)

    def __enter__(self) -> HookedModule:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Run the step's forward pass.

        Raises:
            RuntimeError: the placed model is closed.
            Exception: as the model raises it.
        """
        if self._hooks is None:
            raise RuntimeError("this placed model is closed: apply the placement again")
        if self._state_devices.were_elsewhere():
            renew_recurrent(self._paths)
        training = self._step.training and self.training
        positional, named = self._step.bound(inputs, keywords, training=training)
        check_inputs(positional, named)
        self._modes.check()
        step = self._step
        with autocast(step.dtype, self._types), self._hooks.outside_modules():
            if training:
                return training_loss(step.model, step.loss, positional, named)
            # Under inference mode, tensors would have no version counters.
            with torch.inference_mode(False), torch.no_grad():
                return step.model(*positional, **named)

    def step(self, *batch: Any, **keywords: Any) -> Any:
        """Run one step on a batch as a data loader gives it.

        A training step returns the loss (detached) and adds to the parameters' gradients; an
        inference step returns what the model returns.

        Raises:
            RuntimeError: the placed model is closed.
            Exception: as the model raises it.
        """
        positional, named = self._step.unpacked(batch, keywords)
        output = self(*positional, **named)
        if not (self._step.training and self.training):
            return output
        loss: torch.Tensor = output
        torch.autograd.backward(loss)
        return loss.detach()

    def train(self, mode: bool = True) -> HookedModule:
        """Set the mode. Modules that were in eval mode within a training step return to it."""
        if mode is not self.training or self._modes.are_switched():
            self._modes.switch(training=mode)
            self.training = mode
        return self

    def _checked(self, devices: Mapping[str, torch.device | str]) -> dict[str, torch.device]:
        if not devices:
            raise ValueError("no module has a device; give '' one, which stands for the model")
        known = set(self._paths.values())
        for path in devices:
            if path not in known:
                raise ValueError(
                    f"{path!r} has a device, but {type(self._step.model).__name__} has no such "
                    f"module{suggestion(path, known)}"
                )
        full = {device: full_device(device) for device in set(devices.values())}
        return {path: full[device] for path, device in devices.items()}


def _device_of(module: nn.Module, path: str, placed: Mapping[str, torch.device]) -> ModuleDevice:
    """Return the device of a module: its own, or that of the nearest one around it."""
    around = (placed[outer] for outer in and_outer(path) if outer in placed)
    device = next(around, next(iter(placed.values())))
    is_leaf = next(module.children(), None) is None
    has_state = next(module.parameters(recurse=False), None) is not None
    return ModuleDevice(device, gathers=path in placed or is_leaf or has_state)


def _home(state: State, on: Mapping[nn.Module, ModuleDevice]) -> torch.device:
    """Return the device of the first module that has a parameter or buffer."""
    used = {on[module].device for module in state.modules}
    if state.is_buffer and len(used) > 1:
        raise ValueError(
            f"the modules that share buffer {state.name} are on "
            f"{', '.join(sorted(map(str, used)))}; give them one device"
        )
    return on[state.modules[0]].device
