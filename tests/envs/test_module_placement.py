"""Models with a graph of modules, from the search to placed training."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import placer
from envs.costs import modules as module_costs
from envs.costs.modules import profile_modules_on, torch_module_costs
from envs.executors.hooks.hooked_module import HookedModule
from envs.executors.unplaced import UnplacedModel
from envs.hardware.cluster import Cluster
from envs.placement import Placement
from envs.runtime import extraction_for
from graphs.extract import Extraction, ExtractionError, Workload, extract
from graphs.extract.placeable import module_map
from graphs.graph import GraphArrays
from tests.helpers import tiny_models
from tests.helpers.clusters import linked
from tests.helpers.tiny_models import Plain
from tests.helpers.trained_alike import assert_trains_alike
from tests.helpers.vdev import TRANSFERS

CORE = f"core:{min(os.sched_getaffinity(0))}"
ON_TWO_DEVICES = pytest.mark.usefixtures("second_device")


class Loop(nn.Module):
    """Runs as many iterations as its data requires."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2000, 32)
        self.grow = nn.Sequential(nn.Linear(32, 32), nn.ReLU(inplace=True))
        self.head = nn.Linear(32, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        while x.norm() < 100:
            x = 2 * x + self.grow(x)
        found: Tensor = self.head(x)
        return found


def looped() -> tuple[Loop, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Loop(), (torch.randint(2000, (16,)), torch.randn(16, 3))


def assert_applied(
    model: nn.Module,
    found: placer.Result | Placement | Path,
    inputs: tuple[Tensor, Tensor],
    extractor: str = "auto",
) -> HookedModule:
    """Assert that the placed model computes the same as the model, and return the placed one."""
    alone = copy.deepcopy(model)
    expected = tiny_models.squared(alone(inputs[0]), inputs[1])
    torch.autograd.backward(expected)
    placed: HookedModule = placer.apply(
        model, found, inputs, loss=tiny_models.squared, extractor=extractor
    )
    assert placed.step(*inputs).item() == pytest.approx(expected.item(), rel=1e-6)
    for here, there in zip(placed.parameters(), alone.parameters(), strict=True):
        assert here.grad is not None
        assert there.grad is not None
        torch.testing.assert_close(here.grad.to("cpu"), there.grad)
    return placed


@pytest.mark.slow
@ON_TWO_DEVICES
def test_a_loop_that_depends_on_data_is_placed_measured_and_run(tmp_path: Path) -> None:
    model, inputs = looped()
    alone = copy.deepcopy(model)
    found = placer.optimize(
        model,
        inputs,
        loss=tiny_models.squared,
        extractor="modules",
        devices="cuda:0,cpu",
        constraints=placer.Constraints(
            memory={"cuda:0": "100kB", "cpu": 1 << 30}, pins={"head": "cuda:0"}
        ),
        search=placer.SearchConfig(budget="100e", policy=None),
        progress=False,
    )
    assert found.best.measurement is not None
    assert found.best.measurement.ok, found.best.measurement.failure
    assert all(not row.failure for row in found.candidates)
    assert found.device_of("table") == "cpu"  # 256 kB
    assert not any("Nothing was measured" in remark for remark in found.remarks)
    found.save(tmp_path / "placement.json")
    for own, placement in ((model, found), (alone, tmp_path / "placement.json")):
        TRANSFERS.clear()
        placed = assert_applied(own, placement, inputs, "modules")
        assert TRANSFERS
        assert placed.get_submodule("head").weight.device.type == "cuda"
        placed.close()
        assert {p.device.type for p in own.parameters()} == {"cpu"}


@ON_TWO_DEVICES
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_loop_over_a_gpu_and_the_cpu_is_trained_as_the_model_is() -> None:
    model, inputs = looped()
    step = Workload.of(model, inputs, tiny_models.squared)
    extraction = extract(copy.deepcopy(step), "modules")
    with HookedModule(extraction, {"": "cuda:0", "table": "cpu", "grow.1": "cpu"}) as placed:
        assert_trains_alike(step, placed, tolerance=1e-4)
        assert placed.get_submodule("head").weight.device == torch.device("cuda:0")
    assert {p.device.type for p in placed.parameters()} == {"cpu"}


@pytest.mark.slow_repeats
@ON_TWO_DEVICES
@pytest.mark.parametrize("extractor", ["auto", "modules"])
def test_on_the_cpu_alone_its_modules_are_timed_and_run_beside_the_unplaced_model(
    extractor: str,
) -> None:
    model, inputs = looped()
    found = placer.optimize(
        model,
        inputs,
        loss=tiny_models.squared,
        extractor=extractor,
        devices="cpu",
        search=placer.SearchConfig(budget="20e", policy=None),
        progress=False,
    )
    assert found.single is not None
    for each in (found.single, found.unplaced):
        assert each is not None
        assert each.measurement is not None
        assert each.measurement.ok, each.measurement.failure
        applied = assert_applied(model, each.placement, inputs, extractor)
        assert isinstance(applied, UnplacedModel if each.is_unplaced else HookedModule)
        applied.close()
        model.zero_grad()
    assert all("module by module" in source for source in found.cost_source.values())


@pytest.mark.parametrize("names", [["cpu"], ["cuda:0", "cpu"], [CORE]])
def test_all_devices_fall_back_to_the_modules_of_a_model_that_reads_values(
    names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envs.runtime.is_here", lambda _: True)
    model, inputs = looped()
    extraction = extraction_for(Workload.of(model, inputs, tiny_models.squared), names)
    assert extraction.extractor == "modules"
    assert extraction.fell_back[0].reason.count("test_module_placement.py") == 1


def test_what_neither_calls_nor_modules_can_run_is_refused_with_both_reasons() -> None:
    model = Plain(lambda m, x: torch.vmap(m.linear)(x), linear=nn.Linear(8, 8))
    step = Workload.of(model, (torch.randn(4, 8), torch.randn(4, 8)), tiny_models.squared)
    assert extraction_for(step, [CORE]).extractor == "export"
    refusal = r"export: Plain has no forward pass of single calls.* modules: .*BatchedTensorImpl"
    with pytest.raises(ExtractionError, match=refusal):
        extraction_for(step, ["cpu"])


def test_everything_that_a_module_does_itself_is_on_one_device() -> None:
    _, inputs = looped()
    extraction = extract(Workload.of(Loop(), inputs, tiny_models.squared), "modules")
    modules = module_map(extraction)
    graph = GraphArrays.from_graph(modules.graph)
    assert graph.hash == GraphArrays.from_graph(extraction.graph).hash
    group_of = dict(zip(modules.modules, graph.group.tolist(), strict=True))
    for module, group in zip(modules.modules, graph.group.tolist(), strict=True):
        assert group == group_of[module] >= 0
    assert group_of.keys() == {"", "table", "grow.0", "grow.1", "head"}
    assert len(set(group_of.values())) == 5
    with pytest.raises(ValueError, match="1 devices are not for"):
        modules.devices_of_calls(["cpu"])


@ON_TWO_DEVICES
def test_modules_that_have_no_room_cost_what_the_rates_of_the_device_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, inputs = looped()
    extraction = extract(Workload.of(model, inputs, tiny_models.squared), "modules")

    def cramped(device: torch.device, extraction: Extraction) -> NDArray[np.float64]:
        if device.type == "cuda":
            raise torch.OutOfMemoryError("Tried to allocate 512.00 MiB")
        return profile_modules_on(device, extraction)

    monkeypatch.setattr(module_costs, "profile_modules_on", cramped)
    rated = [
        replace(device, peak_flop_per_s=1e9, bandwidth_bytes_per_s=1e9)
        for device in linked().devices
    ]
    costs = torch_module_costs(extraction, Cluster(name="rated", devices=tuple(rated)))
    for device in rated:
        known = costs[device.kind]
        expected = "roofline" if device.name.startswith("cuda") else "module by module"
        assert all(expected in source for source in known.sources)
        assert np.isfinite(known.cost_s).all()  # without costs a module could not be placed there
