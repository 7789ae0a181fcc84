"""One step of one device: values come and go, and autograd runs backwards stage by stage.

A value that a stage makes and a later stage reads, here or on another device, is cut: the reader
gets a leaf of its own. A stage is differentiated when all later stages have been, so that the
gradients of its values are complete; then the gradients of what it received go back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from envs.executors.device_workers.sources import Edge
from envs.executors.device_workers.transport import Transport


@dataclass(slots=True, eq=False)
class Stage:
    """Tensors that crossed the borders of a stage, in a training step."""

    received: list[tuple[torch.Tensor, int]] = field(default_factory=list)  # leaf, edge back
    sent: list[tuple[torch.Tensor, int]] = field(default_factory=list)  # value, edge back
    passed: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # value, leaf
    losses: list[torch.Tensor] = field(default_factory=list)


class Tape:
    """The stages of one step, with the functions that the generated source calls."""

    def __init__(self, transport: Transport, edges: Sequence[Edge], *, training: bool) -> None:
        self._transport = transport
        self._edges = edges
        self._training = training
        self._stages: defaultdict[int, Stage] = defaultdict(Stage)

    def receive(self, edge: int, stage: int) -> torch.Tensor:
        """Wait for a value and return it, as a leaf if its gradient goes back."""
        value = self._transport.receive(edge)
        back = self._edges[edge].back
        if back is None:
            return value
        leaf = value.detach().requires_grad_()
        self._stages[stage].received.append((leaf, back))
        return leaf

    def send(self, edge: int, stage: int, value: torch.Tensor) -> None:
        """Start to send a value."""
        self._transport.send(edge, value.detach())
        back = self._edges[edge].back
        if back is not None and value.requires_grad:
            self._stages[stage].sent.append((value, back))

    def passed(self, stage: int, value: torch.Tensor) -> torch.Tensor:
        """Return a value of an earlier stage as a leaf of the present one."""
        if not value.requires_grad:
            return value
        leaf = value.detach().requires_grad_()
        self._stages[stage].passed.append((value, leaf))
        return leaf

    def give(self, edge: int, stage: int, value: torch.Tensor) -> None:
        """Hand a result to the parent; that of a training step is the loss."""
        self._transport.send(edge, value.detach())
        if self._training and value.requires_grad:
            self._stages[stage].losses.append(value)

    def backward(self) -> None:
        """Differentiate all stages; gradients add up in the parameters."""
        for number in sorted(self._stages, reverse=True):
            stage = self._stages.pop(number)
            values: list[torch.Tensor] = [*stage.losses]
            gradients: list[torch.Tensor | None] = [None] * len(values)
            for value, leaf in stage.passed:
                if leaf.grad is not None:
                    values.append(value)
                    gradients.append(leaf.grad)
            for value, back in stage.sent:
                values.append(value)
                gradients.append(self._transport.receive(back))
            if values:
                torch.autograd.backward(values, gradients)
            for leaf, back in stage.received:
                gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                self._transport.send(back, gradient)
