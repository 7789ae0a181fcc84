"""Device maps of models placed by modules, since the model or its loss reads values of tensors."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import placer
from envs.placement import Placement
from graphs.extract import Extraction, ExtractionError, Workload, extract
from graphs.extract.placeable import module_map
from graphs.graph import GraphArrays, attributes_of
from placer.cli.main import main
from placer.exports.device_map import device_map
from placer.exports.existing_map import DeviceMap
from placer.exports.format import export_extracted
from placer.exports.module_tree import around
from placer.exports.placed_modules import PlacedModules
from tests.fake_cuda import fake_cuda
from tests.helpers import tiny_models
from tests.helpers.placed_at_random import cluster_of, placement_of
from tests.helpers.placed_steps import CORES
from tests.placer.exports.test_device_map import (
    GPUS,
    PAIR,
    Meeting,
    accelerate,
    trained,
)
from tests.placer.exports.test_planned_maps import cluster

ON_EXAMPLE = "checked for the example inputs only"
UNCHECKED = "were not checked"


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    classes = int(target.max()) + 1
    return nn.functional.cross_entropy(output, target.clamp(max=classes - 1))


class Convolution(nn.Module):
    """Adds self loops if the data has none, as GCNConv of torch_geometric does."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.lin = nn.Linear(size, size, bias=False)
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        if not bool((edges[0] == edges[1]).any()):
            loops = torch.arange(len(x), device=x.device)
            edges = torch.cat([edges, torch.stack([loops, loops])], 1)
        h = self.lin(x)
        return torch.zeros_like(h).index_add(0, edges[1], h[edges[0]]) + self.bias


class GraphNet(nn.Module):
    """Two graph convolutions, with a scale of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))
        self.first = Convolution(64)
        self.second = Convolution(64)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x * self.scale, edges).relu(), edges)
        return out


class Choosing(Meeting):
    """Two towers that meet in code which depends on data."""

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.left(x), self.right(x)
        out: Tensor = self.head(left + right if float(x.sum()) < 1e9 else left)
        return out


class Writing(nn.Module):
    """Writes into a tensor that is no buffer: its step can be neither exported nor recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.seen = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        if float(self.seen.sum()) < 1e9:
            self.seen += 1
        out: Tensor = self.second(self.first(x))
        return out


def classified() -> Workload:
    torch.manual_seed(0)
    return Workload.of(Meeting(), (torch.randn(3, 4), torch.tensor([0, 1, 0])), cross_entropy)


def graph_net() -> Workload:
    torch.manual_seed(0)
    edges = torch.stack([torch.randint(0, 16, (60,)), torch.randint(16, 32, (60,))])
    inputs = torch.randn(32, 64), edges, torch.randn(32, 64)
    return Workload.of(GraphNet(), inputs, tiny_models.squared)


def step_of(model: nn.Module) -> Workload:
    torch.manual_seed(0)
    return Workload.of(model, (torch.randn(3, 4), torch.randn(3, 2)), tiny_models.squared)


def by_modules(step: Workload) -> Extraction:
    """Return the extraction for devices that run modules where a step only can be recorded."""
    extraction = extract(step, needs="calls")
    assert extraction.extractor == "modules"
    return extraction


def placed_beside(
    extraction: Extraction, on_second: str | tuple[str, ...], names: tuple[str, ...] = PAIR
) -> Placement:
    """Return a placement with the modules of these prefixes on the second device."""
    graph = extraction.graph
    if extraction.extractor == "modules":
        graph = module_map(extraction).graph
    modules = [attributes_of(graph, op)["module"] for op in graph]
    return placement_of(graph, names, [int(module.startswith(on_second)) for module in modules])


def assert_trains(step: Workload, content: dict[str, Any]) -> None:
    """Assert that a map which accelerate dispatches trains the model as it is trained alone."""
    with fake_cuda():
        model = accelerate.dispatch_model(copy.deepcopy(step.model), content, main_device="cpu")
        found = trained(step, model)
    torch.testing.assert_close(found, trained(step, copy.deepcopy(step.model)))


@pytest.mark.slow
def test_accelerate_trains_by_the_map_of_a_model_whose_loss_reads_a_value() -> None:
    extraction = by_modules(classified())
    placement = placed_beside(extraction, ("right.0", "right.1"))
    exported = export_extracted(device_map, extraction, placement, main_device="cpu")
    assert exported.content == {"left": "cpu", "right.0": 0, "right.2": "cpu", "head": "cpu"}
    assert exported.moved_op_count == 0
    assert "checked" not in exported.remedy
    assert_trains(extraction.step, exported.content)


