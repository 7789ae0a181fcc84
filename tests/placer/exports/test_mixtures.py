"""Mixtures of experts of transformers: extracted, run on cores, and exported as device maps."""

from __future__ import annotations

import copy

import pytest
import torch

from graphs.extract import Extraction, extract
from placer.exports.device_map import device_map
from placer.exports.format import export_extracted
from tests.helpers import tiny_transformers
from tests.helpers.in_turn import in_turn
from tests.helpers.placed_at_random import cut_placement
from tests.helpers.placed_steps import CORES, on_cores
from tests.helpers.tiny_models import assert_same, eager

pytest.importorskip("transformers")


def extracted(name: str, *, training: bool) -> Extraction:
    return extract(tiny_transformers.load(tiny_transformers.MIXTURES[name], training=training))


@pytest.mark.slow
@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", tiny_transformers.MIXTURES)
def test_mixtures_of_experts_run_on_cores_as_they_are(name: str, training: bool) -> None:
    extraction = extracted(name, training=training)
    assert (extraction.extractor, extraction.depends_on_data) == ("export", ())
    step = extraction.step
    expected = eager(copy.deepcopy(step))
    with on_cores(extraction) as placed:
        output = placed.step(*step.step_inputs, **step.keywords)
        assert_same(getattr(output, "logits", output), _logits(expected.output))
        if training:
            gradients = {n: p.grad for n, p in step.model.named_parameters() if p.grad is not None}
            assert_same(gradients, expected.gradients)


def _logits(output: object) -> torch.Tensor:
    tensor = getattr(output, "logits", output)
    assert isinstance(tensor, torch.Tensor)
    return tensor.detach()


@pytest.mark.slow
@pytest.mark.parametrize("name", in_turn(tiny_transformers.MIXTURES, slow=["qwen2_moe", "mixtral"]))
def test_mixtures_of_experts_have_device_maps(name: str) -> None:
    extraction = extracted(name, training=False)
    placement = cut_placement(extraction, ("cuda:0", "cuda:1"), ("model.layers.1",), of_calls=True)
    content = export_extracted(device_map, extraction, placement, main_device="cuda:1").content
    assert content["model.layers.0"] == 0
    assert {content[path] for path in content if path.startswith("model.layers.1")} == {1}
