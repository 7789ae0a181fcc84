"""Contexts that give a step other tensors or another mode, and restore its model on exit."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from graphs.extract.errors import explained, quiet
from graphs.extract.module_calls import module_paths
from graphs.workload import ExtractionError, Workload

Copier = Callable[[torch.Tensor], torch.Tensor]


@contextlib.contextmanager
def substituted(step: Workload, of: Copier) -> Iterator[None]:
    """Replace every parameter and buffer of the model and its loss by ``of(tensor)``.

    On exit the original ones are back, whatever was assigned meanwhile.
    """
    roots = [part for part in (step.model, step.loss) if isinstance(part, nn.Module)]
    slots: list[dict[str, Any]] = [
        slot
        for root in roots
        for module in root.modules()
        for slot in (module._parameters, module._buffers)
    ]
    originals = [dict(slot) for slot in slots]
    try:
        for slot in slots:
            slot.update({k: None if t is None else of(t) for k, t in slot.items()})
        yield
    finally:
        for slot, tensors in zip(slots, originals, strict=True):
            slot.clear()
            slot.update(tensors)


def copier(copied: Copier) -> Copier:
    """Return a function that copies each tensor once, so that tied parameters stay tied."""
    copies: dict[int, torch.Tensor] = {}

    def copy_of(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            new = copied(tensor)
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, tensor.requires_grad)
            copies[id(tensor)] = new.requires_grad_(tensor.requires_grad)
        return copies[id(tensor)]

    return copy_of


def with_inputs(step: Workload, of: Copier) -> Workload:
    """Return the step with every tensor in its inputs replaced by ``of(tensor)``."""

    def replaced(leaf: Any) -> Any:
        return of(leaf) if isinstance(leaf, torch.Tensor) else leaf

    return replace(
        step,
        inputs=tree_map(replaced, step.inputs),
        keywords=tree_map(replaced, dict(step.keywords)),
    )


def with_distinct_inputs(step: Workload) -> Workload:
    """Return the step on copies of its inputs; one passed twice would be traced as one input."""
    return with_inputs(step, lambda x: x.detach().clone().requires_grad_(x.requires_grad))


@contextlib.contextmanager
def on_host(step: Workload) -> Iterator[Workload]:
    """Yield the step with all its tensors on the host, where models are traced; ties are kept.

    Tensors on the host or on the meta device are not copied.
    """
    copy_of = copier(lambda tensor: tensor.detach().cpu())

    def here(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.device.type in ("cpu", "meta") else copy_of(tensor)

    with substituted(step, here):
        yield with_inputs(step, here)


@contextlib.contextmanager
def on_copies(step: Workload) -> Iterator[Workload]:
    """Yield the step on copies of all that it could change; the random state is restored.

    If the model cannot be copied as a whole, its parameters and buffers are.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            model, loss = copy.deepcopy((step.model, step.loss))
        except Exception:  # noqa: BLE001  # whatever the model's own code raises
            with substituted(step, copier(lambda tensor: tensor.detach().clone())):
                yield with_distinct_inputs(step)
        else:
            yield with_distinct_inputs(replace(step, model=model, loss=loss))


@contextlib.contextmanager
def tracing(step: Workload, verb: str) -> Iterator[None]:
    """Let the step run in its mode without torch's output, and explain errors.

    ``verb`` is what is done to the model, as in "exported".
    """
    try:
        with quiet(), in_step_mode(step):
            yield
    except ExtractionError:
        raise
    except Exception as error:
        raise explained(step, error, verb) from error


@contextlib.contextmanager
def in_step_mode(step: Workload) -> Iterator[None]:
    """Switch a model that is not in the step's mode as a whole, and gradients on or off.

    Modules in eval mode within a model in train mode stay in eval mode. On exit all attributes of
    the model's modules are restored.
    """
    attributes = [_Attributes(module) for module in module_paths(step)]
    if step.model.training is not step.training:
        step.model.train(step.training)
    try:
        with torch.set_grad_enabled(step.training):
            yield
    finally:
        for snapshot in attributes:
            snapshot.restore()


class _Attributes:
    """Snapshot of a module's attributes, including the content of lists, sets and dicts."""

    def __init__(self, module: nn.Module) -> None:
        self.now = vars(module)
        self.before = dict(self.now)
        self.contents = [
            (value, copy.copy(value))
            for value in self.before.values()
            if type(value) in (list, set, dict, OrderedDict)
        ]

    def restore(self) -> None:
        self.now.clear()
        self.now.update(self.before)
        for value, content in self.contents:
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(content)


@contextlib.contextmanager
def written_when_assigned(root: nn.Module, named: Callable[[str], str]) -> Iterator[None]:
    """Write tensors assigned to buffers of submodules into the buffers after each forward.

    torch.export follows assignments to buffers of the module that it exports itself, and ignores
    those to buffers of its submodules. ``named`` maps paths of buffers to names for messages.
    """
    original = root.forward

    @functools.wraps(original)
    def forward(*inputs: Any, **keywords: Any) -> Any:
        before = {
            (path, module, name): buffer
            for path, module in root.named_modules()
            if module is not root
            for name, buffer in module._buffers.items()
            if buffer is not None
        }
        outputs = original(*inputs, **keywords)
        ids = {id(buffer) for buffer in before.values()}
        assigned: list[tuple[torch.Tensor, torch.Tensor]] = []
        for (path, module, name), buffer in before.items():
            now = module._buffers.get(name)
            if now is None or now is buffer:
                continue
            check_same_form(named(f"{path}.{name}"), buffer, now)
            assigned.append((buffer, now.clone() if id(now) in ids else now))  # may be swapped
            module._buffers[name] = buffer
        with torch.no_grad():
            for buffer, now in assigned:
                buffer.copy_(now)
        return outputs

    with contextlib.ExitStack() as restored:
        if "forward" in vars(root):
            restored.callback(setattr, root, "forward", original)
        else:
            restored.callback(delattr, root, "forward")
        root.forward = forward
        yield


def check_same_form(name: str, before: torch.Tensor, now: torch.Tensor) -> None:
    """Raise ExtractionError if state changes its shape or dtype."""
    if before.shape != now.shape or before.dtype != now.dtype:
        raise ExtractionError(
            f"the step gives {name} the shape {tuple(now.shape)} and {now.dtype}, it had "
            f"{tuple(before.shape)} and {before.dtype}; state that grows cannot be placed"
        )
