"""Tracking which call of which module is running, by hooks on every module of a step."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from torch import nn

from graphs.extract.step import Step

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

    def __init__(self, step: Step) -> None:
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


def module_paths(step: Step) -> dict[nn.Module, str]:
    """Return {module: its path in the model}; paths of a loss module start with "loss"."""
    paths: dict[nn.Module, str] = {}
    for path, module in step.model.named_modules():
        paths.setdefault(module, path)
    if step.training and isinstance(step.loss, nn.Module):
        for path, module in step.loss.named_modules():
            paths.setdefault(module, f"loss.{path}" if path else "loss")
    return paths
