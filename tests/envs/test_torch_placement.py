"""Placements on torch devices, with a fake second one: calibration, and the main job."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import placer
from envs.backend import StepResult
from envs.costs import torch_speeds
from envs.executors.torch.placed_module import PlacedModule
from envs.hardware.discover import discover
from envs.measured import Measured
from envs.measurement import Measurement
from envs.placement import Placement
from envs.runtime import runtime_for
from graphs.extract import Workload, extract
from graphs.graph import GraphArrays
from placer.cli.main import main
from tests.helpers.clusters import MEMORY, pair
from tests.helpers.second_devices import DEVICES, VDEV, second
from tests.helpers.vdev import TRANSFERS

pytestmark = pytest.mark.usefixtures("second_device")


# --- calibration


def test_the_second_device_is_measured_like_any_other() -> None:
    found = torch_speeds.measured_speeds(pair())
    assert [device.kind for device in found.devices] == [
        "cuda:fake",
        f"cpu*{torch.get_num_threads()}",
    ]
    for device in found.devices:
        assert device.memory_bytes == 1 << 30
    assert [link.between for link in found.links] == [("cuda:0", "cpu"), ("cpu", "cuda:0")]
    assert all(link.one_way for link in found.links)
    sent = {(source.type, destination.type) for source, destination, _ in TRANSFERS}
    assert sent == {("cuda", "cpu"), ("cpu", "cuda")}


@pytest.mark.parametrize("second_device", [VDEV], indirect=True)
def test_a_device_that_hides_its_memory_must_be_given_some() -> None:
    with pytest.raises(ValueError, match="vdev:0 does not report its memory"):
        discover("vdev:0,cpu")


# --- the main job


class Towers(nn.Module):
    """Two branches with more parameters than the second device may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2000, 32)
        self.left = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
        self.right = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        product: torch.Tensor = self.left(x) * self.right(x)
        return product.mean()


def build() -> tuple[Towers, torch.Tensor]:
    torch.manual_seed(0)
    return Towers(), torch.randint(2000, (16,))


