"""Calls of a step's modules, tracked by hooks on every module, and stable keys of ops and calls.

A key is made from the module that an op or call belongs to and the operator that it runs.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, TypeVar

import torch
from torch import fx, nn

from graphs.workload import LOSS, Workload

OWN_CODE: Final = -1
"""Number of the call that stands for the step's own code."""


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


class Calls:
    """Tracks the calls of a step's modules, in every thread that makes some.

    The step's own code, outside of the model and its loss, is a call of the path "".
    """

    def __init__(self, step: Workload) -> None:
        self._paths = module_paths(step)
        self._counts: Counter[nn.Module] = Counter()
        self._own = ModuleCall("", OWN_CODE, "loss", is_leaf=False)
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
    def running(self) -> ModuleCall:
        """The innermost call that this thread is in."""
        stack = self._stack()
        return stack[-1] if stack else self._own

    @property
    def caller(self) -> ModuleCall:
        """The call that made the running one."""
        stack = self._stack()
        return stack[-2] if len(stack) > 1 else self._own

    @property
    def depth(self) -> int:
        """Number of calls that this thread is in."""
        return len(self._stack())

    def entered(self, call: ModuleCall, inputs: Any) -> None:
        """Handle that ``call`` is now running (for subclasses)."""

    def left(self, call: ModuleCall, outputs: Any) -> None:
        """Handle the end of ``call`` (for subclasses); outputs are None if it failed."""

    def _stack(self) -> list[ModuleCall]:
        stack: list[ModuleCall] = self._threads.__dict__.setdefault("stack", [])
        return stack

    def _before(self, path: str, module: nn.Module, args: Any, keywords: Any) -> None:
        is_leaf = next(module.children(), None) is None
        call = ModuleCall(path, self._counts[module], type(module).__name__, is_leaf)
        self._counts[module] += 1
        self._stack().append(call)
        self.entered(call, (args, keywords))

    def _after(self, module: nn.Module, args: Any, keywords: Any, outputs: Any) -> None:
        self.left(self._stack().pop(), outputs)


def module_paths(step: Workload) -> dict[nn.Module, str]:
    """Return {module: its path in the model}; paths of a loss module start with "loss"."""
    paths: dict[nn.Module, str] = {}
    for path, module in step.model.named_modules():
        paths.setdefault(module, path)
    if step.training and isinstance(step.loss, nn.Module):
        for path, module in step.loss.named_modules():
            paths.setdefault(module, f"loss.{path}" if path else "loss")
    return paths


Op = TypeVar("Op")


def owner(node: fx.Node, prefix: str) -> tuple[str, str] | None:
    """Return the path of a node's module, and the same with the number of its call.

    ``prefix`` is what paths have before the model's own. The result is None if torch gives no
    module.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return None
    key, (path, _) = list(stack.items())[-1]
    module = _stripped(path, prefix)
    _, at, number = key.partition("@")
    return module, f"{module}@{number}" if at else module


def operator_name(target: Any) -> str:
    """Return the name of an operator without its namespace and overload."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.partition("::")[2]
    return str(getattr(target, "__name__", target))


def numbered(keys: Iterable[str]) -> list[str]:
    """Return keys made distinct: the second of equal ones ends in #1, the third in #2."""
    seen: Counter[str] = Counter()
    distinct = []
    for key in keys:
        number = seen[key]
        seen[key] += 1
        distinct.append(f"{key}#{number}" if number else key)
    return distinct


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


def _stripped(path: str, prefix: str) -> str:
    return "" if path == prefix else path.removeprefix(prefix + ".") if prefix else path
