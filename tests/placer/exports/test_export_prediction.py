"""The predicted steps of a placement and of its export."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import placer
from envs.hardware.cluster import Cluster, Device, Link
from envs.placement import Placement
from envs.problem import Problem
from graphs.costs import with_costs
from graphs.extract import Extraction, Workload, extract
from graphs.extract.placeable import call_graph
from graphs.graph import GraphArrays
from placer.cli.main import main
from placer.exports.device_map import device_map
from placer.exports.format import FormatOutput, StepPredictor, export_extracted
from placer.exports.layer_counts import layer_counts
from placer.exports.pipelining import pipeline
from placer.exports.placed_modules import PlacedModules, call_keys
from placer.exports.renaming import ExportError
from tests.helpers.placed_at_random import cut_placement, placement_of
from tests.helpers.tiny_models import Plain, squared
from tests.placer.exports.test_export import THREE_LAYERS, three_layers

CORES = sorted(os.sched_getaffinity(0))
NAMES = ("cuda:0", "cuda:1")
MILLISECOND = 1e-3


def block() -> Extraction:
    """Return a module whose two calls only op-level placements can split, then a layer."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return torch.sin(m.get_submodule("first")(x)) + torch.cos(x)

    inner = Plain(forward, first=nn.Linear(4, 4))
    model = nn.Sequential(inner, nn.Linear(4, 4))
    return extract(Workload.of(model, (torch.ones(2, 4), torch.ones(2, 4)), squared))


def problem_of(
    extraction: Extraction, memory_bytes: int = 1 << 30, *, of_calls: bool = True
) -> Problem:
    """Return a problem where each call or op, and each transfer, takes one millisecond."""
    graph = call_graph(extraction).graph if of_calls else extraction.graph
    costed = with_costs(graph, {"x": np.full(len(graph), MILLISECOND)}, {"x": "made up"})
    devices = tuple(Device(name=n, kind="x", memory_bytes=memory_bytes) for n in NAMES)
    link = Link(between=NAMES, latency_s=MILLISECOND, bandwidth_bytes_per_s=float("inf"))
    cluster = Cluster(name="two", devices=devices, links=(link,))
    return Problem.of(GraphArrays.from_graph(costed), cluster)


def alternating(extraction: Extraction) -> Placement:
    graph = call_graph(extraction).graph
    return placement_of(graph, NAMES, [i % 2 for i in range(len(graph))])


def test_ops_go_where_their_call_is_and_others_stay() -> None:
    extraction = block()
    problem = problem_of(extraction)
    renamed = {"cuda:0": "gpu one", "cuda:1": "gpu two"}
    predictor = StepPredictor(problem, alternating(extraction), extraction, renamed)
    placed = predictor.placement
    by_module = PlacedModules.of(extraction, alternating(extraction)).by_module
    exported = predictor.exported_placement(by_module({"0": "gpu one", "1": "gpu two"}))
    assert exported.devices == tuple(
        int(module[0]) if module.startswith(("0", "1")) else before
        for module, before in zip(problem.graph.modules, placed.devices, strict=True)
    )
    ranks = np.array(exported.priority)[problem.graph.topological]
    assert (np.diff(ranks) < 0).all()  # in program order


def test_ops_of_a_graph_of_ops_and_of_one_of_calls_have_the_same_calls() -> None:
    extraction = block()
    of_ops = call_keys(extraction, GraphArrays.from_graph(extraction.graph))
    of_calls = call_keys(extraction, GraphArrays.from_graph(call_graph(extraction).graph))
    assert of_ops == extraction.call_of
    assert set(of_calls) == set(of_ops) == {call.key for call in extraction.forward.placed_calls}


def placed_on(problem: Problem, *devices: int) -> Placement:
    return Placement.of(problem.graph, problem.cluster, np.array(devices), np.zeros(len(devices)))


def test_a_map_of_one_device_says_what_plans_one_of_several() -> None:
    extraction = block()
    on_one = placement_of(extraction.graph, NAMES, [0] * len(extraction.graph))
    exported = export_extracted(device_map, extraction, replace(on_one, unplaced=True))
    assert exported.content == {"": 0}
    assert "placer.device_map plans" in exported.summary[-1]


def test_an_export_that_does_not_fit_into_memory_says_so() -> None:
    extraction = block()
    problem = problem_of(extraction, memory_bytes=400)  # one layer with its gradients is 160 bytes
    placement = cut_placement(extraction, NAMES, ("1",), of_calls=True)

    def on_one_device(placed: PlacedModules) -> FormatOutput:
        return FormatOutput(content="", runs_on=placed.by_module({"": "cuda:0"}))

    exported = export_extracted(on_one_device, extraction, placement, problem=problem)
    assert exported.exported_step is not None
    assert not exported.exported_step.feasible
    assert exported.to_dict()["exported_step"]["step_s"] is None


@pytest.mark.slow
def test_no_step_is_predicted_where_only_the_layers_are_followed() -> None:
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in "12")
    model = Plain(lambda m, x: m.norm(m.layers[1](m.layers[0](x))), layers=layers)
    model.norm = nn.LayerNorm(4)
    extraction = extract(Workload.of(model, torch.ones(2, 4), training=False))
    problem = problem_of(extraction)
    placement = placed_on(problem, 0, 1, 0)
    exported = export_extracted(layer_counts, extraction, placement, problem=problem)
    assert exported.content["counts"] == [1, 1]
    assert exported.placed_step is not None
    assert exported.exported_step is None
    with pytest.raises(ExportError, match="and then norm is on cuda:0 again"):
        export_extracted(pipeline, extraction, placement)


