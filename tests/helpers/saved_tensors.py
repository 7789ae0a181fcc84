"""Tensors that autograd saves for the backward pass of a real step."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from graphs.extract import Workload
from tests.helpers.tiny_models import forward


def saved_bytes(step: Workload) -> int:
    """Return the bytes saved from forward to backward; the step is not changed.

    Parameters, buffers and inputs exist anyway and do not count.
    """
    step = copy.deepcopy(step)
    leaves = tree_leaves((step.inputs, dict(step.keywords)))
    there = [*step.named_state().values(), *(x for x in leaves if isinstance(x, Tensor))]
    known = {tensor.untyped_storage().data_ptr() for tensor in there}
    saved: dict[int, int] = {}
    alive = []  # keeps storages from being reused

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            alive.append(tensor)
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward(step)
    assert loss.requires_grad
    return sum(saved.values())
