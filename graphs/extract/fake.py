"""Tracing a model on the meta device: the same step on fake tensors of the CPU.

Fake tensors have shapes and devices but no memory, so that a model of any size can be traced. The
meta device itself will not do: its ops are not those of a device that runs them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from graphs.extract.step import ExtractionError, Step
from graphs.extract.substitute import substituted

Leaf = TypeVar("Leaf")


@contextlib.contextmanager
def without_meta(step: Step) -> Iterator[Step]:
    """Yield the step on fake tensors, or as it is if nothing is on the meta device.

    The model is the same object; on exit it has its own parameters and buffers back.
    """
    if not _has_meta(step.named_state()):
        yield step
        return
    fakes = _Fakes()
    with substituted(step, fakes.of):
        yield replace(
            step,
            inputs=tree_map(fakes.of, step.inputs),
            keywords=tree_map(fakes.of, dict(step.keywords)),
        )


def check_has_memory(step: Step) -> None:
    """Raise if the step cannot be run because tensors of it are on the meta device.

    Raises:
        ExtractionError: it has such tensors.
    """
    for what, tensors in (
        ("parameters", step.named_state()),
        ("inputs", (step.inputs, dict(step.keywords))),
    ):
        if _has_meta(tensors):
            raise ExtractionError(
                f"{what} of {type(step.model).__name__} are on the meta device, which has shapes "
                "but no values, so that nothing can be run or measured: make them on the CPU, or "
                "extract the graph alone (placer extract --costs none)"
            )


def _has_meta(tensors: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in tree_leaves(tensors))


class _Fakes:
    """Makes one fake tensor for each tensor, so that tied parameters stay tied."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.known: dict[int, torch.Tensor] = {}

    def of(self, leaf: Leaf) -> Leaf | torch.Tensor:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in self.known:
            with self.mode:
                fake = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)
                fake.requires_grad_(leaf.requires_grad)
            if isinstance(leaf, nn.Parameter):
                fake = nn.Parameter(fake.detach(), requires_grad=leaf.requires_grad)
            self.known[id(leaf)] = fake
        return self.known[id(leaf)]
