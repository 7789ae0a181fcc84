"""Cost of an export, given as the predicted step time."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from placed_at_random import cut_placement, placement_of
from tiny_models import Plain, squared
from torch import Tensor, nn

import placer
from envs.calibrate import calibrated_before
from envs.cluster import Cluster, Device, Link
from envs.cost_cache import CostCache, Session
from envs.discover import discover
from envs.op_costs import conditions_of
from envs.op_signature import op_signatures
from envs.placement import Placement
from envs.problem import Problem
from graphs.costs import with_costs
from graphs.extract import Extraction, Step, extract
from graphs.extract.call_graph import call_graph
from graphs.graph import GraphArrays, attributes_of
from placer.cli.main import main
from placer.export.call_keys import call_keys
from placer.export.device_map import device_map
from placer.export.layer_counts import layer_counts
from placer.export.placed_modules import PlacedModules
from placer.export.price import coarsened, price_of
from placer.milliseconds import milliseconds

torch.set_num_threads(1)

CORES = sorted(os.sched_getaffinity(0))
NAMES = ("cuda:0", "cuda:1")
MILLISECOND = 1e-3


def block() -> Extraction:
    """Return a module whose two calls only op-level placements can split, then a layer."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return torch.sin(m.get_submodule("first")(x)) + torch.cos(x)

    inner = Plain(forward, first=nn.Linear(4, 4))
    model = nn.Sequential(inner, nn.Linear(4, 4))
    return extract(Step.of(model, (torch.ones(2, 4), torch.ones(2, 4)), squared))


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


def calls_on(extraction: Extraction, device_of: dict[str, str]) -> dict[str, str]:
    """Return {call: device} for modules on these devices."""
    placed = PlacedModules.of(extraction, alternating(extraction))
    return placed.by_module(device_of)


def test_ops_go_where_their_call_is_and_others_stay() -> None:
    extraction = block()
    problem = problem_of(extraction)
    placed = alternating(extraction).aligned(problem.graph, problem.cluster)
    calls = calls_on(extraction, {"0": "gpu one", "1": "gpu two"})
    found = coarsened(
        problem,
        placed,
        call_keys(extraction, problem.graph),
        calls,
        {"cuda:0": "gpu one", "cuda:1": "gpu two"},
    )
    for module, before, after in zip(
        problem.graph.modules, placed.devices, found.devices, strict=True
    ):
        if module.startswith(("0", "1")):
            assert after == int(module[0])
        else:
            assert after == before
    ranks = np.array(found.priority)[problem.graph.topological]
    assert (np.diff(ranks) < 0).all(), "runtimes run a model in its own order"


def test_ops_of_a_graph_of_ops_and_of_one_of_calls_have_the_same_calls() -> None:
    extraction = block()
    of_ops = call_keys(extraction, GraphArrays.from_graph(extraction.graph))
    of_calls = call_keys(extraction, GraphArrays.from_graph(call_graph(extraction).graph))
    assert of_ops == extraction.call_of
    assert set(of_calls) == set(of_ops) == {call.key for call in extraction.forward.placed_calls}


def four_calls() -> Extraction:
    """Return a chain: N calls on one device take N ms, and every change of device takes 1 ms."""
    layers = (nn.Sequential(nn.Tanh(), nn.Linear(4, 4)) for _ in "12")
    return extract(Step.of(nn.Sequential(*layers), torch.ones(2, 4), training=False))


def placed_on(problem: Problem, *devices: int) -> Placement:
    return Placement.of(problem.graph, problem.cluster, np.array(devices), np.zeros(len(devices)))


def numbers(told: str) -> list[str]:
    return re.findall(r"[\d.]+(?: ms|%|x)", told)


def test_the_price_is_the_step_of_the_exported_placement_over_that_of_the_placement() -> None:
    extraction = four_calls()
    problem = problem_of(extraction)
    halves = calls_on(extraction, {"0": "cuda:0", "1": "cuda:1"})
    price = price_of(problem, placed_on(problem, 0, 1, 0, 1), extraction, {})
    (told,) = price.told(halves)
    assert numbers(told) == ["5.000 ms", "28.6%", "7.000 ms", "0.80x", "0.57x"]
    assert told.endswith("not worth it")
    (told,) = price.told(halves, single_step=False)
    assert numbers(told) == ["5.000 ms", "28.6%", "7.000 ms"]
    price = price_of(problem, placed_on(problem, 0, 0, 0, 0), extraction, {})
    (told,) = price.told(calls_on(extraction, {"": "cuda:1"}))
    assert numbers(told)[-2:] == ["1.00x", "1.00x"]
    (told,) = price.told(halves, moved=False)
    assert numbers(told)[:3] == ["5.000 ms", "25.0%", "4.000 ms"]
    assert price.told(calls_on(extraction, {"": "cuda:1"}), moved=False) == []