@pytest.mark.slow_repeats
@pytest.mark.filterwarnings("ignore:The following device_map keys do not match any submodules")
@pytest.mark.parametrize("extractor", ["modules", "dispatch"])
def test_accelerate_trains_by_the_map_of_a_model_that_branches_on_data(extractor: str) -> None:
    extraction = extract(graph_net(), extractor)
    placement = placed_beside(extraction, "second")
    exported = export_extracted(device_map, extraction, placement, main_device="cpu")
    assert exported.content == {"scale": "cpu", "first": "cpu", "second": 0}
    assert exported.moved_op_count == 0
    assert ON_EXAMPLE in exported.remedy
    assert "in forward" in exported.remedy, "the lines that read values"
    assert_trains(extraction.step, exported.content)


@pytest.mark.slow
def test_modules_whose_outputs_meet_on_the_example_share_a_device() -> None:
    extraction = by_modules(step_of(Choosing()))
    exported = device_map(
        PlacedModules.of(extraction, placed_beside(extraction, "right"), main_device="cpu")
    )
    assert exported.content["left"] == exported.content["right.2"] == "cpu"
    assert exported.content["right.0"] == 0
    assert_trains(extraction.step, exported.content)


def test_a_model_that_nothing_traces_is_mapped_as_it_is_placed_and_unchecked() -> None:
    extraction = by_modules(step_of(Writing()))
    exported = export_extracted(
        device_map, extraction, placed_beside(extraction, "second"), main_device="cpu"
    )
    assert exported.content == {"first": "cpu", "second": 0}
    assert exported.moved_op_count == 0
    assert UNCHECKED in exported.summary[-1]
    assert_trains(extraction.step, exported.content)


@pytest.mark.slow_repeats
@pytest.mark.parametrize(("make", "note"), [(classified, ""), (graph_net, ON_EXAMPLE)])
def test_a_model_that_reads_values_has_a_planned_map(make: Any, note: str) -> None:
    step = make()
    alone = placer.evaluate({"": "fast"}, step, devices=cluster(), progress=False)
    limit = int(0.8 * alone.result.peak_memory_bytes["fast"])
    found = placer.device_map(step, devices=cluster(limit), budget="100e", progress=False)
    assert set(found.values()) == {0, 1}
    assert all(around(entry, found) is not None for entry in step.model.state_dict())
    assert found.predicted_step_s < float("inf")
    assert note in found.summary
    assert ("checked" in found.summary) == bool(note)


def test_that_a_graph_of_modules_has_no_single_calls_is_said_in_one_sentence() -> None:
    extraction = by_modules(classified())
    with pytest.raises(ExtractionError) as refused:
        assert extraction.forward
    text = str(refused.value)
    assert "torch.where" not in text
    assert text.count(". ") == 0
    with pytest.raises(ExtractionError, match=r"torch\.where"):  # the extractor that it names
        extract(extraction.step, "export")


TARGET = """
import torch
from tests.placer.exports import test_module_maps

def build():
    step = test_module_maps.{name}()
    return step.model, step.inputs, step.loss
"""


@pytest.mark.slow
@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
@pytest.mark.parametrize(
    ("name", "pins"),
    [("classified", ("left.0", "right.0")), ("graph_net", ("first", "second"))],
)
def test_what_optimize_found_on_cores_is_exported(
    name: str, pins: tuple[str, str], tmp_path: Path
) -> None:
    target, out = tmp_path / "model.py", tmp_path / "map.json"
    target.write_text(TARGET.format(name=name))
    placement, build = str(tmp_path / "placement.json"), f"{target}:build"
    first, second = cores = [f"core:{core}" for core in CORES[:2]]
    options = ["--devices", f"{first},{second}", "--no-measure", "--budget", "20e"]
    for pin, core in zip(pins, cores, strict=True):
        options += ["--pin", f"{pin}={core}"]
    options += ["--out", placement]
    assert main(["optimize", build, *options]) == 0
    options = ["--format", "device-map", "--as", f"{first}=cuda:0,{second}=cuda:1"]
    assert main(["export", placement, build, *options, "--out", str(out)]) == 0
    content = json.loads(out.read_text())
    assert [content[around(pin, content) or ""] for pin in pins] == [0, 1]


@pytest.mark.slow
def test_the_map_of_a_graph_of_modules_is_read_as_the_placement_that_it_was_written_for() -> None:
    extraction = by_modules(graph_net())
    placement = placed_beside(extraction, "second", GPUS)
    content = export_extracted(device_map, extraction, placement).content
    assert content == {"scale": 0, "first": 0, "second": 1}
    given = DeviceMap({path: f"cuda:{number}" for path, number in content.items()})
    graph = GraphArrays.from_graph(module_map(extraction).graph)
    assert given.placed(extraction, graph, cluster_of(GPUS)).devices == placement.devices