def assert_runs_alike(
    placed: PlacedModule, alone: nn.Module, inputs: tuple[torch.Tensor, ...], loss: torch.Tensor
) -> None:
    """Assert that a placed step has this loss and the gradients of the model."""
    found = placed(*inputs)
    found.backward()
    torch.testing.assert_close(found.cpu(), loss, atol=1e-5, rtol=1e-5)
    for here, there in zip(placed.parameters(), alone.parameters(), strict=True):
        assert here.grad is not None
        assert there.grad is not None
        torch.testing.assert_close(here.grad.cpu(), there.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.slow_repeats
@pytest.mark.parametrize("second_device", DEVICES[:2], indirect=True)
def test_a_model_too_large_for_a_device_is_placed_and_runs_as_placed(
    tmp_path: Path,
) -> None:
    there = str(second())
    model, tokens = build()
    alone = copy.deepcopy(model)
    found = placer.optimize(
        model,
        tokens,
        devices=f"{there},cpu",
        constraints=placer.Constraints(
            memory={there: "100kB", "cpu": 1 << 30}, pins={"left": there}
        ),
        budget="300e",
        progress=False,
    )
    assert found.best.measurement is not None
    assert found.placement.measured is not None
    assert found.devices_of("left").keys() == {there}
    assert found.device_of("table") == "cpu"  # 256 kB
    single = next(row for row in found.candidates if row.name == f"single {there}")
    assert single.why.startswith(f"{there} needs") or not single.is_single
    found.save(tmp_path / "placement.json")

    loss = alone(tokens)
    loss.backward()
    for own, placement in ((model, found), (copy.deepcopy(alone), tmp_path / "placement.json")):
        own.zero_grad()
        TRANSFERS.clear()
        with placer.apply(own, placement, tokens) as placed:
            assert_runs_alike(placed, alone, (tokens,), loss.detach())
        assert TRANSFERS
        assert placed.state_dict().keys() == alone.state_dict().keys()
    assert next(model.left.parameters()).device == second()


@pytest.mark.slow_repeats
@pytest.mark.parametrize("extractor", ["export", "dispatch", "modules"])
def test_a_model_that_runs_placed_is_extracted_as_before_and_stays_where_it_is(
    extractor: str,
) -> None:
    device = torch.device("cuda", 0)
    model, tokens = build()
    model.left[2].weight = model.left[0].weight  # tied
    step = Workload.of(model, tokens)
    expected = GraphArrays.from_graph(extract(step, extractor).graph).hash
    model.left.to(device)
    model.left[2].weight = model.left[0].weight  # moving may untie them
    before = {name: id(tensor) for name, tensor in step.named_state().items()}
    for given in (step, Workload.of(model, tokens.to(device))):
        found = extract(given, extractor)
        assert GraphArrays.from_graph(found.graph).hash == expected
        assert found.step is given
    assert {name: id(tensor) for name, tensor in step.named_state().items()} == before
    assert model.left[0].weight.device == device


@pytest.mark.slow
def test_what_is_timed_with_overlapping_copies_runs_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, tokens = build()
    ran: list[str] = []
    step = PlacedModule.step

    def seen(module: PlacedModule, *batch: Any, **keywords: Any) -> Any:
        ran.append(module.source)
        return step(module, *batch, **keywords)

    monkeypatch.setattr(PlacedModule, "step", seen)
    found = placer.optimize(
        model,
        tokens,
        devices="cuda:0,cpu",
        constraints=placer.Constraints(memory=MEMORY, pins={"left": "cuda:0", "right": "cpu"}),
        search=placer.SearchConfig(budget="20e", policy=None, overlap=True),
        progress=False,
    )
    assert any("sending(" in source for source in ran)
    assert "sending(" in placer.apply(model, found, overlap=True).source
    assert "sending(" not in placer.apply(model, found).source


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("extractor", "devices", "message"),
    [
        ("modules", "cuda:0,cpu", "graph of modules"),
        ("export", f"core:{min(os.sched_getaffinity(0))}", "pinned cores"),
    ],
)
def test_overlap_is_refused_where_nothing_overlaps(
    extractor: str, devices: str, message: str
) -> None:
    model, tokens = build()
    cluster = discover(devices, MEMORY if extractor == "modules" else None)
    extraction = extract(Workload.of(model, tokens), extractor)
    with pytest.raises(ValueError, match=message):
        runtime_for(extraction, cluster, overlap=True)
    graph = GraphArrays.from_graph(extraction.graph)
    zeros = np.zeros(len(graph))
    placement = Placement.of(graph, cluster, zeros.astype(int), zeros)
    with pytest.raises(ValueError, match=message):
        placer.apply(model, placement, tokens, extractor=extractor, overlap=True)


