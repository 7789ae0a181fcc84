"""Exports of models that hold one module under several names."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphs.extract import Extraction, Workload, extract
from graphs.extract.placeable import call_graph
from graphs.graph import GraphArrays, attributes_of
from placer.exports.device_map import device_map
from placer.exports.existing_map import DeviceMap
from placer.exports.format import Format, export_extracted
from placer.exports.layer_counts import layer_counts
from placer.exports.pipelining import pipeline
from placer.exports.placed_modules import PlacedModules
from placer.exports.renaming import ExportError
from tests.fake_cuda import fake_cuda
from tests.helpers.placed_at_random import cluster_of, cut_placement, placement_of
from tests.helpers.tiny_models import Plain
from tests.placer.exports.test_device_map import GPUS, PAIR, accelerate


def chain(m: Any, x: Tensor) -> Tensor:
    for layer in m.layers:
        x = layer(x).relu()
    return x


def linear() -> nn.Module:
    return nn.Linear(4, 4)


def in_list(order: str) -> nn.Module:
    """Return a model of a list with a module for each letter; equal letters are one module."""
    module_of = {letter: linear() for letter in order}
    return Plain(chain, layers=nn.ModuleList(module_of[letter] for letter in order))


def two_names() -> nn.Module:
    shared = linear()
    parts = {"a": shared, "mid": linear(), "b": shared, "out": linear()}
    return Plain(lambda m, x: m.out(m.b(m.mid(m.a(x)).relu())), **parts)


def shared_with_a_block() -> nn.Module:
    """Return a model with a block, otherwise on one device, that holds a module of another."""
    shared = linear()
    block = nn.Sequential(linear(), shared, nn.ReLU(), linear())
    return Plain(lambda m, x: m.block(m.a(x)), a=shared, block=block)


def shared_blocks() -> nn.Module:
    block = nn.Sequential(linear(), nn.ReLU(), linear())
    parts = {"encoder": block, "between": linear(), "decoder": block}
    return Plain(lambda m, x: m.decoder(m.between(m.encoder(x))), **parts)


def extracted(model: nn.Module) -> Extraction:
    torch.manual_seed(0)
    return extract(Workload.of(model, torch.randn(2, 4), training=False))


@pytest.mark.filterwarnings("ignore:The following device_map keys do not match any submodules")
@pytest.mark.parametrize(
    ("make", "on_second", "expected"),
    [
        (two_names, "mid", {"a": "cpu", "mid": 0, "b": "cpu", "out": "cpu"}),
        (
            lambda: in_list("abab"),
            ("layers.1", "layers.3"),
            {"layers.0": "cpu", "layers.1": 0, "layers.2": "cpu", "layers.3": 0},
        ),
        (
            shared_with_a_block,
            "block.",
            {"a": "cpu", "block.0": 0, "block.1": "cpu", "block.3": 0},
        ),
        (shared_blocks, "between", {"encoder": "cpu", "between": 0, "decoder": "cpu"}),
    ],
)
def test_accelerate_runs_a_map_that_has_shared_modules_under_all_names(
    make: Callable[[], nn.Module], on_second: str | tuple[str, ...], expected: dict[str, Any]
) -> None:
    extraction = extracted(make())
    step, graph = extraction.step, call_graph(extraction).graph
    modules = [attributes_of(graph, op)["module"] for op in graph]
    shared = ("block.1",)  # by whatever name it is called
    devices = [int(m.startswith(on_second) and m not in shared) for m in modules]
    placement = placement_of(graph, PAIR, devices)
    content = export_extracted(device_map, extraction, placement, main_device="cpu").content
    assert content == expected
    with fake_cuda():
        model = accelerate.dispatch_model(copy.deepcopy(step.model), content, main_device="cpu")
        seen = model(*step.model_inputs).to("cpu")
    torch.testing.assert_close(seen, step.model(*step.model_inputs))
    given = DeviceMap({p: d if d == "cpu" else f"cuda:{d}" for p, d in content.items()})
    assert given.placed(extraction, GraphArrays.from_graph(graph), cluster_of(PAIR))


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (pipeline, r"begin with layers\.2, which a step calls more than once"),
        (layer_counts, r"layers\.1 is the module layers\.0 again"),
    ],
)
def test_a_list_that_repeats_a_module_is_refused(write: Format, reason: str) -> None:
    extraction = extracted(in_list("aabb"))
    placement = cut_placement(extraction, GPUS, ("layers.2",), of_calls=True)
    with pytest.raises(ExportError, match=reason):
        write(PlacedModules.of(extraction, placement))