def test_a_price_for_devices_of_another_kind_says_whose_costs_it_has() -> None:
    extraction = four_calls()
    problem = problem_of(extraction)
    stand_for = {"cuda:0": "cpu", "cuda:1": "xpu:0"}
    price = price_of(problem, placed_on(problem, 0, 1, 0, 1), extraction, stand_for)
    halves = calls_on(extraction, {"0": "cpu", "1": "xpu:0"})
    step, costs = price.told(halves)
    assert "5.000 ms" in step
    assert "costs of cuda:0, cuda:1" in costs
    swapped = {"cuda:0": "cuda:1", "cuda:1": "cuda:0"}
    price = price_of(problem, placed_on(problem, 0, 1, 0, 1), extraction, swapped)
    assert len(price.told(calls_on(extraction, {"0": "cuda:1", "1": "cuda:0"}))) == 1


def test_what_wins_back_most_of_a_loss_is_known() -> None:
    extraction = four_calls()
    problem = problem_of(extraction)
    price = price_of(problem, placed_on(problem, 0, 0, 0, 0), extraction, {})
    first, *_, last = problem.graph.ids
    two = {first: "cuda:1", last: "cuda:1"}  # two changes of device
    assert price.is_won_back(two, {})
    assert not price.is_won_back(two, {first: "cuda:1"}), "half is not most"
    assert not price.is_won_back({}, {})


def test_an_export_that_does_not_fit_is_told_so_although_nothing_is_moved() -> None:
    extraction = block()
    problem = problem_of(extraction, memory_bytes=400)  # one layer with its gradients is 160 bytes
    placement = cut_placement(extraction, NAMES, ("1",), of_calls=True)
    price = price_of(problem, placement, extraction, {})
    (told,) = price.told(calls_on(extraction, {"": "cuda:0"}), moved=False)
    assert "impossible: cuda:0 needs " in told


def two_branches() -> Extraction:
    """Return two branches whose outputs meet in a module."""
    branches = {
        name: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        for name in ("left", "right")
    }
    meet = Plain(lambda m, *parts: torch.add(*parts))
    model = Plain(lambda m, x: m.meet(m.left(x), m.right(x)), **branches, meet=meet)
    return extract(Step.of(model, (torch.ones(2, 4), torch.ones(2, 4)), squared))


@pytest.mark.parametrize(
    ("apart", "advised"), [("right", ["right"]), ("", [])], ids=["a-branch", "everything"]
)
def test_modules_are_to_be_held_together_only_where_that_is_predicted_to_win(
    apart: str, advised: list[str]
) -> None:
    extraction = two_branches()
    nodes = [attributes_of(extraction.graph, op) for op in extraction.graph]
    devices = [
        int(node["phase"] == "backward" and node["module"].startswith(apart)) for node in nodes
    ]
    placement = placement_of(extraction.graph, NAMES, devices)
    price = price_of(problem_of(extraction, of_calls=False), placement, extraction, {})
    found = device_map(PlacedModules.of(extraction, placement, price=price))
    assert found.content == {"": 0}
    assert any(re.search("1.00x as fast as .* not worth it", told) for told in found.remarks)
    advice = [remark for remark in found.remarks if "--keep-together" in remark]
    assert re.findall(r"--keep-together (\w+)", "".join(advice)) == advised
    if advice:
        held = price.step(calls_on(extraction, {"left": "cuda:0", "right": "cuda:1"}))
        assert f"is then predicted to take {milliseconds(held.step_s)} ms" in advice[0]
    assert not any(
        "--keep-together" in remark
        for remark in device_map(PlacedModules.of(extraction, placement)).remarks
    )


def test_no_step_is_predicted_where_only_the_layers_are_followed() -> None:
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in "12")
    model = Plain(lambda m, x: m.norm(m.layers[1](m.layers[0](x))), layers=layers)
    model.norm = nn.LayerNorm(4)
    extraction = extract(Step.of(model, torch.ones(2, 4), training=False))
    problem = problem_of(extraction)
    price = price_of(problem, placed_on(problem, 0, 1, 0), extraction, {})
    placed = PlacedModules.of(extraction, price.placed, price=price)
    found = layer_counts(placed)
    assert found.content["counts"] == [1, 1]
    around, *_, told = found.remarks
    assert "and then norm is on cuda:0 again" in around
    assert told.startswith("no step is predicted")


