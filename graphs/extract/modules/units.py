"""Units of a graph of modules: the work that each call of a module does itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from graphs.extract.calls import Calls, ModuleCall
from graphs.workload import Workload


@dataclass(frozen=True, slots=True)
class Unit:
    """Work that a call of a module does itself, not by calling other modules.

    If a module calls others, its work is split at these calls; ``part`` counts the pieces.
    """

    call: ModuleCall
    part: int

    @property
    def op(self) -> str:
        """The class of the module; "loss" for the step's own code."""
        return self.call.kind


class Units(Calls):
    """Tracks module calls part by part, and which unit each autograd node differentiates."""

    def __init__(self, step: Workload) -> None:
        super().__init__(step)
        self.unit_of: dict[Node, Unit] = {}  # keeps nodes alive, as their ids may be reused
        self._parts: Counter[ModuleCall] = Counter()

    @property
    def unit(self) -> Unit:
        """The unit that this thread is working on."""
        return self._unit(self.running)

    def entered(self, call: ModuleCall, inputs: Any) -> None:
        """Assign the computation of the inputs, since the last call, to the caller."""
        self.claim(inputs, self._unit(self.caller))

    def left(self, call: ModuleCall, outputs: Any) -> None:
        """Assign the computation of the outputs to the call, except what other units did."""
        self.claim(outputs, self._unit(call))
        self._parts[self.running] += 1

    def claim(self, tensors: Any, unit: Unit) -> None:
        """Assign the autograd nodes of tensors to a unit, except those already assigned."""
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
        """Handle that a node was assigned to a unit (for subclasses)."""

    def _unit(self, call: ModuleCall) -> Unit:
        return Unit(call, self._parts[call])
