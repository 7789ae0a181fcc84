"""Ops that torch decomposes in traces of training steps, but not in eager mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch._C import DispatchKey
from torch._higher_order_ops import effects

from graphs.extract.kernels.recurrent import layers_as_in_eager_mode

UPSAMPLING: Final = (
    *(f"{kind}{n}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3)),
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"),
)
"""Operators with kernels of their own for forward and backward."""
CHECK: Final = "aten::_linalg_check_errors"


@contextlib.contextmanager
def trained_as_in_eager_mode() -> Iterator[None]:
    """Trace recurrent layers, upsampling and inverses with the ops of eager mode."""
    with layers_as_in_eager_mode(), _upsampled_by_kernels(), _unchecked_inverses():
        yield


@contextlib.contextmanager
def _upsampled_by_kernels() -> Iterator[None]:
    """Take torch's Python decompositions of upsampling away, which gather every pixel apart."""
    taken: list[tuple[Any, dict[Any, Any]]] = []
    for name in UPSAMPLING:
        for overload in ("default", "vec"):
            op = getattr(getattr(torch.ops.aten, name), overload, None)
            if op is not None:
                taken.append((op, dict(op.py_kernels)))
    try:
        for op, _ in taken:
            op.py_kernels.pop(DispatchKey.Autograd, None)
            op.py_kernels.pop(DispatchKey.CompositeImplicitAutograd, None)
            op._dispatch_cache.clear()
        yield
    finally:
        for op, kernels in taken:
            op.py_kernels |= kernels
            op._dispatch_cache.clear()


@contextlib.contextmanager
def _unchecked_inverses() -> Iterator[None]:
    """Let inverses and factors be traced without their check that matrices are regular.

    Since torch 2.13 that check is an ordered effect, for which a trace has an input of its own.
    """
    effect = effects._get_effect(CHECK) if hasattr(effects, "_get_effect") else None
    if effect is None:
        yield
        return
    effects._register_effectful_op(CHECK, None)
    try:
        yield
    finally:
        effects._register_effectful_op(CHECK, effect)