def test_joined_modules_are_where_the_step_is_predicted_to_be_fastest() -> None:
    left = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    right = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8))
    model = Plain(lambda m, x: m.head(torch.cat([m.left(x), m.right(x)], 1)), left=left)
    model.right, model.head = right, nn.Sequential(nn.Linear(12, 2), nn.Tanh())
    extraction = extract(Step.of(model, torch.ones(2, 4), training=False))
    graph = call_graph(extraction).graph
    placement = placement_of(graph, NAMES, [int(op.startswith("right")) for op in graph])
    price = price_of(problem_of(extraction), placement, extraction, {})
    by_work = device_map(PlacedModules.of(extraction, placement)).content
    assert by_work == {"left.0": 0, "left.2": 1, "right": 1, "head": 0}
    found = device_map(PlacedModules.of(extraction, placement, price=price)).content
    assert found == {"left": 0, "right.0": 1, "right.2": 0, "head": 0}


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_the_price_of_what_was_optimized_heeds_the_demands_of_its_user() -> None:
    cores = tuple(f"core:{core}" for core in CORES[:2])
    devices = tuple(
        Device(
            name=n,
            kind="core",
            memory_bytes=1 << 30,
            peak_flop_per_s=1e11,
            bandwidth_bytes_per_s=1e10,
            launch_s=1e-6,
        )
        for n in cores
    )
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
    exported = placer.export_placement(step.model, found, "device-map", renamed=renamed)
    assert exported.content == {"0": 0, "1": 1}
    *_, told = (remark for remark in exported.remarks if "predicted" in remark)
    assert f"impossible: op '0:sin' is on {cores[0]}, but may only run on {cores[1]}" in told


MODEL = """
import torch
from torch import nn

def build():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4))
    return model, (torch.ones(2, 4), torch.ones(2, 4)), nn.MSELoss()
"""


def built() -> Extraction:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4))
    return extract(Step.of(model, (torch.ones(2, 4), torch.ones(2, 4)), nn.MSELoss()))


@pytest.mark.slow
def test_the_command_holds_exports_to_the_memory_that_it_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACER_CACHE", str(tmp_path / "cache"))
    core = f"core:{CORES[0]}"
    model, given = tmp_path / "model.py", tmp_path / "placement.json"
    model.write_text(MODEL)
    extraction = built()
    placement_of(extraction.graph, (core,), [0] * len(extraction.graph)).save(given)
    command = ["export", str(given), f"{model}:build", "--format", "device-map"]
    command += ["--as", f"{core}=cuda:0", "--memory"]
    assert main([*command, f"{core}=300B"]) == 0
    assert "give --predict" in capsys.readouterr().err
    assert main([*command, f"{core}=300B", "--predict"]) == 0
    told = capsys.readouterr()
    assert f"no step is predicted, since as placed {core} needs " in told.err
    assert "but has 300 B" in told.err
    assert main([*command, f"{core}=1MB", "--predict"]) == 0
    assert capsys.readouterr().err == ""
    assert main([*command, "core:99=1MB"]) == 2
    assert "core:99" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_the_command_predicts_on_the_devices_of_the_placement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envs.calibrate.CONTENDED", np.inf)  # accept speeds measured under load
    cores = tuple(f"core:{core}" for core in CORES[:2])
    model = tmp_path / "model.py"
    model.write_text(MODEL)
    extraction = built()
    devices = [int(op.startswith("0.1")) for op in extraction.graph]
    given = tmp_path / "placement.json"
    placement_of(extraction.graph, cores, devices).save(given)
    renamed = f"{cores[0]}=cuda:0,{cores[1]}=cuda:1"
    command = ["export", str(given), f"{model}:build", "--format", "device-map", "--as", renamed]
    assert main(command) == 0
    plain = capsys.readouterr()
    assert "a step is predicted" not in plain.err
    assert "give --predict, too" in plain.err
    runs = f"torchrun --nproc-per-node=1 -m placer.run {model}:build --placement {given} --steps"
    assert runs in plain.err
    assert main([*command, "--predict"]) == 0
    priced = capsys.readouterr()
    assert "as exported a step is predicted to take " in priced.err
    assert priced.out == plain.out
    cached = calibrated_before(discover(",".join(cores)))
    assert cached is not None
    signatures = op_signatures(extraction.program)
    calm = Session(
        cost_s=dict.fromkeys(signatures, 1e-3), runs=1, spread=0.0, measured="2026-01-01"
    )
    CostCache().store(conditions_of(cached.devices[0]), calm)
    assert main(command) == 0
    known = capsys.readouterr()
    assert "as exported a step is predicted to take " in known.err
    assert "--predict" not in known.err
