"""State that a model replaces: a buffer that is assigned another tensor instead of written into."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Container, Iterator
from typing import Any, Final, TypeAlias

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from graphs.extract.calls import module_paths
from graphs.workload import ExtractionError, Workload

_OF_MODULES: Final = frozenset(vars(nn.Module()))
_Buffers: TypeAlias = dict[tuple[nn.Module, str], torch.Tensor]


@contextlib.contextmanager
def written_when_assigned(root: nn.Module, named: Callable[[str], str]) -> Iterator[None]:
    """Write tensors assigned to buffers of submodules into the buffers after each forward.

    torch.export follows assignments to buffers of the module that it exports itself, and ignores
    those to buffers of its submodules. ``named`` maps paths of buffers to names for messages.
    """
    own = root.forward

    @functools.wraps(own)
    def forward(*inputs: Any, **keywords: Any) -> Any:
        before = _buffers_inside(root)
        outputs = own(*inputs, **keywords)
        _write_back(root, before, named)
        return outputs

    with contextlib.ExitStack() as restored:
        if "forward" in vars(root):
            restored.callback(setattr, root, "forward", own)
        else:
            restored.callback(delattr, root, "forward")
        root.forward = forward
        yield


class PlainTensors:
    """Tensors in attributes of modules that are neither parameters nor buffers.

    Those that a recording reads are constants in it, so that none may be replaced.
    """

    def __init__(self, step: Workload) -> None:
        self.step = step
        self.before = self._now()

    def check(self, read: Container[int]) -> None:
        """Raise if a tensor was read and replaced.

        Args:
            read: ids of the tensors that the step has read.

        Raises:
            ExtractionError: one was; the message names it.
        """
        now = self._now()
        for name, tensors in self.before.items():
            kept = {id(tensor) for tensor in now.get(name, ())}
            if any(id(tensor) in read and id(tensor) not in kept for tensor in tensors):
                raise ExtractionError(
                    f"the model assigns {name}, which it reads and which is neither a parameter "
                    "nor a buffer; make it one with register_buffer"
                )

    def _now(self) -> dict[str, list[torch.Tensor]]:
        return {
            f"{path}.{name}" if path else name: tensors
            for module, path in module_paths(self.step).items()
            for name, held in vars(module).items()
            if name not in _OF_MODULES
            and (tensors := [x for x in tree_leaves(held) if isinstance(x, torch.Tensor)])
        }


def check_same_form(name: str, before: torch.Tensor, now: torch.Tensor) -> None:
    """Raise if state changes its form.

    Raises:
        ExtractionError: it has another shape or dtype.
    """
    if before.shape != now.shape or before.dtype != now.dtype:
        raise ExtractionError(
            f"the step gives {name} the shape {tuple(now.shape)} and {now.dtype}, it had "
            f"{tuple(before.shape)} and {before.dtype}; state that grows cannot be placed"
        )


def _buffers_inside(root: nn.Module) -> _Buffers:
    return {
        (module, name): buffer
        for module in root.modules()
        if module is not root
        for name, buffer in module._buffers.items()
        if buffer is not None
    }


def _write_back(root: nn.Module, before: _Buffers, named: Callable[[str], str]) -> None:
    paths = {module: path for path, module in root.named_modules()}
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    known = {id(buffer) for buffer in before.values()}
    for (module, name), buffer in before.items():
        now = module._buffers.get(name)
        if now is None or now is buffer:
            continue
        check_same_form(named(f"{paths[module]}.{name}"), buffer, now)
        found.append((buffer, now.clone() if id(now) in known else now))  # buffers may be swapped
        module._buffers[name] = buffer
    with torch.no_grad():
        for buffer, now in found:
            buffer.copy_(now)
