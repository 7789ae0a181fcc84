"""State of a step's model: contexts that replace it temporarily, and restore the model on exit."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import Any, Final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._pytree import tree_map

from graphs.extract.constants import replaced, tensor_attributes, version_of
from graphs.extract.errors import explained, quiet
from graphs.extract.module_calls import module_paths
from graphs.workload import ExtractionError, Workload

Copier = Callable[[torch.Tensor], torch.Tensor]
CONTAINERS: Final = (list, set, dict, OrderedDict, defaultdict)
"""Not their subclasses: entries of some are made when they are read."""
NO_CONTENT: Final = (type, FunctionType, ModuleType, nn.Module, torch.Tensor)
DEPTH: Final = 3
LARGEST: Final = 10_000
"""Number of entries above which a container is not looked into."""


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
    the model's modules are restored, with the states of generators, and what :class:`_Caches` knows
    holds no tensors of a trace.
    """
    values = [value for module in module_paths(step) for value in vars(module).values()]
    drawn = [(own, own.get_state()) for own in values if isinstance(own, torch.Generator)]
    attributes = [_Attributes(module) for module in module_paths(step)]
    caches = _Caches(step)
    if step.model.training is not step.training:
        step.model.train(step.training)
    try:
        with torch.set_grad_enabled(step.training):
            yield
    finally:
        for snapshot in attributes:
            snapshot.restore()
        for generator, state in drawn:
            generator.set_state(state)
        caches.clean()


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


class _Caches:
    """Knows where a model's code keeps tensors: objects in its attributes, its classes and globals.

    Globals are those of the Python modules that define the model, its parts and its loss, and of
    user modules that these import as a whole. Containers within are known to a depth of
    :data:`DEPTH`, and functions with ``lru_cache``. :meth:`clean` changes nothing else than entries
    that are new and hold tensors of a trace.
    """

    def __init__(self, step: Workload) -> None:
        self._before: dict[int, tuple[Any, Any]] = {}
        self._functions: dict[int, Any] = {}
        modules = module_paths(step)
        for module in modules:
            self._keep_values(vars(module), DEPTH)
        classes = {cls for module in modules for cls in type(module).__mro__}
        own = [cls for cls in classes if _is_user_module(cls.__module__)]
        for cls in own:
            self._before[id(cls)] = cls, dict(vars(cls))
            self._keep_values(vars(cls), 1)
        homes = {cls.__module__ for cls in own} | {getattr(step.loss, "__module__", "")}
        for home in [sys.modules[name] for name in homes if name in sys.modules]:
            imported = [each for each in vars(home).values() if isinstance(each, ModuleType)]
            for each in [home, *imported]:
                if _is_user_module(each.__name__):
                    self._keep(vars(each), 1)

    def _keep(self, value: Any, depth: int) -> None:
        value = getattr(value, "__func__", value)  # of a class or static method
        if isinstance(value, functools._lru_cache_wrapper):
            self._functions[id(value)] = value
        if type(value) not in CONTAINERS:
            is_plain = _is_user_module(type(value).__module__) and not isinstance(value, NO_CONTENT)
            value = getattr(value, "__dict__", None) if is_plain else None
        if type(value) not in CONTAINERS or id(value) in self._before or len(value) > LARGEST:
            return
        self._before[id(value)] = value, copy.copy(value)
        if depth:
            self._keep_values(value, depth - 1)

    def _keep_values(self, container: Any, depth: int) -> None:
        for value in [*(container.values() if isinstance(container, Mapping) else container)]:
            self._keep(value, depth)

    def clean(self) -> None:
        """Take tensors of a trace out of everything that is known."""
        for now, before in self._before.values():
            if isinstance(now, type):
                for name, value in dict(vars(now)).items():
                    if value is not before.get(name) and _is_traced(value):
                        if name in before:
                            setattr(now, name, before[name])
                        else:
                            delattr(now, name)
            elif isinstance(now, dict):
                for key, value in list(now.items()):
                    if value is not before.get(key) and _is_traced(value):
                        now.pop(key)
                        now.update({key: before[key]} if key in before else {})
            elif any(map(_is_traced, now)) and not any(map(_is_traced, before)):
                now.clear()
                (now.extend if isinstance(now, list) else now.update)(before)
        for function in self._functions.values():
            if any(map(_is_traced, gc.get_referents(function))):  # among them what it has cached
                function.cache_clear()


def _is_user_module(name: str) -> bool:
    """Return whether a Python module is neither of torch nor of Python."""
    return name.partition(".")[0] not in {"torch", *sys.stdlib_module_names}


def _is_traced(value: Any) -> bool:
    """Return whether a value is a tensor of a trace, or a small container of such."""
    if isinstance(value, torch.Tensor):
        return isinstance(value, FakeTensor | FunctionalTensor)
    if type(value) in (tuple, *CONTAINERS) and len(value) <= LARGEST:
        within = value.values() if isinstance(value, dict) else value
        return any(isinstance(each, FakeTensor | FunctionalTensor) for each in [*within])
    return False


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
        paths = {module: path for path, module in root.named_modules()}
        slots = tensor_attributes(paths)
        empty = empty_buffers(paths)
        outputs = original(*inputs, **keywords)
        check_no_new_state(map(named, empty - empty_buffers(paths)))
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


def empty_buffers(paths: Mapping[nn.Module, str]) -> set[str]:
    """Return the paths of all buffers of modules that are None."""
    return {
        f"{path}.{name}" if path else name
        for module, path in paths.items()
        for name, buffer in module._buffers.items()
        if buffer is None
    }


def check_no_new_state(names: Iterable[str]) -> None:
    """Raise ExtractionError if a step gives buffers their first values, as in a first run only."""
    if made := sorted(names):
        raise ExtractionError(
            f"buffer {made[0]} has no value until the model has run: run the model once first, on "
            "the example inputs"
        )


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
