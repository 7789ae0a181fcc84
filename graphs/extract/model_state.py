"""State of a step's model: contexts that replace it temporarily, and constants of its programs.

The contexts give a step other tensors or another mode, and restore its model on exit.
:class:`Constants` are what a traced program holds besides parameters, buffers and tensors of the
inputs: neither the program nor its readers see a change of them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from graphs.arguments import contexts_by_name, leaves_by_path
from graphs.extract.errors import explained, quiet, short_reason
from graphs.extract.module_calls import module_paths
from graphs.inputs import PLAIN, snapshot, tensors_within
from graphs.workload import ExtractionError, Workload

OF_MODULES: Final = frozenset(vars(nn.Module()))
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


# --- constants of a traced program


Slot = tuple[str, dict[str, Any], str, list[torch.Tensor]]
"""Path of an attribute, the dict that it is in, its name there, and the tensors that it holds."""


def tensor_attributes(paths: Mapping[nn.Module, str]) -> list[Slot]:
    """Return the attributes of modules that hold tensors, but are no parameters or buffers."""
    return [
        (f"{path}.{name}" if path else name, vars(module), name, tensors)
        for module, path in paths.items()
        for name, value in vars(module).items()
        if name not in OF_MODULES and (tensors := [*tensors_within(value, nn.Module)])
    ]


def replaced(slots: Iterable[Slot]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor that is no longer in its attribute, with the path of that."""
    for path, owner, name, tensors in slots:
        now = owner.get(name)
        if now is not tensors[0] or len(tensors) > 1:
            kept = {id(tensor) for tensor in tensors_within(now, nn.Module)}
            yield from ((path, tensor) for tensor in tensors if id(tensor) not in kept)


def check_not_replaced(
    gone: Iterable[tuple[str, torch.Tensor]], is_read: Callable[[torch.Tensor], bool]
) -> None:
    """Raise if the tensor of an attribute was read, as a constant of a trace, and replaced."""
    for path, tensor in gone:
        if is_read(tensor):
            raise ExtractionError(
                f"the model assigns {path}, which it reads and which is neither a parameter "
                "nor a buffer; make it one with register_buffer"
            )


class Constants:
    """Constants of a traced program: objects among the inputs, and tensors.

    Made before the trace; ``hold`` adds the tensors of the program.
    """

    def __init__(self, step: Workload) -> None:
        """Remember the objects among the inputs of a step.

        Raises:
            ExtractionError: whether one changes cannot be seen.
        """
        self._model = type(step.model).__name__
        self._paths = module_paths(step)
        self._objects = [
            (path, leaf, _snapshot(path, leaf))
            for path, leaf in leaves_by_path(step.step_inputs, step.keywords).items()
            if type(leaf) not in PLAIN and not isinstance(leaf, torch.Tensor)
        ]
        self._inputs = step.step_inputs, step.keywords
        self._contexts = contexts_by_name(*self._inputs)
        self._tensors: list[tuple[torch.Tensor, int]] = []
        self._attributes: list[Slot] = []

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Remember the tensors of the traced program, and the attributes that they are in.

        Raises:
            ExtractionError: the trace has changed an object.
        """
        for what in self._changed_objects():
            raise ExtractionError(
                f"the model changes {what}, which a placed step would not; return what it computes"
            )
        held = [tensor for tensor in tensors if has_memory(tensor)]
        self._tensors = [(tensor, _version(tensor)) for tensor in held]
        self._attributes = [
            slot
            for slot in tensor_attributes(self._paths)
            if any(is_part_of(held, tensor) for tensor in slot[3])
        ]

    def check(self) -> None:
        """Check that all is as it was when the step was extracted.

        Raises:
            ValueError: an object or a tensor has changed.
        """
        for what in self._changed_objects():
            raise ValueError(
                f"{what}, has changed since the step was extracted, and is a constant of the "
                "placed step: only tensors may change from batch to batch; place the model again"
            )
        for path, _ in replaced(self._attributes):
            raise ValueError(self._changed(path))
        for tensor, version in self._tensors:
            if _version(tensor) != version:
                paths = (slot[0] for slot in self._attributes if is_part_of(slot[3], tensor))
                raise ValueError(self._changed(next(paths, "a tensor outside of the modules")))

    def _changed_objects(self) -> Iterator[str]:
        for path, leaf, before in self._objects:
            if _snapshot(path, leaf) != before:
                yield f"input {path}, a {type(leaf).__name__}"
        if self._contexts and (now := contexts_by_name(*self._inputs)) != self._contexts:
            name = next(name for name in now if now[name] != self._contexts.get(name))
            yield f"input [{name!r}], in more than its tensors"

    def _changed(self, what: str) -> str:
        return (
            f"{what} of {self._model} has changed since the step was extracted, and is a constant "
            "of the placed step: it is neither a parameter nor a buffer; make it one with "
            "register_buffer, or place the model again"
        )


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has values; fake ones and those on the meta device have none."""
    return not isinstance(tensor, FakeTensor) and not tensor.is_meta


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


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
    return tensor.grad, 0 if tensor.grad is None else _version(tensor.grad)


def is_part_of(tensors: Iterable[torch.Tensor], one: torch.Tensor) -> bool:
    """Return whether a tensor begins where one of others does."""
    return has_memory(one) and any(
        has_memory(tensor) and tensor.data_ptr() == one.data_ptr() for tensor in tensors
    )


def _snapshot(path: str, value: Any) -> Any:
    try:
        return snapshot(value)
    except Exception as error:
        raise ExtractionError(
            f"input {path} is a {type(value).__name__}, which would be a constant of the placed "
            f"step, but whether it changes cannot be seen ({short_reason(error)}); make it in the "
            "model's forward, or give the numbers and tensors that it stands for"
        ) from error
