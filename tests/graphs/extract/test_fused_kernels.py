"""Kernels that the model calls itself stay one op, forward and backward."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from graphs.extract import Extraction, Workload, extract
from graphs.graph import attributes_of
from tests.helpers import tiny_transformers
from tests.helpers.tiny_models import Plain, squared

ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
BOTH = pytest.mark.parametrize("extractor", ["export", "dispatch"])
PARTS = ("softmax", "bmm", "baddbmm")
"""Ops of attention and of products of experts that are not fused."""


def attention(model: Any, x: Tensor) -> Tensor:
    query, key, value = model.project(x).unflatten(-1, (3, 2, 4)).movedim(2, 0).transpose(2, 3)
    mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
    return mixed.transpose(1, 2).flatten(2)


def counted(extraction: Extraction) -> Counter[tuple[str, str]]:
    """Return how many ops of each name there are in each phase."""
    graph = extraction.graph
    return Counter(
        (attributes_of(graph, op)["op"], attributes_of(graph, op)["phase"]) for op in graph
    )


def are_whole(ops: Counter[tuple[str, str]]) -> bool:
    return not any(part in name for name, _ in ops for part in PARTS)


@BOTH
def test_attention_is_one_op_forward_and_one_backward(extractor: str) -> None:
    torch.manual_seed(0)
    model = Plain(attention, project=nn.Linear(8, 24))
    step = Workload.of(model, (torch.randn(2, 6, 8), torch.randn(2, 6, 8)), squared)
    ops = counted(extract(step, extractor))
    assert (ops[ATTENTION, "forward"], ops[f"{ATTENTION}_backward", "backward"]) == (1, 1)
    assert are_whole(ops)


@pytest.mark.slow
@BOTH
def test_products_of_all_experts_of_a_layer_are_one_op(extractor: str) -> None:
    pytest.importorskip("transformers")
    name = tiny_transformers.MIXTURES["mixtral"]
    ops = counted(extract(tiny_transformers.load(name, training=True), extractor))
    # Two layers with two products each; only the operator of transformers has one op for both
    # gradients.
    product, of_gradients, per_product = {
        "export": ("grouped_mm_fallback", "grouped_mm_fallback_backward", 1),
        "dispatch": ("_grouped_mm", "_grouped_mm", 2),
    }[extractor]
    assert ops[product, "forward"] == 4
    assert ops[of_gradients, "backward"] == 4 * per_product
    assert ops[ATTENTION, "forward"] == ops[f"{ATTENTION}_backward", "backward"] == 2
    assert not any(name in ("bmm", "baddbmm") for name, _ in ops)
