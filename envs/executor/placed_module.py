"""A placed model in one process: its calls on torch devices, the backward pass by autograd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Final

import torch
from torch import nn
from torch.utils._pytree import tree_map

from envs.executor.forward_source import ForwardWriter
from envs.executor.homes import Homes, first_readers
from envs.executor.launch import LaunchOrder
from envs.executor.state import matched_leaves
from graphs.extract import Extraction
from graphs.extract.export import Position

SHARED: Final = (
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""What a placed module has in common with its model: state and modules under the same names."""


class PlacedModule(nn.Module):
    """Runs what was extracted on the torch devices of a placement.

    Called with the inputs of the step, it returns what the model returns, for a training step the
    loss, which is ready for ``backward()``. Inputs may be on any device; one in pinned memory is
    sent without waiting, so leave it as it is until the step is over.

    Parameters and buffers are those of the model, under the same names: train it with any torch
    optimizer, clip gradients, save its ``state_dict``. Each is moved to the device where it is
    first read, and moved back there by the next call if it was moved elsewhere. State of an
    optimizer does not follow: make it after placing, or let it load its own ``state_dict()``.

    Every kind of device draws random numbers of its own: what a model drops out depends on the
    placement. Train and eval mode are part of the step, so switching is refused. Shapes of the
    inputs are those of the example.
    """

    def __init__(
        self,
        extraction: Extraction,
        devices: Mapping[str, torch.device | str],
        order: Sequence[str] = (),
        *,
        keep_copies: bool = False,
    ) -> None:
        """Move the state and write the forward pass.

        Args:
            extraction: the step that was placed; its model must not be on the meta device.
            devices: device of every call, by key (:meth:`CallGraph.devices_of_calls`).
            order: keys of calls, the first to be launched first; see :meth:`place`.
            keep_copies: leave copies of parameters where they were, so that placing them there
                again sends nothing; for searches, as long as there is memory.

        Raises:
            ValueError: as :meth:`place`; or a parameter is on the meta device.
        """
        super().__init__()
        step = extraction.step
        for name, tensor in step.named_state().items():
            if tensor.is_meta:
                raise ValueError(f"{name} is on the meta device: give the model memory to run it")
        vars(self).update({name: vars(step.model)[name] for name in SHARED})
        self.training = step.training
        self._step = step
        self._outputs = extraction.outputs
        self._program = extraction.forward
        self._writer = ForwardWriter(self._program)
        self._launch = LaunchOrder(self._program)
        self._readers = first_readers(self._program)
        self._homes = Homes(step, self._program, keep_copies=keep_copies)
        self._constants: dict[torch.device, list[torch.Tensor]] = {}
        self.place(devices, order)

    def place(self, devices: Mapping[str, torch.device | str], order: Sequence[str] = ()) -> None:
        """Place it anew.

        Calls are launched in the given order as far as their inputs allow, others after them.
        Without an order, work for accelerators is launched before the CPU starts on its own.

        Raises:
            ValueError: a call has no device, a key is unknown, a device cannot be used, or calls
                that write one tensor are on several devices. The old placement stays.
            torch.OutOfMemoryError: a device has no room for its parameters. The old placement
                stays; its parameters are moved back by the next call.
        """
        placed = _checked(self._launch.number, devices)
        if unknown := [key for key in order if key not in placed]:
            raise ValueError(f"the order names {unknown[0]!r}, which is no call that has a device")
        for keys in self._program.together():
            if len(used := {placed[key] for key in keys}) > 1:
                raise ValueError(
                    f"{', '.join(keys[:4])} write or view one tensor, but are on "
                    f"{', '.join(sorted(map(str, used)))}; give them one device"
                )
        homes = {value: placed[key] for value, key in self._readers.items()}
        source = self._writer.source(self._launch.of(placed, order), placed, homes)
        run = source.compiled()
        for device in set(placed.values()) - self._constants.keys():
            held = [s.tensor for s in self._program.sources if s.tensor is not None]
            self._constants[device] = [tensor.to(device) for tensor in held]
        self._homes.place(homes)
        self._source, self._run = source, run

    @property
    def source(self) -> str:
        """The forward pass as Python: every line a call with its key, a transfer or an end."""
        return self._source.text

    @property
    def transfers(self) -> int:
        """How many tensors a forward pass sends between devices, inputs left out."""
        return self._source.transfers

    @property
    def moved_bytes(self) -> int:
        """Bytes of parameters and buffers that were sent between devices so far."""
        return self._homes.moved_bytes

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Run the step's forward pass.

        Raises:
            ValueError: the inputs do not fit the example inputs.
            Exception: as torch raises it, with a note that names the call.
        """
        leaves = matched_leaves(self._step, inputs, keywords)
        with nullcontext() if self._step.training else torch.no_grad():
            states = self._homes.tensors()
            try:
                results = self._run(states, leaves, self._constants)
            except Exception as error:
                error.add_note(f"in the placed forward pass: {self._source.line_of(error)}")
                raise
        return tree_map(
            lambda leaf: results[leaf.number] if isinstance(leaf, Position) else leaf,
            self._outputs,
        )

    def train(self, mode: bool = True) -> PlacedModule:
        """Nothing to do in the mode of the step.

        Raises:
            RuntimeError: the step was extracted in the other mode.
        """
        if mode is not self._step.training:
            now, other = ("training", "eval") if self._step.training else ("eval", "training")
            raise RuntimeError(
                f"a step in {now} mode was placed, and the mode is part of it; extract and place "
                f"one in {other} mode of the same model: both share its parameters"
            )
        return self


def _checked(
    calls: Mapping[str, int], devices: Mapping[str, torch.device | str]
) -> dict[str, torch.device]:
    """The device of every call, with its index."""
    if missing := [key for key in calls if key not in devices]:
        raise ValueError(f"{len(missing)} calls have no device, such as {missing[0]!r}")
    if unknown := [key for key in devices if key not in calls]:
        raise ValueError(f"{unknown[0]!r} has a device, but is no call that can be placed")
    full = {device: _full(device) for device in set(devices.values())}
    return {key: full[devices[key]] for key in calls}


def _full(device: torch.device | str) -> torch.device:
    """A device as its tensors name it: cuda is cuda:0, cpu:0 is cpu."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {device} cannot be used: {reason}") from error
