"""State of a step's model: contexts that replace it temporarily, and restore the model on exit."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import Any, Final

import torch
from torch import nn
from torch.utils._pytree import tree_map

from graphs.extract.constants import replaced, tensor_attributes, version_of
from graphs.extract.errors import explained, quiet
from graphs.extract.module_calls import module_paths
from graphs.workload import ExtractionError, Workload

Copier = Callable[[torch.Tensor], torch.Tensor]
CONTAINERS: Final = (list, set, dict, OrderedDict)
NO_CONTENT: Final = (type, FunctionType, ModuleType, nn.Module, torch.Tensor)
DEPTH: Final = 3
LARGEST: Final = 10_000
"""Number of entries above which those of a container are not looked into."""


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
    the model's modules are restored, and what their code has cached.
    """
    before = _Snapshot(step)
    if step.model.training is not step.training:
        step.model.train(step.training)
    try:
        with torch.set_grad_enabled(step.training):
            yield
    finally:
        before.restore()


class _Snapshot:
    """Attributes of a step's modules, and globals of the Python modules that define them.

    Included are the contents of lists, sets, dicts and objects in these, to a depth of
    :data:`DEPTH`. A function that caches its results forgets them if it has added any: tensors of a
    trace are no results for others.
    """

    def __init__(self, step: Workload) -> None:
        self._contents: dict[int, tuple[Any, Any]] = {}
        self._caches: dict[int, tuple[Any, int]] = {}
        modules = module_paths(step)
        for module in modules:
            self._keep(vars(module), DEPTH)
        classes = {cls for module in modules for cls in type(module).__mro__}
        own = [cls for cls in classes if _is_of_model(cls.__module__)]
        for cls in own:
            self._keep_values(vars(cls), 1)
        for home in {cls.__module__ for cls in own} | {getattr(step.loss, "__module__", "")}:
            if home in sys.modules and _is_of_model(home):
                self._keep(vars(sys.modules[home]), 1)

    def _keep(self, value: Any, depth: int) -> None:
        if isinstance(value, functools._lru_cache_wrapper):
            self._caches[id(value)] = value, value.cache_info().misses
        if type(value) not in CONTAINERS:
            is_plain = _is_of_model(type(value).__module__) and not isinstance(value, NO_CONTENT)
            value = getattr(value, "__dict__", None) if is_plain else None
        if type(value) not in CONTAINERS or id(value) in self._contents:
            return
        self._contents[id(value)] = value, copy.copy(value)
        if depth and len(value) <= LARGEST:
            self._keep_values(value, depth - 1)

    def _keep_values(self, container: Any, depth: int) -> None:
        for value in [*(container.values() if isinstance(container, Mapping) else container)]:
            self._keep(value, depth)

    def restore(self) -> None:
        """Give all that has changed its former content."""
        for now, before in self._contents.values():
            if _identities(now) != _identities(before):
                now.clear()
                (now.extend if isinstance(now, list) else now.update)(before)
        for cache, misses in self._caches.values():
            if cache.cache_info().misses != misses:
                cache.cache_clear()


def _is_of_model(home: str) -> bool:
    """Return whether a Python module may be that of a model: not one of torch or of Python."""
    return home.partition(".")[0] not in {"torch", *sys.stdlib_module_names}


def _identities(container: Any) -> object:
    if isinstance(container, dict):
        return [(id(key), id(value)) for key, value in container.items()]
    return (set if isinstance(container, set) else list)(map(id, container))


@contextlib.contextmanager
def written_when_assigned(
    root: nn.Module, named: Callable[[str], str]
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Write tensors assigned to buffers of submodules into the buffers after each forward.

    torch.export follows assignments to buffers of the module that it exports itself, and ignores
    those to buffers of its submodules and to other attributes, of which it warns. ``named`` maps
    paths of buffers to names for messages. Yields a list that receives the replaced tensors of
    other attributes, for :func:`check_not_replaced`.
    """
    original = root.forward
    gone: list[tuple[str, torch.Tensor]] = []

    @functools.wraps(original)
    def forward(*inputs: Any, **keywords: Any) -> Any:
        before = {
            (path, module, name): buffer
            for path, module in root.named_modules()
            if module is not root
            for name, buffer in module._buffers.items()
            if buffer is not None
        }
        slots = tensor_attributes({module: path for path, module in root.named_modules()})
        outputs = original(*inputs, **keywords)
        gone.extend((named(path), tensor) for path, tensor in replaced(slots))
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
        yield gone


def check_same_form(name: str, before: torch.Tensor, now: torch.Tensor) -> None:
    """Raise ExtractionError if state changes its shape or dtype."""
    if before.shape != now.shape or before.dtype != now.dtype:
        raise ExtractionError(
            f"the step gives {name} the shape {tuple(now.shape)} and {now.dtype}, it had "
            f"{tuple(before.shape)} and {before.dtype}; state that grows cannot be placed"
        )


class GradientWatch:
    """Notices that gradients (``.grad``) of named tensors are assigned or written in place."""

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._before = [(name, tensor, *_gradient(tensor)) for name, tensor in named]

    def written(self) -> str:
        """Return the name of the first tensor whose gradient changed, or ""."""
        for name, tensor, before, version in self._before:
            gradient, now = _gradient(tensor)
            if gradient is not before or now != version:
                return name
        return ""


def _gradient(tensor: torch.Tensor) -> tuple[torch.Tensor | None, int]:
    return tensor.grad, 0 if tensor.grad is None else version_of(tensor.grad)
