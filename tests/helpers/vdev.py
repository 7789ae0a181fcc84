"""A second torch device for tests: ``vdev`` computes on the CPU but is a separate device.

It refuses to mix devices in one op, as an accelerator does, and records transfers. Autograd allows
it one index only. It uses the random numbers and the autocast casts of the CPU, except that it
casts a parameter again for every reader.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

CPU = torch.device("cpu")
TRANSFERS: list[tuple[torch.device, torch.device, int]] = []
"""Recorded transfers: (source, destination, bytes)."""


@dataclass
class _Link:
    """Link of all copies from and to vdev; a speed limit makes them take at least that time."""

    bytes_per_s: float = math.inf

    def sends(self, source: torch.device, to: torch.device, size_bytes: int) -> None:
        TRANSFERS.append((source, to, size_bytes))
        if self.bytes_per_s < math.inf:
            time.sleep(size_bytes / self.bytes_per_s)


LINK = _Link()


class _Module:
    """Functions that torch requires of a device module."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def set_device(self, index: int) -> None:
        assert index == 0

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing: torch seeds the generator of the CPU itself."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16]

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)


class VTensor(Tensor):
    """Tensor on vdev that wraps the CPU tensor with its elements."""

    elements: Tensor

    @staticmethod
    def __new__(cls, elements: Tensor, device: torch.device) -> VTensor:
        tensor = Tensor._make_wrapper_subclass(
            cls,
            elements.size(),
            strides=elements.stride(),
            storage_offset=elements.storage_offset(),
            dtype=elements.dtype,
            device=device,
        )
        tensor.elements = elements
        return tensor

    def __init__(self, elements: Tensor, device: torch.device) -> None:
        pass

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it wrongly
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Handles ops without a VTensor argument: factories on vdev, and copies from the CPU to it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


@contextmanager
def vdev(link_bytes_per_s: float = math.inf) -> Iterator[torch.device]:
    """Yield the device, with copies no faster than ``link_bytes_per_s``."""
    if torch.cuda.is_available():
        raise RuntimeError("torch knows one accelerator: with vdev, CUDA would fail")
    TRANSFERS.clear()
    LINK.bytes_per_s = link_bytes_per_s
    try:
        with _Mode():  # type: ignore[no-untyped-call]
            yield torch.device("vdev", 0)
    finally:
        LINK.bytes_per_s = math.inf


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    aten = torch.ops.aten
    if func is aten.copy_.default:
        to, given = args[0], args[1]
        if to.device != given.device:
            LINK.sends(given.device, to.device, given.nbytes)
        _elements(to).copy_(_elements(given))
        return to
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    devices = {t.device for t in tensors if isinstance(t, VTensor) or t.dim()}
    if len(devices) > 1:
        raise RuntimeError(f"all tensors must be on one device, {func} has {devices}")
    asked = kwargs.get("device")
    wanted = None if asked is None else torch.device(asked)
    copies = func is aten._to_copy.default
    if copies and wanted is not None and wanted != args[0].device:
        LINK.sends(args[0].device, wanted, args[0].nbytes)
    device = wanted or (args[0].device if copies else next(iter(devices), CPU))
    on_cpu = {**kwargs, "device": CPU} if wanted is not None else kwargs
    out = ON_CPU.get(func, func)(*tree_map(_elements, args), **tree_map(_elements, on_cpu))
    if device.type != "vdev":
        return out
    wrapped = tree_map(lambda t: VTensor(t, device) if isinstance(t, Tensor) else t, out)
    if copies:
        return wrapped
    return return_and_correct_aliasing(func, args, kwargs, wrapped)  # type: ignore[no-untyped-call]


def _elements(leaf: Any) -> Any:
    return leaf.elements if isinstance(leaf, VTensor) else leaf


