"""Calls of a step's modules, tracked by hooks on every module, and paths of modules."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from graphs.workload import LOSS, Workload

Op = TypeVar("Op")
OUTSIDE: Final = "loss"
"""Kind of the call of the step's own code, outside of the model."""


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """The ``number``-th call, from 0, of the module with the path ``path`` in the model."""

    path: str
    number: int
    kind: str  # class of the module
    is_leaf: bool  # the module has no submodules

    @property
    def key(self) -> str:
        """The path, with the call's number from the second call on: ``layers.0@1``."""
        return f"{self.path}@{self.number}" if self.number > 0 else self.path


class ModuleCalls:
    """Tracks the calls of a step's modules, in every thread that makes some.

    The step's own code, outside of the model and its loss, is a call of the path "".
    """

    def __init__(self, step: Workload) -> None:
        self._paths = module_paths(step)
        self._counts = WeakKeyDictionary[nn.Module, int]()  # hooks are on copies of models, too
        self._outermost = ModuleCall("", -1, OUTSIDE, is_leaf=False)
        self._threads = threading.local()

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Install the hooks, and remove them on exit."""
        with contextlib.ExitStack() as hooks:
            for module, path in self._paths.items():
                before = module.register_forward_pre_hook(
                    partial(self._before, path), prepend=True, with_kwargs=True
                )
                hooks.callback(before.remove)
                after = module.register_forward_hook(
                    self._after, with_kwargs=True, always_call=True
                )
                hooks.callback(after.remove)
            yield

    @property
    def stack(self) -> list[ModuleCall]:
        """The calls that this thread is in, innermost last."""
        calls: list[ModuleCall] = self._threads.__dict__.setdefault("stack", [])
        return calls

    @property
    def running(self) -> ModuleCall:
        """The innermost call that this thread is in."""
        return self.stack[-1] if self.stack else self._outermost

    @property
    def caller(self) -> ModuleCall:
        """The call that made the running one."""
        return self.stack[-2] if len(self.stack) > 1 else self._outermost

    def entered(self, call: ModuleCall, inputs: Any) -> None:
        """Handle that ``call`` is now running (for subclasses)."""

    def left(self, call: ModuleCall, outputs: Any) -> None:
        """Handle the end of ``call`` (for subclasses); outputs are None if it failed."""

    def _before(self, path: str, module: nn.Module, args: Any, keywords: Any) -> None:
        is_leaf = next(module.children(), None) is None
        number = self._counts.get(module, 0)
        call = ModuleCall(path, number, type(module).__name__, is_leaf)
        self._counts[module] = number + 1
        self.stack.append(call)
        self.entered(call, (args, keywords))

    def _after(self, module: nn.Module, args: Any, keywords: Any, outputs: Any) -> None:
        self.left(self.stack.pop(), outputs)


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


class Units(ModuleCalls):
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
        queue = [leaf.grad_fn for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor)]
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


def module_paths(step: Workload) -> dict[nn.Module, str]:
    """Return {module: its path in the model}; paths of a loss module start with "loss"."""
    paths: dict[nn.Module, str] = {}
    for path, module in step.model.named_modules():
        paths.setdefault(module, path)
    if step.training and isinstance(step.loss, nn.Module):
        for path, module in step.loss.named_modules():
            paths.setdefault(module, f"loss.{path}" if path else "loss")
    return paths


class Homes(Generic[Op]):
    """Ops at which parameters that no op reads are counted, for they take memory all the same."""

    def __init__(self, ops: Iterable[tuple[Op, str]]) -> None:
        """Take all ops, at least one, each with the path of its module."""
        self._first: dict[str, Op] = {}
        for op, module in ops:
            for path in and_outer(module):
                self._first.setdefault(path, op)

    def of(self, parameter: str) -> Op:
        """Return the first op in the parameter's own module, else in the nearest one around it."""
        module = parameter.replace(LOSS, "loss").rpartition(".")[0]
        return next(self._first[path] for path in and_outer(module) if path in self._first)


def and_outer(module: str) -> Iterator[str]:
    """Yield a module path and those of all modules around it, the whole model's last."""
    while module:
        yield module
        module = module.rpartition(".")[0]
    yield ""
