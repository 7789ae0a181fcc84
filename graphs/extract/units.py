"""What a graph of modules is made of: the work that each call of a module does itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from graphs.extract.calls import Calls, ModuleCall
from graphs.extract.step import Step


@dataclass(frozen=True, slots=True)
class Unit:
    """The work that a call of a module does itself, not by other modules.

    Of a module that calls others it is the ``part`` from one of these calls to the next.
    """

    call: ModuleCall
    part: int

    @property
    def op(self) -> str:
        """The class of the module; "loss" is the step's own code."""
        return self.call.kind


class Units(Calls):
    """Follows the calls of modules part by part, and knows whose work autograd's nodes undo."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self.unit_of: dict[Node, Unit] = {}  # holds the nodes: they would lose their identity
        self._parts: Counter[ModuleCall] = Counter()

    @property
    def unit(self) -> Unit:
        """The unit that this thread is working on."""
        return self._unit(self.running)

    def entered(self, call: ModuleCall, inputs: Any) -> None:
        """What the inputs were computed by since the last call is the caller's work."""
        self.claim(inputs, self._unit(self.caller))

    def left(self, call: ModuleCall, outputs: Any) -> None:
        """What the outputs were computed by is the call's own work, as far as it is no other's."""
        self.claim(outputs, self._unit(call))
        self._parts[self.running] += 1

    def claim(self, tensors: Any, unit: Unit) -> None:
        """Let the autograd nodes of tensors belong to a unit, those excepted that do already."""
        leaves = tree_leaves(tensors)
        queue = [leaf.grad_fn for leaf in leaves if isinstance(leaf, torch.Tensor)]
        while queue:
            node = queue.pop()
            if node is None or node in self.unit_of or node.name().endswith("AccumulateGrad"):
                continue
            self.unit_of[node] = unit
            self.claimed(node, unit)
            queue += [below for below, _ in node.next_functions]

    def claimed(self, node: Node, unit: Unit) -> None:
        """Called once a node belongs to a unit."""

    def _unit(self, call: ModuleCall) -> Unit:
        return Unit(call, self._parts[call])