def _lstm_cell(
    inputs: Tensor, hidden: Tensor, cell: Tensor, *biases: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden state, cell and gates as the fused kernel of accelerators does."""
    gates = inputs + hidden + sum(bias for bias in biases if bias is not None)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    new_cell = f * cell + i * g
    return o * new_cell.tanh(), new_cell, torch.cat([i, f, g, o], 1)


def _lstm_cell_backward(
    to_hidden: Tensor | None,
    to_cell: Tensor | None,
    cell: Tensor,
    new_cell: Tensor,
    gates: Tensor,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    i, f, g, o = gates.chunk(4, 1)
    hidden = torch.zeros_like(new_cell) if to_hidden is None else to_hidden
    shown = new_cell.tanh()
    inner = hidden * o * (1 - shown * shown) + (0 if to_cell is None else to_cell)
    to_gates = [
        inner * g * i * (1 - i),
        inner * cell * f * (1 - f),
        inner * i * (1 - g * g),
        hidden * shown * o * (1 - o),
    ]
    whole = torch.cat(to_gates, 1)
    return whole, inner * f, whole.sum(0) if has_bias else None


def _gru_cell(
    inputs: Tensor,
    hidden: Tensor,
    before: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return hidden state and saved tensors as the fused kernel of accelerators does."""
    inputs = inputs if input_bias is None else inputs + input_bias
    hidden = hidden if hidden_bias is None else hidden + hidden_bias
    (ir, iz, i_new), (hr, hz, h_new) = inputs.chunk(3, 1), hidden.chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    new = (i_new + r * h_new).tanh()
    return new + z * (before - new), torch.cat([r, z, new, before, h_new], 1)


def _gru_cell_backward(
    to_hidden: Tensor, kept: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    r, z, new, before, h_new = kept.chunk(5, 1)
    to_new = to_hidden * (1 - z) * (1 - new * new)
    to_r = to_new * h_new * r * (1 - r)
    to_z = to_hidden * (before - new) * z * (1 - z)
    to_inputs = torch.cat([to_r, to_z, to_new], 1)
    to_gates = torch.cat([to_r, to_z, to_new * r], 1)
    biases = (to_inputs.sum(0), to_gates.sum(0)) if has_bias else (None, None)
    return to_inputs, to_gates, to_hidden * z, *biases


def _histc(counted: Tensor, *limits: Any, **named: Any) -> Tensor:
    """Return a histogram, of integers too, as accelerators do."""
    return torch.histc(counted.float(), *limits, **named).to(counted.dtype)


ON_CPU: dict[Any, Any] = {
    torch.ops.aten.histc.default: _histc,
    torch.ops.aten._thnn_fused_gru_cell.default: _gru_cell,
    torch.ops.aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
    torch.ops.aten._thnn_fused_lstm_cell.default: _lstm_cell,
    torch.ops.aten._thnn_fused_lstm_cell_backward_impl.default: _lstm_cell_backward,
}
AUTOCAST = "AutocastPrivateUse1"
LOWER = (
    *("conv1d", "conv2d", "conv3d", "mm", "bmm", "addmm", "baddbmm", "addbmm", "linear", "matmul"),
    "scaled_dot_product_attention",
)
WIDER = (
    *("cross_entropy_loss", "nll_loss", "mse_loss", "l1_loss", "huber_loss", "smooth_l1_loss"),
    *("kl_div", "binary_cross_entropy", "binary_cross_entropy_with_logits", "prod"),
)
"""Some of the ops that autocast on CPUs runs in lower precision, and in 32 bits."""


def _add_autocast() -> list[Any]:
    library: Any = torch.library.Library  # torch leaves it untyped
    every, aten = library("_", "IMPL"), library("aten", "IMPL")
    every.fallback(torch.library.fallthrough_kernel, AUTOCAST)
    for name in (*LOWER, *WIDER):
        kernel = partial(_autocast, getattr(torch.ops.aten, name).default, name in LOWER)
        aten.impl(name, kernel, AUTOCAST)
    return [every, aten]


def _autocast(func: Any, lower: bool, *args: Any, **kwargs: Any) -> Any:
    dtype = torch.get_autocast_dtype("vdev") if lower else torch.float32

    def cast(leaf: Any) -> Any:
        floats = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if floats and leaf.dtype != torch.float64 else leaf

    key = torch._C._parse_dispatch_key(AUTOCAST)
    assert key is not None
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
        return func(*tree_map(cast, args), **tree_map(cast, kwargs))


# Before the first backward pass, or autograd does not know the device. Not with a CUDA device,
# whose place as the accelerator it would take.
if not torch.cuda.is_available():
    _setup_privateuseone_for_python_backend("vdev", backend_module=_Module())
    _LIBRARIES = _add_autocast()  # effective only while this reference lives
