"""Measure how fast this machine encodes and decodes gradients: the compute cost of a payload."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

import torch

from placer.parallel.methods.onebit import Coder

ROUNDS: Final = 15
_Coding: TypeAlias = Callable[[torch.Tensor, Sequence[int], int], Callable[[], object]]
"""Maps (flat gradients, parameter sizes, ranks) to a function that codes them once."""


def coding_bytes_per_s(
    payload: str, sizes: Sequence[int], ranks: int, before: Callable[[], object] = lambda: None
) -> float | None:
    """Return the bytes of fp32 gradients per second that a rank encodes and decodes.

    The median over some rounds with random gradients of parameters of these sizes, in one bucket on
    the CPU, with torch's current number of threads. None for payloads without coding, such as fp32.
    It is the ``coding_bytes_per_s`` of :class:`placer.Replication`. For ``before`` see
    :func:`median_s`.
    """
    if payload not in CODINGS:
        return None
    flat = torch.randn(sum(sizes))
    return flat.nbytes / median_s(CODINGS[payload](flat, sizes, ranks), before)


def median_s(work: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Return the median seconds of ``work`` over ``ROUNDS`` runs, after one warm-up run.

    ``before`` runs untimed before each of them, e.g. a backward pass, to leave caches in the state
    that they have in a step.
    """
    work()
    seconds = []
    for _ in range(ROUNDS):
        before()
        start_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start_s)
    return statistics.median(seconds)


def _one_bit(flat: torch.Tensor, sizes: Sequence[int], ranks: int) -> Callable[[], object]:
    coder = Coder.of_sizes(sizes, ranks, 0)

    def code() -> torch.Tensor:
        # the rows of the other ranks are copies of a row of this one
        wire = coder.encoded(flat)
        answer = coder.answer(wire[:1].expand(ranks, -1))
        return flat.copy_(coder.decoded(answer.repeat(ranks))[: flat.numel()])

    return code


def _narrow(dtype: torch.dtype) -> _Coding:
    return lambda flat, _, ranks: lambda: flat.copy_(flat.div_(ranks).to(dtype))


CODINGS: Final[Mapping[str, _Coding]] = {
    "fp16": _narrow(torch.float16),
    "bf16": _narrow(torch.bfloat16),
    "1-bit": _one_bit,
}
"""By payload, see ``envs.collectives.PAYLOADS``."""
