"""Contexts that give a step other tensors or another mode, and restore its model on exit."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from graphs.extract.calls import module_paths
from graphs.workload import Workload


@contextlib.contextmanager
def substituted(step: Workload, of: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
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
    own = [dict(slot) for slot in slots]
    try:
        for slot in slots:
            slot.update({k: None if t is None else of(t) for k, t in slot.items()})
        yield
    finally:
        for slot, tensors in zip(slots, own, strict=True):
            slot.clear()
            slot.update(tensors)


@contextlib.contextmanager
def on_host(step: Workload) -> Iterator[Workload]:
    """Yield the step with all its tensors on the host, where models are traced; ties are kept.

    Tensors on the host or on the meta device are not copied.
    """
    copies = _Copies(lambda tensor: tensor.detach().cpu())

    def here(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.device.type in ("cpu", "meta"):
            return leaf
        return copies.of(leaf)

    with substituted(step, here):
        yield replace(
            step, inputs=tree_map(here, step.inputs), keywords=tree_map(here, dict(step.keywords))
        )


@contextlib.contextmanager
def in_its_mode(step: Workload) -> Iterator[None]:
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
        for own in attributes:
            own.restore()


class _Attributes:
    """Snapshot of a module's attributes, including the content of lists, sets and dicts."""

    def __init__(self, module: nn.Module) -> None:
        self.now = vars(module)
        self.before = dict(self.now)
        self.inside = [
            (held, copy.copy(held))
            for held in self.before.values()
            if type(held) in (list, set, dict, OrderedDict)
        ]

    def restore(self) -> None:
        self.now.clear()
        self.now.update(self.before)
        for held, inside in self.inside:
            held.clear()
            (held.extend if isinstance(held, list) else held.update)(inside)


@contextlib.contextmanager
def on_copies(step: Workload) -> Iterator[Workload]:
    """Yield the step on copies of all that it could change; the random state is restored.

    If the model cannot be copied as a whole, its parameters and buffers are.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            model, loss = copy.deepcopy((step.model, step.loss))
        except Exception:  # noqa: BLE001  # whatever the model's own code raises
            with substituted(step, _Copies(lambda tensor: tensor.detach().clone()).of):
                yield with_distinct_inputs(step)
        else:
            yield with_distinct_inputs(replace(step, model=model, loss=loss))


class _Copies:
    """Makes one copy of each tensor, so that tied parameters stay tied."""

    def __init__(self, copied: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.copied = copied
        self.known: dict[int, torch.Tensor] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self.known:
            copied = self.copied(tensor)
            if isinstance(tensor, nn.Parameter):
                copied = nn.Parameter(copied, tensor.requires_grad)
            self.known[id(tensor)] = copied.requires_grad_(tensor.requires_grad)
        return self.known[id(tensor)]


def with_distinct_inputs(step: Workload) -> Workload:
    """Return the step on copies of its inputs; one passed twice would be traced as one input."""

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)

    return replace(
        step,
        inputs=tree_map(copied, step.inputs),
        keywords=tree_map(copied, dict(step.keywords)),
    )
