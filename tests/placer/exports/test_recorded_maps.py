"""Device maps of recorded steps, by the exported forward pass of the model alone."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

from graphs.extract import Extraction, extract
from graphs.graph import attributes_of
from placer.exports.device_map import device_map
from placer.exports.format import export_extracted
from placer.exports.placed_modules import PlacedModules
from tests.fake_cuda import fake_cuda
from tests.helpers.placed_at_random import placement_of
from tests.placer.exports.test_device_map import (
    GPUS,
    PAIR,
    STEPS,
    accelerate,
    extracted,
    trained,
)


@functools.cache
def recorded(name: str) -> Extraction:
    return extract(STEPS[name](), "dispatch")


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("name", "on_second"),
    [
        ("meeting", ("right",)),
        ("contrast", ("text",)),
        ("conv_net", ("4", "5", "6", "7")),
        pytest.param("llama", ("model.layers.1",), marks=pytest.mark.slow),
    ],
)
def test_the_map_of_a_recording_is_that_of_its_export(
    name: str, on_second: tuple[str, ...]
) -> None:
    maps = []
    for extraction in (extracted(name), recorded(name)):
        graph = extraction.graph
        devices = [int(attributes_of(graph, op)["module"].startswith(on_second)) for op in graph]
        placement = placement_of(graph, GPUS, devices)
        exported = export_extracted(device_map, extraction, placement)
        maps.append(exported.content)
    assert maps[0] == maps[1]
    assert set(maps[1].values()) == {0, 1}
    if name in {"conv_net", "llama"}:  # their layers are placed as a map can have them
        assert exported.moved_op_count == 0


def test_accelerate_trains_by_the_map_of_a_recording() -> None:
    extraction = recorded("meeting")
    step, graph = extraction.step, extraction.graph
    devices = [int(attributes_of(graph, op)["module"] == "right.0") for op in graph]
    placement = placement_of(graph, PAIR, devices)
    found = device_map(PlacedModules.of(extraction, placement, main_device="cpu"))
    assert found.content == {"left": "cpu", "right.0": 0, "right.2": "cpu", "head": "cpu"}
    # The loss is no part of the map, and its ops are on the main device.
    losses = {op.call for op in PlacedModules.of(extraction, placement).ops if not op.module}
    assert found.not_placed == {call for call in losses if not call.endswith(":add")}
    with fake_cuda():
        model = accelerate.dispatch_model(
            copy.deepcopy(step.model), found.content, main_device="cpu"
        )
        seen = trained(step, model)
    expected = trained(step, copy.deepcopy(step.model))
    torch.testing.assert_close(seen, expected, atol=1e-5, rtol=1e-5)
