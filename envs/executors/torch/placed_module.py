"""A placed model in one process: calls run on torch devices, the backward pass by autograd.

It also runs in the other mode: the same model for validation between epochs of training, or back.
That is another program with its own calls. Each goes where the same call of the placed step is, or
where most calls of its module are.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn
from torch.utils._pytree import tree_map

from envs.executors.checks import Composition, checked_rate, matched_leaves
from envs.executors.state_devices import STATE_ROLES, StateDevices, states_of
from envs.executors.torch.call_text import CallText
from envs.executors.torch.forward_source import LaunchOrder, forward_source
from envs.executors.torch.updates import Updates
from envs.hardware.torch_devices import DeviceError, cuda_devices, is_of_cuda
from graphs.extract import Extraction, extract
from graphs.extract.autocast import autocasting
from graphs.extract.export.forward import ForwardProgram
from graphs.extract.export.trace import Position
from graphs.extract.module_calls import and_outer
from graphs.text import first_line

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
"""Attributes that a placed module shares with its model: state and modules, by the same names."""


class PlacedModule(nn.Module):
    """Runs an extracted step on the torch devices of a placement.

    Called with the inputs of the step, it returns what the model returns; for a training step that
    is the loss, ready for ``backward()``. Inputs may be on any device. What is in pinned memory,
    inputs as well as parameters, is sent without waiting: do not change it until the step is over.

    Parameters and buffers are those of the model, under the same names: train it with any torch
    optimizer, clip gradients, save its ``state_dict``. Each is moved to the device where it is
    first read; the next call moves it back there if it was moved elsewhere. The state of an
    external optimizer does not follow: make it after placing, or let it load its own
    ``state_dict()``. :meth:`step` runs a whole step, with the optimizer that is part of it, if any,
    whose state does follow.

    ``torch.compile`` compiles it as one graph, again after :meth:`place`.
    ``DistributedDataParallel`` accepts it once it is placed, if all its parameters are on one type
    of device (torch refuses a mix of ``cpu`` and ``cuda``) and all replicas are placed alike.

    A step in bf16 runs under ``torch.autocast`` on each of its devices. Every kind of device has
    its own random numbers, so dropout depends on the placement. Shapes of the inputs must be those
    of the example.

    ``eval()`` of a training step makes it return what the model returns in eval mode, without
    gradients; a target may be given or left out. ``train()`` switches back. The first switch
    extracts the step in the other mode; its state stays where it is, and its calls go where the
    same calls of the placement are, or most calls of their module.
    """

    def __init__(
        self,
        extraction: Extraction,
        devices: Mapping[str, torch.device | str],
        order: Sequence[str] = (),
        *,
        overlap: bool = False,
    ) -> None:
        """Move the state and generate the forward pass.

        Args:
            extraction: the step that was placed; its model must not be on the meta device.
            devices: device of every call, by key (:meth:`CallGraph.devices_of_calls`).
            order: keys of calls, the first to be launched first; see :meth:`place`.
            overlap: send tensors as soon as they are made, with CUDA on separate streams
                through page-locked memory, so that copies overlap with compute.

        Raises:
            ValueError: as for :meth:`place`; or a parameter is on the meta device.
        """
        super().__init__()
        step = extraction.step
        states = states_of(step)
        vars(self).update({name: vars(step.model)[name] for name in SHARED})
        self.training = step.training
        self._step = step
        self._outputs = extraction.outputs
        self._program = extraction.forward
        self._texts = [CallText(i, call) for i, call in enumerate(self._program.calls)]
        self._launch = LaunchOrder(self._program)
        self._readers = self._program.first_readers()
        self._sources = [s for s in self._program.sources if s.role in STATE_ROLES]
        self._states = StateDevices([states[source.name] for source in self._sources])
        self._updates = Updates(extraction, step.optimizer) if step.optimizer is not None else None
        self._overlap = overlap
        self._constants: dict[torch.device, list[torch.Tensor]] = {}
        self._extraction = extraction
        self._others: list[PlacedModule] = []  # in the other mode: one, once it was asked for
        self._modes: dict[nn.Module, bool] = {}
        self._composition = Composition(step)
        self.place(devices, order)

    def __enter__(self) -> PlacedModule:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: there are no workers to stop, and the state stays where it is."""

    def place(self, devices: Mapping[str, torch.device | str], order: Sequence[str] = ()) -> None:
        """Apply another placement.

        Calls are launched in the given order as far as their inputs allow, others after them.
        Without an order, work for accelerators is launched before work on the CPU.

        Raises:
            ValueError: a call has no device, a key is unknown, a device cannot be used, or
                calls that write one tensor are on several devices. The old placement stays.
            torch.OutOfMemoryError: a device has no room for its parameters. The old placement
                stays; the next call moves its parameters back.
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
        homes = self._homes_of(placed)
        launched = self._launch.of(placed, order)
        source = forward_source(
            self._program, self._texts, launched, placed, homes, overlap=self._overlap
        )
        types = sorted({device.type for device in placed.values()})
        run = autocasting(source.compiled(), self._step.dtype, types)
        held = [s.tensor for s in self._program.sources if s.tensor is not None]
        constants = {
            device: self._constants.get(device) or [tensor.to(device) for tensor in held]
            for device in set(placed.values())
        }
        self._states.place([homes.get(source.value) for source in self._sources])
        self._source, self._run, self._constants = source, run, constants
        self._placed, self._order = placed, tuple(order)
        for other in self._others:
            other.place(*self._in_other_mode(other._program))

    def drop_constants(self) -> None:
        """Free the constants of the step on all devices; :meth:`place` makes them again."""
        self._constants = {}

    @property
    def source(self) -> str:
        """Return the forward pass as Python: one call with key, transfer or ``del`` per line."""
        return self._source.text

    @property
    def transfers(self) -> int:
        """Return how many tensors a forward pass sends between devices, without inputs."""
        return self._source.transfers

    @property
    def moved_bytes(self) -> int:
        """Return the bytes of parameters and buffers sent between devices so far."""
        return self._states.moved_bytes

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Run the step's forward pass.

        Raises:
            ValueError: the inputs do not match the example inputs, or what the step holds of the
                model or the inputs, or a submodule or hook, has changed since it was extracted.
            Exception: as torch raises it, with a note that names the call.
        """
        if self._is_in_other_mode:
            return self._others[0](*inputs, **keywords)
        bound = self._step.bound(inputs, keywords, training=self._step.training)
        if not torch.compiler.is_compiling():
            self._extraction.check_constants()
            self._composition.check()
        leaves = matched_leaves(self._step, *bound)
        with nullcontext() if self._step.training else torch.no_grad():
            states = self._states.tensors()
            try:
                results = self._run(states, leaves, self._constants)
            except Exception as error:
                error.add_note(f"in the placed forward pass: {self._source.line_of(error)}")
                raise
        return tree_map(
            lambda leaf: results[leaf.number] if isinstance(leaf, Position) else leaf,
            self._outputs,
        )

    def step(self, *batch: Any, **keywords: Any) -> Any:
        """Run one step on a batch shaped like the example inputs, as a data loader gives it.

        A training step returns the loss (detached) and adds to the parameters' gradients, or with
        an optimizer updates the parameters and leaves no gradients; an inference step returns what
        the model returns. A step with an optimizer that fails may have updated some parameters.

        Raises:
            ValueError: the batch does not match the example inputs.
            Exception: as torch raises it.
        """
        if self._is_in_other_mode:
            return self._others[0].step(*batch, **keywords)
        positional, named = self._step.unpacked(batch, keywords)
        if not self._step.training:
            return self(*positional, **named)
        if self._updates is None:
            loss: torch.Tensor = self(*positional, **named)
            torch.autograd.backward(loss)
        else:
            self._composition.check()
            self._updates.settle(self._states.tensors())
            loss = self(*positional, **named)
            with self._updates.during():
                torch.autograd.backward(loss)
        return loss.detach()

    @property
    def learning_rate(self) -> float:
        """Learning rate of the step's optimizer; a new value is used from the next step on.

        Raises:
            ValueError: the step has no optimizer, or the rate is negative or not finite.
        """
        return self._optimizer().learning_rate

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        self._optimizer().learning_rate = checked_rate(rate)

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """Return a copy of the optimizer's state, such as ``exp_avg.<parameter>``; {} without one.

        ``step.<parameter>`` counts the updates of adam and adamw.
        """
        if self._updates is None:
            return {}
        self._updates.settle(self._states.tensors())
        return {name: tensor.clone() for name, tensor in self._updates.state().items()}

    def load_optimizer_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the state from :meth:`optimizer_state`; {} starts anew.

        Raises:
            ValueError: it is the state of another optimizer or model.
        """
        if self._updates is not None:
            self._updates.load(self._states.tensors(), state)
        elif state:
            raise ValueError("the placed step has no optimizer whose state could be loaded")

    def _optimizer(self) -> Updates:
        if self._updates is None:
            raise ValueError('the placed step has no optimizer: give apply one, such as "adamw"')
        return self._updates

    def train(self, mode: bool = True) -> PlacedModule:
        """Set the mode. Modules that were in eval mode within a training step return to it.

        Raises:
            ExtractionError: the step cannot be extracted in the other mode, and keeps its mode.
        """
        self.training = self._step.training
        model = self._step.model
        if mode is self.training:
            for module, training in self._modes.items():
                module.training = training
            self._modes = {}
            return self
        if not self._others:
            step = replace(self._step, training=not self._step.training, optimizer=None)
            extraction = extract(step, self._extraction.extractor)
            devices, order = self._in_other_mode(extraction.forward)
            self._others.append(_Beside(extraction, devices, order, overlap=self._overlap))
        self._modes = self._modes or {module: module.training for module in model.modules()}
        model.train(mode)
        self.training = mode
        return self

    @property
    def _is_in_other_mode(self) -> bool:
        return len(self._others) > 0 and self.training is not self._step.training

    def _in_other_mode(self, other: ForwardProgram) -> tuple[dict[str, torch.device], list[str]]:
        """Return the devices of the other program's calls, and the keys of the order among them."""
        devices = _devices_in_other_mode(self._program, self._placed, other)
        return devices, [key for key in self._order if key in devices]

    def _homes_of(self, placed: Mapping[str, torch.device]) -> dict[int, torch.device]:
        """Return the home of every state, by value: with the call that reads it first."""
        return {value: placed[key] for value, key in self._readers.items()}


