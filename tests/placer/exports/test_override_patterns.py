"""Overrides of llama.cpp, tested on the tensor names of its own library."""

from __future__ import annotations

import re

import pytest
import torch
from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES, MODEL_TENSORS, TENSOR_NAMES
from torch import Tensor, nn

from graphs.extract import Workload, extract
from graphs.graph import attributes_of
from placer.exports.override_patterns import WEIGHTS, override_patterns
from placer.exports.placed_modules import PlacedModules
from placer.exports.renaming import ExportError
from tests.helpers.in_turn import in_turn
from tests.helpers.placed_at_random import cut_placement, placement_of
from tests.placer.exports.test_export import cut, extracted

WITH_EXPERTS = [
    arch
    for arch, tensors in MODEL_TENSORS.items()
    if any(TENSOR_NAMES[tensor].endswith("_exps") for tensor in tensors)
]
NO_WEIGHTS_OF_EXPERTS = {"ffn_norm_exps"}  # read by experts, but not part of them


def experts_on(name: str, device_of_layer: tuple[str, ...]) -> PlacedModules:
    """Return all modules on cuda:0, except the experts of each layer on these devices."""
    extraction = extracted(name)
    names = tuple(dict.fromkeys(("cuda:0", *device_of_layer)))
    devices = []
    for node in extraction.graph:
        module = attributes_of(extraction.graph, node)["module"]
        layer = re.search(r"layers\.(\d+)\..*experts", module)
        devices.append(names.index(device_of_layer[int(layer[1])]) if layer else 0)
    return PlacedModules.of(extraction, placement_of(extraction.graph, names, devices))


@pytest.mark.slow
@pytest.mark.parametrize("name", in_turn(["experts", "mixtral", "separate_moe"]))
def test_overrides_match_the_tensors_of_the_experts_and_no_others(name: str) -> None:
    found = override_patterns(experts_on(name, ("cpu", "cuda:1"))).content
    rules = [rule.rpartition("=") for rule in found.split(",")]

    def buffer_of(tensor: str) -> list[str]:
        return [buffer for pattern, _, buffer in rules if re.search(pattern, tensor)]

    for kind in ("up", "down", "gate"):
        assert buffer_of(f"blk.0.ffn_{kind}_exps.weight") == ["CPU"]
        assert buffer_of(f"blk.1.ffn_{kind}_exps.weight") == ["CUDA1"]
        assert buffer_of(f"blk.10.ffn_{kind}_exps.weight") == []
    assert buffer_of("blk.0.ffn_gate_inp.weight") == []
    assert buffer_of("blk.0.attn_q.weight") == []


def test_models_without_experts_have_nothing_to_override() -> None:
    with pytest.raises(ExportError, match="no layers with experts"):
        override_patterns(cut("llama", "model.layers.1"))


@pytest.fixture(scope="module")
def rules() -> list[tuple[str, str]]:
    """Return (pattern, buffer) pairs of two expert layers, on the CPU and on cuda:1."""
    text = override_patterns(experts_on("experts", ("cpu", "cuda:1"))).content
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


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return sum((expert(x) for expert in self.experts), torch.zeros(()))


class EncoderAndDecoder(nn.Module):
    def __init__(self, *, first: type[nn.Module]) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*(first() for _ in range(2)))
        self.decoder = nn.Sequential(*(Layer() for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.decoder(self.encoder(x))
        return out


@pytest.mark.slow
def test_layers_of_two_stacks_have_one_number_so_that_one_alone_may_have_experts() -> None:
    def placed(first: type[nn.Module]) -> PlacedModules:
        model = EncoderAndDecoder(first=first)
        extraction = extract(Workload.of(model, torch.randn(3, 2), training=False))
        placement = cut_placement(extraction, ("cpu", "cuda:0"), ("decoder",), of_calls=True)
        return PlacedModules.of(extraction, placement)

    with pytest.raises(ExportError, match="experts in 2 lists of layers, encoder, decoder, but"):
        override_patterns(placed(Layer))
    content = override_patterns(placed(nn.Tanh)).content
    assert content == rf"blk\.(0|1|2)\.{WEIGHTS}=CUDA0"
