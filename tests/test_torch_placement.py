"""Placements on torch's devices, with a fake second one: costs, runs, and the main job."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
from torch import nn
from vdev import TRANSFERS, vdev

import placer
from envs import measured_module, torch_speeds
from envs.call_costs import profile_calls
from envs.call_memory import FRAGMENTED_SHARE, plannable
from envs.cluster import Cluster, Link
from envs.discover import discover
from envs.executor.placed_module import PlacedModule
from envs.known_calls import call_costs, node_signatures
from envs.measured import Measurement
from envs.measured_module import MeasuredModule, launch_order
from envs.placement import Placement
from envs.problem import Problem
from envs.simulator import Simulator
from graphs.costs import with_costs
from graphs.extract import Step, extract
from graphs.extract.call_graph import call_graph
from graphs.graph import GraphArrays, add_edge, add_op, new_graph
from placer.cli.main import main

torch.set_num_threads(1)
QUICK = {k: make for k, make in tiny_models.STEPS.items() if k not in ("inception", "nmt")}
"""Without the two that have many calls: Python runs each on the second device."""
MEMORY = {"vdev:0": 1 << 30, "cpu": 1 << 30}


@pytest.fixture(autouse=True)
def second_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[None]:
    """A second device, and calibration that is quick and kept for one test."""
    monkeypatch.setenv("PLACER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch_speeds, "STREAM_BYTES", 1 << 20)
    monkeypatch.setattr(torch_speeds, "LARGE_BYTES", 1 << 20)
    monkeypatch.setattr(measured_module, "TURN_S", 0.0)
    if torch.cuda.is_available():
        if request.node.get_closest_marker("gpu") is None:
            pytest.skip("vdev would take CUDA's place")
        yield
        return
    with vdev():
        yield


def pair(memory: dict[str, int] | None = None) -> Cluster:
    return discover("vdev:0,cpu", memory or MEMORY)


def linked() -> Cluster:
    cluster = pair()
    link = Link(between=cluster.names, latency_s=1e-5, bandwidth_bytes_per_s=1e10)
    return replace(cluster, links=(link,))


# --- calibration


def test_the_second_device_is_measured_like_any_other() -> None:
    found = torch_speeds.measured_speeds(pair())
    assert [device.kind for device in found.devices] == ["vdev", f"cpu*{torch.get_num_threads()}"]
    for device in found.devices:
        assert device.memory_bytes == 1 << 30
        assert device.launch_s > 1e-7
        assert device.peak_flop_per_s > 1e8
    assert [link.between for link in found.links] == [("vdev:0", "cpu"), ("cpu", "vdev:0")]
    assert all(link.one_way and link.latency_s > 0 for link in found.links)
    sent = {(source.type, destination.type) for source, destination, _ in TRANSFERS}
    assert sent == {("vdev", "cpu"), ("cpu", "vdev")}


def test_a_device_that_hides_its_memory_must_be_given_some() -> None:
    with pytest.raises(ValueError, match="vdev:0 does not tell how much memory it has"):
        discover("vdev:0,cpu")


# --- costs


@pytest.mark.parametrize("make", QUICK.values(), ids=QUICK)
def test_every_node_has_a_cost_on_both_devices(make: Callable[[], Step]) -> None:
    step = make()
    before = tiny_models.state_of(step)
    extraction = extract(step)
    calls = call_graph(extraction)
    costs_s = profile_calls(extraction, calls, pair())
    assert costs_s.keys() == {"vdev", f"cpu*{torch.get_num_threads()}"}
    for cost_s in costs_s.values():
        assert cost_s.shape == (len(calls.graph),)
        assert (cost_s >= 0).all()
        forward = [d["phase"] == "forward" for _, d in calls.graph.nodes(data=True)]
        assert (cost_s[forward] > 0).any()
        if step.training:
            assert (cost_s[np.logical_not(forward)] > 0).any()
    tiny_models.assert_same(tiny_models.state_of(step), before)
    assert all(p.grad is None for p in step.model.parameters())


def test_costs_follow_the_work_and_leave_the_launch_out() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2048), nn.Linear(2048, 512))
    extraction = extract(Step.of(model, (torch.randn(64, 16), torch.randn(64, 512)), nn.MSELoss()))
    calls = call_graph(extraction)
    cluster = discover("cpu")
    (cost_s,) = profile_calls(extraction, calls, cluster).values()
    by_name = dict(zip(calls.graph, cost_s.tolist(), strict=True))
    assert by_name["3:linear"] > by_name["0:linear"]
    assert by_name["3:backward/linear"] > by_name["3:linear"]  # two products, not one
    slow = replace(cluster, devices=(replace(cluster.devices[0], launch_s=1.0),))
    (none,) = profile_calls(extraction, calls, slow).values()
    assert not none.any()


def test_a_call_without_room_is_not_allowed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    extraction = extract(tiny_models.conv_net())
    calls = call_graph(extraction)
    linear = torch.ops.aten.linear.default
    real = linear._op

    def full(*args: object, **kwargs: object) -> object:
        if args and isinstance(args[0], torch.Tensor) and args[0].device.type == "vdev":
            raise torch.OutOfMemoryError("Tried to allocate 1 GiB")
        return real(*args, **kwargs)

    monkeypatch.setattr(linear, "_op", full)
    costs_s = profile_calls(extraction, calls, pair())
    names = list(calls.graph)
    lacking = [names[i] for i in np.flatnonzero(np.isnan(costs_s["vdev"]))]
    assert {name.rpartition(":")[2] for name in lacking} >= {"linear", "backward/linear"}
    graph = with_costs(calls.graph, costs_s, dict.fromkeys(costs_s, "measured"))
    problem = Problem.of(GraphArrays.from_graph(graph), linked())
    assert not problem.allowed[names.index(lacking[0]), 0]
    assert problem.allowed[:, 1].all()


def test_costs_of_calls_are_known_after_three_profiles() -> None:
    extraction = extract(tiny_models.conv_net())
    calls = call_graph(extraction)
    cluster = linked()
    for _ in range(3):
        costs = call_costs(extraction, calls, cluster)
        assert all(s.startswith("measured") for own in costs.values() for s in own.sources)
    known = call_costs(extraction, calls, cluster)
    assert known.keys() == {device.kind for device in cluster.devices}
    for own in known.values():
        assert len(own.cost_s) == len(calls.graph)
        assert (own.cost_s >= 0).all()
        assert all(source.startswith("cached, measured") for source in own.sources)
    again = call_costs(extraction, calls, cluster, fresh=True)
    assert all(s.startswith("measured") for own in again.values() for s in own.sources)


def test_other_shapes_and_precisions_are_other_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def signatures(width: int) -> tuple[str, ...]:
        model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4))
        step = Step.of(model, (torch.randn(2, 4), torch.randn(2, 4)), nn.functional.mse_loss)
        extraction = extract(step)
        return node_signatures(extraction, call_graph(extraction))

    assert signatures(5) == signatures(5)
    assert not set(signatures(5)[:2]) & set(signatures(6)[:2])
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    plain = signatures(5)
    monkeypatch.undo()
    assert not set(plain) & set(signatures(5))


# --- memory


def test_gradients_count_once_like_their_parameters() -> None:
    step = tiny_models.tied_weights()
    nodes = call_graph(extract(step)).graph.nodes(data=True)
    parameters = {id(p): p.nbytes for p in step.model.parameters()}
    assert sum(node["parameter_bytes"] for _, node in nodes) == sum(parameters.values())
    assert sum(node["gradient_bytes"] for _, node in nodes) == sum(parameters.values())


def test_inference_and_frozen_parameters_have_no_gradients() -> None:
    for step in (tiny_models.structured_output(), tiny_models.INFERENCE["conv_net_inference"]()):
        nodes = call_graph(extract(step)).graph.nodes(data=True)
        assert not any(node["gradient_bytes"] for _, node in nodes)
    step = tiny_models.conv_net()
    step.model.get_submodule("0").requires_grad_(False)
    trained = sum(p.nbytes for p in step.model.parameters() if p.requires_grad)
    nodes = call_graph(extract(step)).graph.nodes(data=True)
    assert sum(node["gradient_bytes"] for _, node in nodes) == trained


def test_plans_leave_room_for_gaps_on_devices_of_torch_only() -> None:
    planned = plannable(pair())
    assert planned.devices[0].memory_bytes == int((1 << 30) * (1 - FRAGMENTED_SHARE))
    cores = discover("core:0")
    assert plannable(cores) == cores


# --- measuring


@pytest.fixture(scope="module")
def small() -> tuple[Step, Problem, list[Placement]]:
    """A problem with made-up costs; placements on vdev, alternating by group, and on the CPU."""
    step = tiny_models.conv_net()
    extraction = extract(step)
    calls = call_graph(extraction)
    ones = np.full(len(calls.graph), 1e-5)
    costs_s = {device.kind: ones for device in pair().devices}
    graph = with_costs(calls.graph, costs_s, dict.fromkeys(costs_s, "made"))
    problem = Problem.of(GraphArrays.from_graph(graph), linked())
    index = np.arange(problem.op_count)
    group = problem.graph.group
    alternating = np.where(group >= 0, group % 2, 0)
    placements = [
        Placement.of(problem.graph, problem.cluster, devices, -index.astype(float))
        for devices in (np.zeros_like(index), alternating, np.ones_like(index))
    ]
    return step, problem, placements


Small = tuple[Step, Problem, list[Placement]]


def opened(small: Small, **options: int) -> MeasuredModule:
    extraction = extract(small[0])
    return MeasuredModule(extraction, call_graph(extraction), small[1], **options)  # type: ignore[arg-type]  # rounds and warm_up


def test_placements_are_really_run_and_the_model_is_left_alone(small: Small) -> None:
    step, _, placements = small
    before, random = tiny_models.state_of(step), torch.get_rng_state()
    heard: list[tuple[int, int]] = []
    with opened(small, rounds=2) as backend:
        seen = backend.measure(placements, lambda *at: heard.append(at))
    assert heard == [(i + 1, 9) for i in range(9)]
    for one in seen:
        assert one.ok
        assert one.wall_s.shape == (2,)
        assert (one.wall_s > 0).all()
        assert one.contention == 1.0
    assert any(source.type == "vdev" for source, _, _ in TRANSFERS)
    tiny_models.assert_same(tiny_models.state_of(step), before)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.device.type == "cpu" and p.grad is None for p in step.model.parameters())


def test_a_placement_that_runs_out_of_memory_fails_and_the_others_go_on(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, placements = small
    forward = PlacedModule.forward

    def cramped(module: PlacedModule, *inputs: object, **keywords: object) -> object:
        if all(p.device.type == "vdev" for p in module.parameters()):
            raise torch.OutOfMemoryError("Tried to allocate 512.00 MiB")
        return forward(module, *inputs, **keywords)

    monkeypatch.setattr(PlacedModule, "forward", cramped)
    with opened(small, rounds=1) as backend:
        full, *others = backend.evaluate(placements)
    assert not full.feasible
    assert full.step_s == math.inf
    assert "Tried to allocate 512.00 MiB" in full.why
    assert "GB on vdev:0" in full.why
    for one in others:
        assert one.feasible
        assert one.parts.keys() == {"median_s", "min_s", "spread", "rebuilt_s", "contention"}
        assert one.peak_memory_bytes.keys() == {"vdev:0", "cpu"}


def test_what_does_not_belong_here_is_a_failure(small: Small) -> None:
    _, _, (good, *_) = small
    with opened(small, rounds=1) as backend:
        foreign, fine = backend.evaluate([replace(good, graph="0" * 64), good])
    assert "made for graph 000000" in foreign.why
    assert fine.feasible


def test_an_optimizer_may_be_part_of_the_step(small: Small) -> None:
    steps: list[int] = []

    class Counting(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            steps.append(len(self.param_groups[0]["params"]))
            super().step()

    extraction = extract(small[0])
    with MeasuredModule(
        extraction,
        call_graph(extraction),
        small[1],
        rounds=1,
        warm_up=0,
        make_optimizer=lambda parameters: Counting(parameters, lr=0.1),
    ) as backend:
        (seen,) = backend.measure(small[2][1:2])
    assert seen.ok
    assert len(steps) >= 2
    assert set(steps) == {len(list(small[0].model.parameters()))}


def test_ctrl_c_keeps_whole_rounds(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[int] = []
    steps = MeasuredModule._steps

    def interrupted(backend: MeasuredModule, placement: Placement) -> float:
        turns.append(1)
        if len(turns) == 6:
            raise KeyboardInterrupt
        return steps(backend, placement)

    monkeypatch.setattr(MeasuredModule, "_steps", interrupted)
    with opened(small, rounds=3, warm_up=0) as backend:
        seen: list[Measurement] = backend.measure(small[2][:2])
    assert backend.interrupted
    assert [len(one.wall_s) for one in seen] == [2, 2]


def test_ops_of_the_cpu_are_launched_after_what_runs_beside_them() -> None:
    graph = new_graph("beside")
    for name, seconds in (("host", 3e-3), ("a", 1e-3), ("b", 1e-3), ("after", 1e-3)):
        add_op(graph, name, cost_s={"*": seconds})
    for source in ("host", "b"):
        add_edge(graph, source, "after")
    add_edge(graph, "a", "b")
    problem = Problem.of(GraphArrays.from_graph(graph), linked())
    devices = np.array([1, 0, 0, 0], np.int32)
    schedule = Simulator(problem).run(devices, np.zeros(4))
    order = launch_order(problem, schedule)
    assert [problem.graph.ids[i] for i in order] == ["a", "b", "host", "after"]
    priority = np.empty(4)
    priority[order] = -np.arange(4.0)
    again = Simulator(problem).run(devices, priority)
    assert again.start_ns.tolist() == schedule.start_ns.tolist()


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


def test_a_model_too_large_for_a_device_is_placed_and_runs_as_placed(tmp_path: Path) -> None:
    model, tokens = build()
    alone = copy.deepcopy(model)
    found = placer.optimize(
        model,
        tokens,
        devices="vdev:0,cpu",
        memory={"vdev:0": "100kB", "cpu": 1 << 30},
        pin={"left": "vdev:0"},
        budget="300e",
        progress=False,
    )
    assert found.best.measurement is not None
    assert found.placement.measured is not None
    assert found.devices_of("left").keys() == {"vdev:0"}
    assert found.device_of("table") == "cpu"  # 256 kB
    single = next(row for row in found.rows if row.name == "single vdev:0")
    assert single.why.startswith("vdev:0 needs") or not single.is_single
    found.save(tmp_path / "placement.json")

    expected = alone(tokens)
    expected.backward()
    for own, placement in ((model, found), (copy.deepcopy(alone), tmp_path / "placement.json")):
        own.zero_grad()
        TRANSFERS.clear()
        placed = placer.apply(own, placement, tokens)
        loss = placed(tokens)
        loss.backward()
        assert TRANSFERS
        assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
        assert placed.state_dict().keys() == alone.state_dict().keys()
        for here, there in zip(placed.parameters(), alone.parameters(), strict=True):
            assert here.grad is not None
            assert there.grad is not None
            torch.testing.assert_close(here.grad.to("cpu"), there.grad, atol=1e-6, rtol=0)
    assert next(model.left.parameters()).device.type == "vdev"


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
        memory={"cuda:0": "256MiB"},
        budget="500e",
        progress=False,
    )
    assert found.best.measurement is not None
    assert found.device_of("0") == "cpu"  # 256 MB, and as much for its gradient
    torch.empty(1 << 30, dtype=torch.uint8, device="cuda")  # the limit is lifted
    placed = placer.apply(model, found)
    loss = placed(tokens, target)
    loss.backward()
    nn.MSELoss()(alone(tokens), target).backward()
    for here, there in zip(placed.parameters(), alone.parameters(), strict=True):
        assert here.grad is not None
        assert there.grad is not None
        torch.testing.assert_close(here.grad.to("cpu"), there.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_placement_over_the_limit_of_a_gpu_fails_and_the_others_go_on() -> None:
    model = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 4096))
    step = Step.of(model, (torch.randn(8, 4096), torch.randn(8, 4096)), nn.MSELoss())
    extraction = extract(step)
    calls = call_graph(extraction)
    cluster = discover("cuda:0,cpu")
    costs_s = profile_calls(extraction, calls, cluster)
    assert all((cost_s >= 0).all() for cost_s in costs_s.values())
    link = Link(between=cluster.names, latency_s=1e-5, bandwidth_bytes_per_s=1e10)
    graph = with_costs(calls.graph, costs_s, dict.fromkeys(costs_s, "made"))
    problem = Problem.of(GraphArrays.from_graph(graph), replace(cluster, links=(link,)))
    everywhere = [np.full(problem.op_count, d) for d in range(2)]
    placements = [
        Placement.of(problem.graph, problem.cluster, devices, np.zeros(problem.op_count))
        for devices in everywhere
    ]
    with MeasuredModule(
        extraction, calls, problem, limits={"cuda:0": 200 << 20}, rounds=1
    ) as backend:
        full, fine = backend.evaluate(placements)
    assert "GB on cuda:0" in full.why
    assert fine.feasible
    with MeasuredModule(extraction, calls, problem, rounds=1) as backend:
        (there,) = backend.evaluate(placements[:1])
    assert there.feasible
    assert there.peak_memory_bytes["cuda:0"] >= sum(2 * p.nbytes for p in model.parameters())


def test_where_no_plan_fits_in_fact_it_is_planned_for_less_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned: list[int] = []
    measure = MeasuredModule.measure

    def first_too_large(
        backend: MeasuredModule, placements: list[Placement], *_: object, **__: object
    ) -> list[Measurement]:
        planned.append(backend.problem.cluster.devices[0].memory_bytes)
        seen = measure(backend, placements)
        if len(planned) > 1:
            return seen
        nothing = np.array([])
        full = Measurement(wall_s=nothing, rebuilt_s=nothing, failure="no room", overfull=True)
        return [
            full if len(set(p.devices)) > 1 else one
            for p, one in zip(placements, seen, strict=True)
        ]

    monkeypatch.setattr(MeasuredModule, "measure", first_too_large)
    model, tokens = build()
    found = placer.optimize(
        model,
        tokens,
        devices="vdev:0,cpu",
        memory={"vdev:0": "100kB", "cpu": 1 << 30},
        pin={"left": "vdev:0", "table": "cpu"},
        budget="100e",
        progress=False,
    )
    assert planned == [92_000, 78_200]
    assert not found.best.failure
    assert found.best.measurement is not None
    assert found.devices_of("left").keys() == {"vdev:0"}
    assert any("failed: no room" in remark for remark in found.remarks)


TARGET = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(500, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, (torch.randint(500, (8,)), torch.randn(8, 4)), nn.MSELoss()
"""


def test_the_command_takes_devices_of_torch_and_limits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.py").write_text(TARGET)
    out = tmp_path / "placement.json"
    arguments = [f"{tmp_path / 'model.py'}:build", "--budget", "100e", "--out", str(out), "--json"]
    limits = ["--devices", "vdev:0,cpu", "--memory", "vdev:0=16KiB,cpu=1GiB"]
    assert main(["optimize", *arguments, *limits]) == 0
    written = json.loads(out.read_text())
    assert set(written["devices"].values()) <= {"vdev:0", "cpu"}
    assert json.loads(capsys.readouterr().out)["measured"]["step_s"] > 0
    assert main(["optimize", *arguments, "--devices", "vdev:0", "--memory", "cpu=1GB"]) == 2
    assert "memory of cpu is limited" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["optimize", *arguments, "--memory", "vdev:0=much"])