class _Beside(PlacedModule):
    """A placed module in its other mode: state that it only reads stays with the first one."""

    def _homes_of(self, placed: Mapping[str, torch.device]) -> dict[int, torch.device]:
        state = self._step.named_state()
        written = frozenset().union(*(call.writes for call in self._program.calls))
        return super()._homes_of(placed) | {
            source.value: state[source.name].device
            for source in self._sources
            if self._program.storage_of[source.value] not in written
        }


def _devices_in_other_mode(
    program: ForwardProgram, devices: Mapping[str, torch.device], other: ForwardProgram
) -> dict[str, torch.device]:
    """Return a device for every placed call of the program of the other mode, by key."""
    used: defaultdict[str, Counter[torch.device]] = defaultdict(Counter)
    for call in program.placed_calls:
        for path in and_outer(call.module):
            used[path][devices[call.key]] += 1
    chosen = {
        call.key: devices.get(call.key)
        or next(_most(used[path]) for path in and_outer(call.module) if path in used)
        for call in other.placed_calls
    }
    for keys in other.together():
        chosen |= dict.fromkeys(keys, _most(Counter(chosen[key] for key in keys)))
    return chosen


def _most(used: Counter[torch.device]) -> torch.device:
    return used.most_common(1)[0][0]


def _checked(
    calls: Mapping[str, int], devices: Mapping[str, torch.device | str]
) -> dict[str, torch.device]:
    if missing := [key for key in calls if key not in devices]:
        raise ValueError(f"{len(missing)} calls have no device, such as {missing[0]!r}")
    if unknown := [key for key in devices if key not in calls]:
        raise ValueError(f"{unknown[0]!r} has a device, but is no call that can be placed")
    full = {device: full_device(device) for device in set(devices.values())}
    return {key: full[devices[key]] for key in calls}


def full_device(device: torch.device | str) -> torch.device:
    """Return a device as its tensors name it: cuda is cuda:0, cpu:0 is cpu."""
    try:
        found = torch.device(device)
        if found.type == "cuda" and (found.index or 0) >= len(cuda_devices()):
            raise ValueError(f"device {device} cannot be used: torch sees no such device")
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        if is_of_cuda(error):  # the device is there, but fails
            raise DeviceError([found], first_line(error)) from error
        raise ValueError(f"device {device} cannot be used: {first_line(error)}") from error
