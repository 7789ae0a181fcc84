"""Overrides of llama.cpp against the names that its own library gives to tensors."""

from __future__ import annotations

import re

import pytest
from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES, MODEL_TENSORS, TENSOR_NAMES
from test_export import experts_on

from placer.export.override_regex import override_regex

WITH_EXPERTS = [
    arch
    for arch, tensors in MODEL_TENSORS.items()
    if any(TENSOR_NAMES[tensor].endswith("_exps") for tensor in tensors)
]
NO_WEIGHTS_OF_EXPERTS = {"ffn_norm_exps"}  # what experts read, not what they are


@pytest.fixture(scope="module")
def rules() -> list[tuple[str, str]]:
    """(pattern, buffer) of two layers of experts, the first on the CPU, the second on cuda:1."""
    text = override_regex(experts_on("separate_moe", ("cpu", "cuda:1"))).content
    return [(rule.rpartition("=")[0], rule.rpartition("=")[2]) for rule in text.split(",")]


@pytest.mark.parametrize("arch", WITH_EXPERTS, ids=lambda arch: MODEL_ARCH_NAMES[arch])
def test_experts_of_every_architecture_are_matched_and_nothing_else(
    arch: MODEL_ARCH, rules: list[tuple[str, str]]
) -> None:
    for tensor in MODEL_TENSORS[arch]:
        for layer in range(12):
            name = f"{TENSOR_NAMES[tensor].format(bid=layer)}.weight"
            kind = name.split(".")[-2]
            is_expert = kind.endswith("exps") and kind not in NO_WEIGHTS_OF_EXPERTS
            found = [buffer for pattern, buffer in rules if re.search(pattern, name)]
            assert found == ([["CPU"], ["CUDA1"]][layer] if is_expert and layer < 2 else [])


def test_there_are_architectures_with_experts() -> None:
    assert {MODEL_ARCH.LLAMA, MODEL_ARCH.QWEN3MOE, MODEL_ARCH.DEEPSEEK2} <= set(WITH_EXPERTS)
