"""Ways in which Python reads values of tensors, for tensors that are traced by functionalization.

Torch's own ways go around the dispatcher and fail. Here each reads numbers by ops, which a
recording sees and marks as reads, or is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final, NoReturn

import torch
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.functional import pad
from torch.nn.utils import rnn

from graphs.extract.errors import running_line
from graphs.workload import ExtractionError

PACK: Final = "_pack_padded_sequence"
PAD_AGAIN: Final = "_pad_packed_sequence"
"""Torch's kernels for packed sequences."""


@contextlib.contextmanager
def readable() -> Iterator[None]:
    """Let traced tensors be read as lists, as texts, and as lengths of packed sequences."""
    kernels: Any = rnn._VF  # type: ignore[attr-defined]  # where torch looks its own kernel up
    original = getattr(kernels, PAD_AGAIN)

    def padded(data: torch.Tensor, sizes: torch.Tensor, *options: Any) -> Any:
        unpack = _padded if isinstance(sizes, FunctionalTensor) else original
        return unpack(data, sizes, *options)

    with contextlib.ExitStack() as restored:
        for owner, name, new in (
            (FunctionalTensor, "tolist", _listed),
            (FunctionalTensor, "numpy", _array),
            (FunctionalTensor, "__format__", _formatted),
            (kernels, PAD_AGAIN, padded),
        ):
            if name in vars(owner):
                restored.callback(setattr, owner, name, vars(owner)[name])
            else:
                restored.callback(delattr, owner, name)
            setattr(owner, name, new)
        yield


def _listed(tensor: torch.Tensor) -> Any:
    return [_listed(part) for part in tensor.unbind()] if tensor.dim() else tensor.item()


def _array(tensor: torch.Tensor, *, force: bool = False) -> NoReturn:
    line = running_line()
    raise ExtractionError(
        f"the model calls .numpy(){f' ({line})' if line else ''}, and what it computes outside of "
        "torch cannot be recorded; compute it by torch"
    )


def _formatted(tensor: torch.Tensor, form: str) -> str:
    return format(tensor.item(), form) if not tensor.dim() else object.__format__(tensor, form)


def _padded(
    data: torch.Tensor,
    sizes: torch.Tensor,
    batch_first: bool,
    padding_value: float,
    total_length: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return padded sequences and their lengths, as torch's kernel does."""
    counts: list[int] = sizes.tolist()
    batch, length = counts[0], len(counts)
    if 0 < total_length < length:
        raise RuntimeError(
            "Expected total_length to be at least the length of the longest sequence in input, "
            f"but got total_length={total_length} and max sequence length being {length}"
        )
    beside = (0, 0) * (data.dim() - 1)
    rows = [
        pad(row, (*beside, 0, batch - count), value=padding_value)
        for row, count in zip(torch.split(data, counts), counts, strict=True)
    ]
    rows += [torch.full_like(rows[0], padding_value)] * (max(total_length, length) - length)
    lengths = [sum(count > i for count in counts) for i in range(batch)]
    return torch.stack(rows, 1 if batch_first else 0), torch.tensor(lengths)
