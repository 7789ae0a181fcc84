"""The workload: one step of a model, with its example inputs and how a loss is computed from them.

:func:`step_copy` copies a step whose model may keep computed tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from graphs.arguments import TARGET, arguments, leaves_by_path, rearranged, without_target
from graphs.inputs import array_refusal, flatten_objects
from graphs.optimizer import Optimizer
from graphs.precision import FULL, check_dtype

WRAPPED: Final = "model"
LOSS: Final = "<loss>"
"""Stands for the loss function in names of state; no module of a model can have this name."""
NO_TARGET: Final = "a loss function takes the last of the inputs as target, but none is positional"


class ExtractionError(ValueError):
    """The model cannot be extracted as it is; the message says where and what to do.

    ``remedy`` is the setting that helps, if one does: another extractor ("modules"), another dtype
    ("fp32"), or a graph without costs ("no costs").
    """

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message)
        self.remedy = remedy


class StepError(ExtractionError):
    """The step itself is at fault, so that no extractor would accept it."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One step of ``model`` on ``inputs``.

    With a ``loss`` function the last input is the target: the step's loss is
    ``loss(model(*inputs[:-1], **keywords), inputs[-1])``. Without one, a training
    step takes the model's own output: a scalar, or an output with a scalar ``loss``. With an
    ``optimizer`` the step also updates the parameters. In another ``dtype`` than fp32 forward pass
    and loss run under ``torch.autocast``; parameters keep their dtype.

    Classes of objects that hold tensors of inputs are registered as pytrees (:mod:`graphs.inputs`).
    """

    model: nn.Module
    inputs: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    training: bool = True
    optimizer: Optimizer | None = None
    dtype: str = FULL

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        if self.loss is not None and self.training and not self.inputs:
            raise StepError(NO_TARGET)
        if self.optimizer is not None and not self.training:
            raise ExtractionError(
                f"inference has no gradients for {self.optimizer.kind} to use: leave the optimizer "
                "out, or place training"
            )
        check_inputs(self.step_inputs, self.keywords)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        example_inputs: Any,
        loss: Callable[[Any, Any], torch.Tensor] | None = None,
        *,
        target: Any = None,
        training: bool = True,
        optimizer: str | Optimizer | None = None,
        dtype: str = FULL,
    ) -> Workload:
        """Build a step from example inputs.

        Inputs are a tensor, a tuple or list of arguments, a dict of keywords, or
        ``(args, kwargs)``, a tuple and a dict. The target of a loss function is ``target``, or it
        is among the inputs: the one keyword that the model's ``forward`` does not take (with
        ``**kwargs``: has no parameter for, or the one called "target"), or the last argument.

        Raises:
            StepError: the model is no module; a loss function has no target, or several entries
                could be it; torch cannot find the tensors of an input, or one is an array of numpy.
            ValueError: there is no such optimizer or dtype.
        """
        if not isinstance(model, nn.Module):
            raise StepError(
                f"the model is {'the class' if isinstance(model, type) else 'an instance of'} "
                f"{(model if isinstance(model, type) else type(model)).__name__}, not an instance "
                "of torch.nn.Module"
            )
        inputs, keywords = arguments(example_inputs)
        if target is not None:
            if loss is None:
                raise StepError(
                    "a target is given without a loss function that takes it: give loss, too, or "
                    "pass it with the inputs if the model takes it"
                )
            inputs = (*inputs, target)
        elif loss is not None and keywords:
            alone = not inputs
            inputs, keywords, names = without_target(model, inputs, keywords, keywords)
            if len(names) > 1 or (alone and training and not names):
                raise StepError(_unclear_target(model, keywords, names))
        step = cls(model, inputs, keywords, loss, training, Optimizer.of(optimizer), dtype)
        # The example stays what it is, whatever the caller puts into its containers.
        inputs, keywords = tree_map(lambda leaf: leaf, (step.inputs, step.keywords))
        return replace(step, inputs=inputs, keywords=keywords)

    def check_complete(self, **others: Any) -> None:
        """Raise ValueError if an argument that goes with a model alone is given beside this."""
        if given := [name for name, value in others.items() if value is not None]:
            raise ValueError(
                f"a workload has its own {' and '.join(given)}: leave {' and '.join(given)} out"
            )

    def unpacked(
        self, batch: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return the inputs and keywords of a batch that is given in any form that ``of`` takes.

        A single tuple, list or dict is unpacked, unless the example inputs are one such argument.
        """
        if not keywords and not self.keywords and len(batch) == len(self.step_inputs) > 1:
            return batch, keywords  # in the form of the example, as most loops give it
        if len(batch) == 1 and isinstance(batch[0], tuple | list | Mapping):
            with_target = TARGET in keywords and TARGET not in self.keywords
            if not keywords or (with_target and len(keywords) == 1):
                expected = leaves_by_path(self.step_inputs, self.keywords).keys()
                if leaves_by_path((*batch, *keywords.values()), {}).keys() != expected:
                    batch, inner = arguments(batch[0])
                    keywords = {**inner, **keywords}
        return self.bound(batch, keywords, training=self.training)

    def bound(
        self, inputs: Sequence[Any], keywords: Mapping[str, Any], *, training: bool
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return a call in the form of the example: the target last, in inference without it."""
        positional, named, target = tuple(inputs), keywords, ()
        if self.loss is not None:
            if new := [name for name in keywords if name not in self.keywords]:
                positional, named, _ = without_target(self.model, inputs, keywords, new)
            missing = sum(name not in named for name in self.keywords)
            is_named = len(positional) > len(inputs)
            if is_named or len(positional) > len(self.model_inputs) + missing:
                positional, target = positional[:-1], positional[-1:]
        if named.keys() != self.keywords.keys():
            positional, named = rearranged(
                self.model, positional, named, len(self.model_inputs), self.keywords
            )
        return ((*positional, *target) if training else positional), named

    @property
    def model_inputs(self) -> tuple[Any, ...]:
        """The positional arguments of the model itself."""
        return self.inputs[:-1] if self.loss is not None else self.inputs

    @property
    def without_loss(self) -> Workload:
        """The same forward pass, of the model alone."""
        return replace(self, inputs=self.model_inputs, loss=None)

    @property
    def step_inputs(self) -> tuple[Any, ...]:
        """The positional inputs of the step: those of the model, in training also the target."""
        return self.inputs if self.training else self.model_inputs

    def named_state(self) -> dict[str, torch.Tensor]:
        """Return parameters and buffers under every name they have in the model's state.

        In training, those of a loss function that is a module follow, as ``<loss>.name``.
        """
        state = _named_state(self.model)
        if self.training and isinstance(self.loss, nn.Module):
            state |= {f"{LOSS}.{name}": tensor for name, tensor in _named_state(self.loss).items()}
        return state


class LossModule(nn.Module):
    """The model with its loss: takes all inputs of a training step, returns the scalar loss."""

    def __init__(self, step: Workload) -> None:
        super().__init__()
        self.model = step.model
        self.loss = step.loss

    def forward(self, *inputs: Any, **keywords: Any) -> torch.Tensor:
        """Return the loss of one step."""
        return training_loss(self.model, self.loss, inputs, keywords)


class ModelAlone(nn.Module):
    """The model alone, wrapped as in a LossModule: takes the inputs of an inference step."""

    def __init__(self, step: Workload) -> None:
        super().__init__()
        self.model = step.model

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Return the model's output."""
        return self.model(*inputs, **keywords)


def unwrapped(name: str) -> str:
    """Return the name that a wrapper's parameter or buffer has in :meth:`Workload.named_state`."""
    owner, _, rest = name.partition(".")
    return rest if owner == WRAPPED else f"{LOSS}.{rest}"


def _unclear_target(model: nn.Module, keywords: Mapping[str, Any], names: Sequence[str]) -> str:
    forward = f"{type(model).__name__}.forward"
    apart = "give the target as the fourth value of the function (target= in Python)"
    if names:
        return (
            f"which of the inputs {' and '.join(map(repr, names))}, which {forward} does not take, "
            f"is the target of the loss function? Keep one of them, or {apart}"
        )
    return (
        f"the loss function has no target, since {forward} takes all inputs "
        f"({', '.join(map(repr, keywords))}): leave the loss function out if the model returns its "
        f"loss, or {apart}"
    )


def _named_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters, then buffers, like torch's iterators in a third of the time.

    Every placed step asks for them.
    """
    parameters: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}

    def collect(prefix: str, owner: nn.Module) -> None:
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                parameters[prefix + name] = parameter
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                buffers[prefix + name] = buffer
        for name, child in owner._modules.items():
            if child is not None:
                collect(f"{prefix}{name}.", child)

    collect("", module)
    return parameters | buffers


def check_inputs(inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
    """Raise StepError for arrays of numpy and for tensors that torch cannot find.

    Classes of objects that hold tensors are registered as pytrees. Tensors alone, as most loops
    give them, take no time: steps may take a millisecond.
    """
    if not keywords and all(isinstance(each, torch.Tensor) for each in inputs):
        return
    for each in (inputs, dict(keywords)):
        if refusal := flatten_objects(each, "input ") or array_refusal(each, "input "):
            raise StepError(refusal)


def training_loss(
    model: nn.Module,
    loss: Callable[[Any, Any], torch.Tensor] | None,
    inputs: Sequence[Any],
    keywords: Mapping[str, Any],
) -> torch.Tensor:
    """Run the forward pass of a training step on its inputs, the last one a loss function's target.

    Return the loss, or raise StepError if it is not scalar or the target is missing.
    """
    if loss is not None and not inputs:
        raise StepError(NO_TARGET)
    if loss is None:
        return scalar_loss(model(*inputs, **keywords), is_of_model=True)
    output = model(*inputs[:-1], **keywords)
    return scalar_loss(loss(output, inputs[-1]), is_of_model=False)


def scalar_loss(output: Any, *, is_of_model: bool) -> torch.Tensor:
    """Return the scalar loss in an output, of the model or of the loss function."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if not isinstance(loss, torch.Tensor) or loss.dim() > 0 or not loss.is_floating_point():
        shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
        returned = f"returned {shown or type(output).__name__}"
        if not is_of_model:
            raise StepError(
                f"a training step needs a scalar loss, but the loss function {returned}: return "
                "its mean or sum"
            )
        raise StepError(
            f"a training step needs a scalar loss, but no loss is given and the model {returned}: "
            "give a loss function (loss=, or as the third value of the target function) or place "
            "inference (training=False, --inference)"
        )
    return loss


def step_copy(step: Workload) -> Workload:
    """Return a copy of a step: of the model, the loss function and the inputs.

    Tensors that the model keeps from an earlier forward pass, such as the ``weight`` of
    ``nn.utils``' ``weight_norm``, are copied without their history; torch alone would refuse to.
    """
    with _WithoutHistory():
        return copy.deepcopy(step)


class _WithoutHistory(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[0].detach().clone()
        return func(*args, **(kwargs or {}))