@pytest.mark.slow
def test_joined_modules_are_where_the_step_is_predicted_to_be_fastest() -> None:
    left = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    right = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8))
    model = Plain(lambda m, x: m.head(torch.cat([m.left(x), m.right(x)], 1)), left=left)
    model.right, model.head = right, nn.Sequential(nn.Linear(12, 2), nn.Tanh())
    extraction = extract(Workload.of(model, torch.ones(2, 4), training=False))
    graph = call_graph(extraction).graph
    placement = placement_of(graph, NAMES, [int(op.startswith("right")) for op in graph])
    by_work = export_extracted(device_map, extraction, placement)
    assert by_work.content == {"left.0": 0, "left.2": 1, "right": 1, "head": 0}
    problem = problem_of(extraction)
    fastest = export_extracted(device_map, extraction, placement, problem=problem)
    assert fastest.content == {"left": 0, "right.0": 1, "right.2": 0, "head": 0}


@pytest.mark.slow
@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_pins_of_an_optimization_count_as_exported_too() -> None:
    cores = tuple(f"core:{core}" for core in CORES[:2])
    speeds: dict[str, Any] = {
        "peak_flop_per_s": 1e11,
        "bandwidth_bytes_per_s": 1e10,
        "launch_s": 1e-6,
    }
    devices = tuple(Device(name=n, kind="core", memory_bytes=1 << 30, **speeds) for n in cores)
    link = Link(between=cores, latency_s=1e-9, bandwidth_bytes_per_s=1e12)
    cluster = Cluster(name="two", devices=devices, links=(link,))
    extraction = block()
    step = extraction.step
    found = placer.optimize(
        step.model,
        step.inputs,
        loss=step.loss,
        devices=cluster,
        search=placer.SearchConfig(budget="30e", measure=False),
        progress=False,
        constraints=placer.Constraints(
            pins={"1": cores[1], "0.first": cores[0], "0:sin": cores[1]}
        ),
    )
    renamed = dict(zip(cores, NAMES, strict=True))
    exported = placer.export(found, "device-map", renamed=renamed)
    assert exported.content == {"0": 0, "1": 1}
    assert exported.exported_step is not None
    assert exported.exported_step.why == (
        f"op '0:sin' is on {cores[0]}, but may only run on {cores[1]}"
    )


@pytest.mark.slow
@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_the_command_predicts_on_the_devices_of_the_placement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACER_CACHE", str(tmp_path / "cache"))
    # Accept speeds and costs that are measured under load.
    monkeypatch.setattr("envs.costs.calibrate.CONTENDED", np.inf)
    monkeypatch.setattr("envs.costs.cache.CALM_SPREAD", np.inf)
    cores = tuple(f"core:{core}" for core in CORES[:2])
    model, path = tmp_path / "model.py", tmp_path / "placement.json"
    model.write_text(THREE_LAYERS)
    extraction = extract(Workload.of(*three_layers()))
    devices = [int(op.startswith("0.1")) for op in extraction.graph]
    placement_of(extraction.graph, cores, devices).save(path)
    renamed = f"{cores[0]}=cuda:0,{cores[1]}=cuda:1"
    command = ["export", str(path), f"{model}:build", "--format", "device-map", "--as", renamed]

    def exported(*options: str, code: int = 0) -> str:
        assert main([*command, *options]) == code
        return capsys.readouterr().err

    assert exported().endswith(
        "no step is predicted, as op costs are not known: --predict measures them\n"
    )
    predicted = f"predicted step on {', '.join(cores)}: "
    assert predicted in exported("--predict")
    small = exported("--memory", f"{cores[0]}=300B")
    assert re.search(r"impossible as exported.*: .* B too little", small)
    assert "core:99" in exported("--memory", "core:99=1MB", code=2)
    assert predicted in exported()


@pytest.mark.slow
def test_a_map_is_compared_with_the_best_single_device_by_number() -> None:
    extraction = block()  # two layers in a row, so that a transfer only costs
    problem = problem_of(extraction)
    placement = cut_placement(extraction, NAMES, ("1",), of_calls=True)
    renamed = {"cuda:0": "cuda:2", "cuda:1": "cuda:3"}
    exported = export_extracted(device_map, extraction, placement, problem=problem, renamed=renamed)
    assert exported.content == {"0": 2, "1": 3}
    assert exported.single_step is not None
    assert exported.exported_step is not None
    assert exported.single_device == "cuda:2"
    # Each op and each transfer takes 1 ms: of the activations there, and of their gradients back.
    assert exported.single_step.step_s == pytest.approx(problem.op_count * MILLISECOND)
    assert exported.exported_step.step_s > exported.single_step.step_s
    shown = f"{problem.op_count}.00 ms with all on cuda:2, which is faster"
    assert exported.summary[1].endswith(f"as exported, {shown}")
    assert exported.to_dict()["single_step"]["step_s"] == exported.single_step.step_s