@pytest.mark.slow
def test_a_model_that_runs_placed_can_be_placed_and_exported_anew(tmp_path: Path) -> None:
    model, tokens = build()
    alone = copy.deepcopy(model)(tokens).item()

    def place(**pins: str) -> placer.Result:
        return placer.optimize(
            model,
            tokens,
            devices="cuda:0,cpu",
            search=placer.SearchConfig(budget="50e", policy=None),
            constraints=placer.Constraints(memory=MEMORY, pins=pins),
            progress=False,
        )

    other = tmp_path / "other.json"
    place(left="cpu", right="cuda:0", table="cpu").save(other)
    first = place(left="cuda:0", right="cpu")
    assert placer.apply(model, first)(tokens).item() == pytest.approx(alone, abs=1e-6)
    assert model.left[0].weight.device.type == "cuda"
    second = place(left="cpu", right="cuda:0")
    assert model.left[0].weight.device.type == "cuda", "optimize leaves the model alone"
    for placement in (second, other):
        placed = placer.apply(model, placement, tokens)
        assert placed(tokens).item() == pytest.approx(alone, abs=1e-6)
        assert model.left[0].weight.device.type == "cpu"
        assert model.right[0].weight.device.type == "cuda"
    exported = placer.export(other, "device-map", model, tokens, main_device="cpu")
    assert exported.content["left"] == "cpu"
    assert exported.content["right.0"] == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_model_too_large_for_a_gpu_is_placed_and_runs_as_placed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(1_000_000, 64), *(nn.Linear(64, 64) for _ in range(8)))
    tokens, target = torch.randint(1_000_000, (512,)), torch.randn(512, 64)
    alone = copy.deepcopy(model)
    found = placer.optimize(
        model,
        (tokens, target),
        loss=nn.MSELoss(),
        devices="cuda:0,cpu",
        constraints=placer.Constraints(memory={"cuda:0": "256MiB"}),
        budget="500e",
        progress=False,
    )
    assert found.best.measurement is not None
    assert found.device_of("0") == "cpu"  # 256 MB, and as much for its gradient
    torch.empty(1 << 30, dtype=torch.uint8, device="cuda")  # the limit is lifted
    loss = nn.MSELoss()(alone(tokens), target)
    loss.backward()
    assert_runs_alike(placer.apply(model, found), alone, (tokens, target), loss.detach())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("peak_bytes", "reserved_bytes", "smaller_bytes"),
    [(80_000, 82_000, 78_200), (50_000, 86_800, 55_200)],
    ids=["no gaps", "large gaps between tensors"],
)
def test_where_no_plan_fits_in_fact_it_is_planned_for_less_memory(
    peak_bytes: int, reserved_bytes: int, smaller_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[int] = []
    evaluate = Measured.evaluate

    def first_too_large(
        backend: Measured, placements: list[Placement], *_: object
    ) -> list[StepResult]:
        planned.append(backend.problem.cluster.devices[0].memory_bytes)
        seen = evaluate(backend, placements)
        if len(planned) > 1:
            return seen
        nothing = np.array([])
        full = Measurement(
            wall_s=nothing,
            cpu_clock_s=nothing,
            failure="no room",
            overfull=True,
            peak_memory_bytes={"cuda:0": peak_bytes},
            reserved_memory_bytes={"cuda:0": reserved_bytes, "another": 1},
        )
        return [
            StepResult.of_measurement(full, {}) if len(set(p.devices)) > 1 else one
            for p, one in zip(placements, seen, strict=True)
        ]

    monkeypatch.setattr(Measured, "evaluate", first_too_large)
    model, tokens = build()
    found = placer.optimize(
        model,
        tokens,
        devices="cuda:0,cpu",
        constraints=placer.Constraints(
            memory={"cuda:0": "100kB", "cpu": 1 << 30}, pins={"left": "cuda:0", "table": "cpu"}
        ),
        budget="100e",
        progress=False,
    )
    assert planned == [92_000, smaller_bytes]
    assert not found.best.failure
    assert found.best.measurement is not None
    assert found.devices_of("left").keys() == {"cuda:0"}
    assert any("failed: no room" in remark for remark in found.remarks)


TARGET = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(500, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, (torch.randint(500, (8,)), torch.randn(8, 4)), nn.MSELoss()
"""


@pytest.mark.slow
def test_the_command_takes_devices_of_torch_and_limits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.py").write_text(TARGET)
    out = tmp_path / "placement.json"
    arguments = [f"{tmp_path / 'model.py'}:build", "--budget", "100e", "--out", str(out), "--json"]
    limits = ["--devices", "cuda:0,cpu", "--memory", "cuda:0=16KiB,cpu=1GiB"]
    assert main(["optimize", *arguments, *limits]) == 0
    written = json.loads(out.read_text())
    assert set(written["devices"].values()) <= {"cuda:0", "cpu"}
    assert json.loads(capsys.readouterr().out)["measured"] is not None
    assert main(["optimize", *arguments, "--devices", "cuda:0", "--memory", "cpu=1GB"]) == 2
    assert "memory of cpu is limited" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["optimize", *arguments, "--memory", "cuda:0=much"])
