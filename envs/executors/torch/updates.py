"""The optimizer of a placed module's step: parameters are updated on their home devices.

Torch's fused kernel updates the parameters of a call together, as soon as their gradients are
complete and while the backward pass goes on elsewhere. The updates in the graph of the step are at
the same place. The gradients are freed at once.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from envs.executors.checks import load_optimizer_state
from envs.executors.state_devices import STATE_ROLES
from graphs.extract import Extraction
from graphs.extract.export.forward import ForwardProgram
from graphs.optimizer import STATE, Optimizer


@dataclass(slots=True, eq=False)
class UpdateGroup:
    """Parameters that are updated together, by name and by index among the states."""

    names: tuple[str, ...]
    waits: bool  # for the end of the backward pass
    members: tuple[int, ...]
    missing: int = 0  # gradients


class Updates:
    """Updates the parameters among the states of a forward program, in the order of its sources.

    The optimizer state of a parameter is made, or moved to its device, by :meth:`settle`. A
    parameter that is also read without a gradient is updated after the backward pass, which may
    need its value until then.
    """

    def __init__(self, extraction: Extraction, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.learning_rate = optimizer.learning_rate
        sources = extraction.forward.sources
        self._names = [s.name for s in sources if s.role in STATE_ROLES]
        self._groups = updated_together(extraction)
        self._states: dict[int, torch.Tensor] = {}  # the updated ones
        self._kept: dict[int, list[torch.Tensor]] = {}
        self._counts: dict[int, torch.Tensor] = {}
        self._by_device: list[list[torch.Tensor]] = []
        self._hooks: dict[int, torch.utils.hooks.RemovableHandle] = {}
        self._runs = False
        weakref.finalize(self, _remove, self._hooks)

    def settle(self, states: Sequence[torch.Tensor]) -> None:
        """Register the current states, and move their optimizer state to their devices."""
        moved = False
        for group in self._groups:
            for i in group.members:
                if self._states.get(i) is not states[i]:
                    self._states[i] = states[i]
                    if states[i].requires_grad and not group.waits:
                        self._hook(i, states[i], group)
                if i not in self._kept or self._counts[i].device != states[i].device:
                    self._take_home(i, states[i])
                    moved = True
        if moved and self.optimizer.counts_steps:
            by_device = defaultdict(list)
            for count in self._counts.values():
                by_device[count.device].append(count)
            self._by_device = list(by_device.values())

    @contextmanager
    def during(self) -> Iterator[None]:
        """Update parameters during a backward pass in this context; old gradients are dropped."""
        for counts in self._by_device:
            torch._foreach_add_(counts, 1.0)
        for group in self._groups:
            group.missing = len(group.members)
            for i in group.members:
                self._states[i].grad = None
        self._runs = True
        try:
            yield
        finally:
            self._runs = False
        for group in self._groups:
            if group.missing:
                self._update(group)

    def state(self) -> dict[str, torch.Tensor]:
        """Return the optimizer state itself, as ``<slot>.<parameter>`` and ``step.<parameter>``."""
        slots = STATE[self.optimizer.kind]
        state = {
            f"{slot}.{self._names[i]}": tensor
            for i, kept in self._kept.items()
            for slot, tensor in zip(slots, kept, strict=True)
        }
        if self.optimizer.counts_steps:
            state |= {f"step.{self._names[i]}": count for i, count in self._counts.items()}
        return state

    def load(self, states: Sequence[torch.Tensor], kept: Mapping[str, torch.Tensor]) -> None:
        """Load the state from :meth:`state`; {} drops all optimizer state, and all hooks."""
        if kept:
            self.settle(states)
            load_optimizer_state(self.state(), kept)
        else:
            _remove(self._hooks)
            for known in (self._hooks, self._states, self._kept, self._counts):
                known.clear()
            self._by_device = []

    def _hook(self, index: int, parameter: torch.Tensor, group: UpdateGroup) -> None:
        if index in self._hooks:
            self._hooks[index].remove()
        this = weakref.ref(self)  # the model's hook must not keep the optimizer state alive

        def arrived(_: torch.Tensor) -> None:
            updates = this()
            if updates is not None and updates._runs:
                group.missing -= 1
                if not group.missing:
                    updates._update(group)

        # torch leaves this call untyped.
        hook = parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
        self._hooks[index] = hook

    @torch.no_grad()
    def _take_home(self, index: int, parameter: torch.Tensor) -> None:
        device = parameter.device
        if index in self._kept:
            self._kept[index] = [tensor.to(device) for tensor in self._kept[index]]
            self._counts[index] = self._counts[index].to(device)
        else:
            slots = STATE[self.optimizer.kind]
            self._kept[index] = [torch.zeros_like(parameter).detach() for _ in slots]
            self._counts[index] = torch.zeros((), device=device)

    @torch.no_grad()
    def _update(self, group: UpdateGroup) -> None:
        members = [i for i in group.members if self._states[i].grad is not None]
        group.missing = 0
        if not members:
            return
        parameters = [self._states[i] for i in members]
        fused_update(
            self.optimizer,
            self.learning_rate,
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [self._kept[i] for i in members],
            [self._counts[i] for i in members],
        )
        for parameter in parameters:
            parameter.grad = None


def fused_update(
    optimizer: Optimizer,
    learning_rate: float,
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    kept: Sequence[Sequence[torch.Tensor]],
    counts: Sequence[torch.Tensor],
) -> None:
    """Run torch's fused kernel on parameters of one device and dtype, and their optimizer state."""
    name, numbers = optimizer.kernel
    slots: list[Any] = [list(slot) for slot in zip(*kept, strict=True)] or [[]]
    if optimizer.counts_steps:
        slots += [[], counts]
    getattr(torch, name)(parameters, gradients, *slots, lr=learning_rate, **numbers)


def updated_together(extraction: Extraction) -> list[UpdateGroup]:
    """Group parameters that have a gradient by the call that reads them first and by dtype.

    One that is also read without a gradient waits for the end of the backward pass.
    """
    program, state = extraction.forward, extraction.step.named_state()
    trained = {id(state[name]) for name in extraction.program.gradients}
    readers, plain = program.first_readers(), _read_without_gradient(program)
    groups: dict[tuple[str, torch.dtype, bool], list[str]] = {}
    for source in program.sources:
        if source.role == "parameter" and id(state[source.name]) in trained:
            waits = program.storage_of[source.value] in plain
            key = readers.get(source.value, source.name), state[source.name].dtype, waits
            groups.setdefault(key, []).append(source.name)
    index = {s.name: i for i, s in enumerate(s for s in program.sources if s.role in STATE_ROLES)}
    return [
        UpdateGroup(tuple(names), waits, tuple(index[name] for name in names))
        for (_, _, waits), names in groups.items()
    ]


def _remove(hooks: Mapping[int, torch.utils.hooks.RemovableHandle]) -> None:
    for hook in hooks.values():
        hook.remove()


def _read_without_gradient(program: ForwardProgram) -> set[int]:
    """Return the storages read by calls that autograd does not differentiate, or may not."""
    return {
        program.storage_of[value]
        for call in program.calls
        if call.op == "detach" or not isinstance(call.target, torch._ops.OpOverload)
        for value in call.reads
    }
