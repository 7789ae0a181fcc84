"""Comparison of traced and eager results, for models that ask torch whether they are traced.

A model that asks (``torch.compiler.is_exporting()``) may take another path then than in eager mode,
as attention masks of transformers and the encoders of torch do. Such a model is run once in eager
mode on the example inputs, and what the traced step gives must agree.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any, Final

import torch
from torch import nn
from torch.fx._symbolic_trace import is_fx_tracing
from torch.nn.modules import module as hooks
from torch.utils._pytree import tree_leaves

from graphs.extract.autocast import autocast
from graphs.extract.convert import Traced
from graphs.extract.eager import has_no_values, run_step, runnable
from graphs.extract.errors import TORCH, line_of, sentences, shown_lines
from graphs.extract.export.parts import Parts
from graphs.extract.model_state import copier, substituted, with_distinct_inputs
from graphs.precision import FULL
from graphs.workload import WRAPPED, ExtractionError, StepError, Workload, unwrapped

FLAGS: Final[tuple[Any, ...]] = (
    torch.compiler.is_compiling,
    torch.compiler.is_exporting,
    is_fx_tracing,
)
"""Functions that answer otherwise while torch traces; those of transformers call them."""
LAYERS: Final = str(Path(torch.nn.__file__).parent)
SHARE_OF_ALL: Final = 1e-3
"""A tensor counts as at least this share of the largest of its kind: gradients that cancel out
consist of rounding alone."""


# --- who asks


@contextlib.contextmanager
def asking_lines(*, hidden: bool = False) -> Iterator[dict[str, None]]:
    """Yield the lines of a model, as they run, that ask and get another answer than in eager mode.

    Layers of torch ask, too; by the functions that a tensor overrides, for one. With ``hidden``,
    these functions answer code outside of torch as in eager mode.
    """
    lines: dict[str, None] = {}
    overridden = torch.overrides.has_torch_function

    def noted(answer: bool, frame: FrameType | None) -> bool:
        while frame is not None and frame.f_code.co_name.startswith(("is_", "_is_")):
            frame = frame.f_back  # a function that asks for its caller
        if answer and frame is not None and not _is_torch_itself(frame):
            lines[line_of(frame)] = None
            return not hidden or frame.f_code.co_filename.startswith(TORCH)
        return answer

    def is_overridden(args: Iterable[Any]) -> bool:
        return noted(overridden(args), sys._getframe(1))

    with contextlib.ExitStack() as restored:
        for flag in FLAGS:
            restored.enter_context(_answered(flag, noted))
        restored.callback(setattr, torch.overrides, "has_torch_function", overridden)
        torch.overrides.has_torch_function = is_overridden
        yield lines


@contextlib.contextmanager
def _answered(
    flag: FunctionType, answered: Callable[[bool, FrameType | None], bool]
) -> Iterator[None]:
    """Let a function return ``answered(its answer, the frame of its caller)``.

    Its code is replaced, since modules that imported the function have it under their own names.
    """
    code, defaults = flag.__code__, flag.__kwdefaults__
    original = FunctionType(code, flag.__globals__)

    def asking(*, answer: Callable[[], bool]) -> bool:
        return answer()

    def answer() -> bool:
        return answered(original(), sys._getframe(2))

    flag.__code__, flag.__kwdefaults__ = asking.__code__, {"answer": answer}
    try:
        yield
    finally:
        flag.__code__, flag.__kwdefaults__ = code, defaults


def _is_torch_itself(frame: FrameType) -> bool:
    """Return whether a frame is of torch, but of no layer, or calls the hooks of one."""
    file = frame.f_code.co_filename
    is_layer = file.startswith(LAYERS) and file != hooks.__file__
    return file.startswith(TORCH) and not is_layer


# --- what a step gives


@dataclass(frozen=True, slots=True)
class Results:
    """Results of a step on the example inputs; buffers have their values after the step."""

    outputs: Sequence[torch.Tensor]
    gradients: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]


def exported_results(step: Workload, traced: Traced) -> Results:
    """Run an exported step on copies of its state, with the random numbers of an eager run."""
    exported = traced.exported
    assert exported is not None
    positional, keywords = Parts(with_distinct_inputs(step)).arguments
    whole = replace(step, model=exported, loss=None, training=False, optimizer=None)
    clones = copier(lambda tensor: tensor.detach().clone())
    named: Callable[[str], str] = unwrapped if traced.prefix == WRAPPED else str
    with torch.random.fork_rng(devices=[]), substituted(whole, clones):
        with autocast(step.dtype):
            output = exported(*positional, **keywords)
        state = {named(name): tensor for name, tensor in whole.named_state().items()}
        return _results(output, state, training=step.training)


def _eager_results(step: Workload) -> Results:
    with runnable(step) as copy:
        return _results(run_step(copy), copy.named_state(), training=step.training)


def _results(output: Any, state: Mapping[str, torch.Tensor], *, training: bool) -> Results:
    """Run the backward pass of a training step; no gradient counts as zeros."""
    parameters = {name: own for name, own in state.items() if isinstance(own, nn.Parameter)}
    gradients: dict[str, torch.Tensor] = {}
    if training:
        for own in parameters.values():
            own.grad = None
        output.backward()
        gradients = {
            name: torch.zeros_like(own) if own.grad is None else own.grad
            for name, own in parameters.items()
            if own.requires_grad
        }
    return Results(
        [leaf.detach() for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)],
        gradients,
        {name: own.detach() for name, own in state.items() if name not in parameters},
    )


# --- whether it is the same


def exported_like_eager(step: Workload, export: Callable[[], Traced]) -> Traced:
    """Export a step by a function, and check that it gives what the model gives in eager mode.

    A model that asks torch whether it is traced, and then fails or computes something else, is
    exported once more, with the answers of eager mode.
    """
    lines: dict[str, None] = {}

    def exported(*, hidden: bool) -> Traced:
        nonlocal lines
        with asking_lines(hidden=hidden) as lines:
            traced = export()
            check_like_eager(step, lines, lambda: exported_results(step, traced), "exported")
            return traced

    try:
        return exported(hidden=False)
    except StepError:
        raise
    except Exception:
        if lines:
            with contextlib.suppress(Exception):
                return exported(hidden=True)
        raise


def check_like_eager(
    step: Workload, lines: dict[str, None], traced: Callable[[], Results], verb: str
) -> None:
    """Raise ExtractionError if a model that asks computes something else than in eager mode.

    ``lines`` are those that ask; ``traced`` returns what was computed, and ``verb`` is what was
    done to the model, as in "exported". A step on fake tensors has no values, and one whose own
    results differ from run to run cannot be compared.
    """
    if not lines or has_no_values(step):
        return
    eager = _eager_results(step)
    found = _difference(traced(), eager, step)
    if found and not _difference(_eager_results(step), eager, step):
        advice = "Let it compute the same in either case"
        if any(
            isinstance(part, nn.TransformerEncoder) and part.enable_nested_tensor
            for part in step.model.modules()
        ):
            advice = "Make nn.TransformerEncoder with enable_nested_tensor=False"
        shown = shown_lines(tuple(reversed(lines)))  # libraries ask first for their own records
        mode = "training step" if step.training else "inference"
        raise ExtractionError(
            sentences(
                f"{type(step.model).__name__} cannot be {verb} for {mode}: it asks torch whether "
                f"it is traced ({shown}) and then computes something else than "
                f"in eager mode: {found}",
                advice,
            )
        )


def _difference(found: Results, expected: Results, step: Workload) -> str:
    """Return the largest difference of the first kind that has one, as a phrase, or "".

    Rounding leaves two thirds of the digits of the lowest precision: 5 of 7 in fp32, where other
    kernels for the same sums left 6 in gradients of 24 layers, and 1.4 of 2.1 in bf16 (1.9).
    """
    if len(found.outputs) != len(expected.outputs):
        return f"{len(found.outputs)} outputs instead of {len(expected.outputs)}"
    kinds = (
        (_named(found.outputs, step), _named(expected.outputs, step)),
        (found.gradients, expected.gradients),
        (found.buffers, expected.buffers),
    )
    dtypes = {tensor.dtype for _, tensors in kinds for tensor in tensors.values()}
    if step.dtype != FULL:
        dtypes.add(torch.bfloat16)
    eps = max((torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point), default=0.0)
    for ours, theirs in kinds:
        pairs = {name: (ours[name], tensor) for name, tensor in theirs.items() if name in ours}
        of_all = SHARE_OF_ALL * max((_largest(tensor) for _, tensor in pairs.values()), default=0.0)
        shares = {
            name: _distance(one, other) / max(_largest(other) + of_all, 1e-300)
            for name, (one, other) in pairs.items()
        }
        worst = max(shares, key=lambda name: shares[name], default="")
        if worst and shares[worst] > eps ** (2 / 3):
            what = f"the gradient of {worst}" if theirs is expected.gradients else worst
            one, other = pairs[worst]
            if one.numel() == other.numel() == 1:
                return f"{what} is {one.item():.6g} instead of {other.item():.6g}"
            return f"{what} differs by {shares[worst]:.2g} of its largest number"
    return ""


def _named(outputs: Sequence[torch.Tensor], step: Workload) -> dict[str, torch.Tensor]:
    if len(outputs) == 1:
        return {"the loss" if step.training else "the output": outputs[0]}
    return {f"tensor {i} of the output": tensor for i, tensor in enumerate(outputs)}


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference of two tensors, infinite if their kinds differ."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    if torch.equal(one, other):
        return 0.0
    if not (one.is_floating_point() or one.is_complex()):
        return float("inf")
    same = torch.isclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
    apart = (one - other).abs().masked_fill(same, 0.0).double()
    return float(apart.nan_to_num(nan=float("inf")).max())


def _largest(tensor: torch.Tensor) -> float:
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    return float(tensor.abs().double().nan_to_num(0.0, 0.0, 0.0).max())
