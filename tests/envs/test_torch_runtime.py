"""Placements that are run and timed on torch devices, with a fake second one."""

from __future__ import annotations

import math
import os
import threading
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import placer
from envs.backend import measurements
from envs.costs.calls import profile_calls
from envs.executors.state_devices import State, StateDevices
from envs.executors.torch.placed_module import PlacedModule
from envs.executors.torch.watchdog import STUCK
from envs.hardware import torch_devices
from envs.hardware.cluster import Link
from envs.hardware.discover import discover
from envs.measured import FEWEST_ROUNDS, Failure, Measured, TimedStep
from envs.placement import Placement
from envs.problem import Problem
from envs.simulator import Simulator
from envs.torch_runtime import TorchExecutor
from envs.torch_runtime import executor as executor_module
from envs.torch_runtime.runtime import TorchRuntime, launch_order
from graphs.costs import with_costs
from graphs.extract import Workload, extract
from graphs.extract.placeable import call_graph, module_map
from graphs.graph import GraphArrays, add_edge, add_op, new_graph
from tests.helpers import tiny_models
from tests.helpers.clusters import MEMORY, equal_costs, linked
from tests.helpers.second_devices import FAKE, opened_device
from tests.helpers.vdev import TRANSFERS

pytestmark = pytest.mark.usefixtures("second_device")


# --- measuring


@pytest.fixture(scope="module")
def small() -> tuple[Workload, Problem, list[Placement]]:
    """Return a problem with made-up costs, placed on cuda:0, alternating by group, and on cpu."""
    step = tiny_models.conv_net()
    extraction = extract(step)
    calls = call_graph(extraction)
    with opened_device(FAKE):
        problem = equal_costs(calls.graph)
    index = np.arange(problem.op_count)
    group = problem.graph.group
    alternating = np.where(group >= 0, group % 2, 0)
    placements = [
        Placement.of(problem.graph, problem.cluster, devices, -index.astype(float))
        for devices in (np.zeros_like(index), alternating, np.ones_like(index))
    ]
    return step, problem, placements


Small = tuple[Workload, Problem, list[Placement]]


def opened(small: Small, *, rounds: int = 1, warm_up: int = 0, **options: Any) -> Measured:
    extraction = extract(small[0])
    executor = TorchExecutor(extraction, call_graph(extraction), small[1], **options)
    return Measured(executor, rounds=rounds, warm_up=warm_up)


def executor_of(backend: Measured) -> TorchExecutor:
    assert isinstance(backend.executor, TorchExecutor)
    return backend.executor


def test_placements_are_really_run_and_the_model_is_left_alone(small: Small) -> None:
    step, _, placements = small
    before, random = tiny_models.state_of(step), torch.get_rng_state()
    with opened(small, rounds=2, warm_up=1) as backend:
        for one in measurements(backend.evaluate(placements)):
            assert one.ok, one.failure
            assert one.wall_s.shape == (2,)
    assert any(source.type == "cuda" for source, _, _ in TRANSFERS)
    tiny_models.assert_same(tiny_models.state_of(step), before)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.device.type == "cpu" and p.grad is None for p in step.model.parameters())


@pytest.mark.slow
def test_the_rounds_are_few_where_their_time_is_over(small: Small) -> None:
    step, problem, placements = small
    runtime = TorchRuntime(extract(step), problem.cluster)
    with runtime.backend(problem, rounds=7, seconds=0.0) as backend:
        runs = measurements(backend.evaluate(placements))
    assert [len(each.wall_s) for each in runs] == 3 * [FEWEST_ROUNDS]


@pytest.mark.slow_repeats
@pytest.mark.parametrize(("index", "name"), [(0, "cuda:0"), (2, "cpu")])
def test_a_placement_that_runs_out_of_memory_fails_and_the_others_go_on(
    index: int, name: str, small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = PlacedModule.forward

    def cramped(module: PlacedModule, *inputs: object, **keywords: object) -> object:
        if {str(p.device) for p in module.parameters()} == {name}:
            if name == "cpu":
                torch.empty(1 << 50)
            raise torch.OutOfMemoryError("DefaultCPUAllocator: can't allocate memory")
        return forward(module, *inputs, **keywords)

    monkeypatch.setattr(PlacedModule, "forward", cramped)
    monkeypatch.setattr(TorchExecutor, "_peaks", lambda *_: {name: 7})  # the CPU counts nothing
    with opened(small) as backend:
        others = backend.evaluate(small[2])
    full = others.pop(index)
    assert (full.feasible, full.step_s) == (False, math.inf)
    assert full.measurement is not None
    assert full.measurement.overfull
    assert "can't allocate memory" in full.why
    assert f"GB on {name}" in full.why
    assert full.peak_memory_bytes == {name: 7}, "what was measured, not what was predicted"
    for one in others:
        assert one.feasible, one.why
        assert one.peak_memory_bytes.keys() == {"cuda:0", "cpu"}


@pytest.mark.slow_repeats
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError, IndexError])
def test_what_a_failed_step_made_is_gone_before_the_next_placement(
    small: Small, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    forward = PlacedModule.forward

    def failing(module: PlacedModule, *inputs: object, **keywords: object) -> object:
        if made:
            return forward(module, *inputs, **keywords)
        first = torch.ones(1000)
        made.append(weakref.ref(first))
        raise error("not here")

    def released(_: torch.device) -> None:
        alive.append(sum(own() is not None for own in made))

    monkeypatch.setattr(PlacedModule, "forward", failing)
    monkeypatch.setattr(torch_devices, "release", released)
    with opened(small) as backend:
        failed, fine = measurements(backend.evaluate(small[2][:2]))
    assert "not here" in failed.failure
    assert failed.overfull is (error is torch.OutOfMemoryError)
    assert fine.ok, fine.failure
    assert made
    assert not any(alive)


@pytest.mark.slow
def test_weights_are_sent_again_only_after_another_placement(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, _, (there, split, _) = small
    sent: list[int] = []
    run = TorchExecutor.run

    def moved_bytes(executor: TorchExecutor) -> int:
        return executor._placed.moved_bytes if isinstance(executor._placed, PlacedModule) else 0

    def counted(executor: TorchExecutor, placement: Placement) -> TimedStep | Failure:
        before = moved_bytes(executor)
        done = run(executor, placement)
        sent.append(moved_bytes(executor) - before)
        return done

    monkeypatch.setattr(TorchExecutor, "run", counted)
    weights = sum(p.nbytes for p in step.model.parameters())
    with opened(small, rounds=3) as backend:
        assert measurements(backend.evaluate([there]))[0].ok
        assert sent[0] >= weights
        assert sent[1:] == [0, 0]
        sent.clear()
        assert all(one.ok for one in measurements(backend.evaluate([there, split])))
        assert [size > 0 for size in sent] == [False, True] * 3, "in turn, each begins a round"
        assert sent[3] >= weights, "the other placement's weights were taken off the devices first"


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("steps_s", "expected_s", "ran"),
    [
        ([0.5, 0.1, 0.04, 0.041, 0.04, 0.045, 0.05, 9], 0.043, 7),
        ([0.3, 0.3, 9], 0.3, 2),
        ([1, 2, 1, 2, 1, 2, 1, 9], 1, 7),
    ],
)
def test_steps_count_once_two_in_a_row_agree(
    steps_s: list[float],
    expected_s: float,
    ran: int,
    small: Small,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rest = iter(steps_s)
    monkeypatch.setattr(executor_module, "MOST_WARM_UP", 6)
    monkeypatch.setattr(executor_module, "TURN_S", 0.164)  # four steps of 41 ms
    monkeypatch.setattr(TorchExecutor, "_step", lambda *_: next(rest))
    with opened(small) as backend:
        (seen,) = measurements(backend.evaluate(small[2][:1]))
    assert seen.wall_s.tolist() == [pytest.approx(expected_s)]
    assert len(steps_s) - len(list(rest)) == ran


def test_what_was_on_a_device_before_is_no_part_of_a_peak(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at(device: torch.device, size: int) -> int:
        return size if device.type == "cuda" else 0

    monkeypatch.setattr(torch_devices, "held_bytes", lambda device: at(device, 100))
    monkeypatch.setattr(torch_devices, "peak_bytes", lambda device: at(device, 107) or None)
    with opened(small) as backend:
        (seen,) = measurements(backend.evaluate(small[2][:1]))
    assert seen.peak_memory_bytes == {"cuda:0": 7}


@pytest.mark.slow
def test_weights_leave_a_device_that_had_no_room_for_all_of_them(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, (there, *others) = small
    moved: list[torch.device] = []
    move = StateDevices._move

    def cramped(devices: StateDevices, state: State, tensor: Tensor, home: torch.device) -> Tensor:
        if home.type == "cuda" and len(moved) == 2:
            raise torch.OutOfMemoryError("Tried to allocate 512.00 MiB")
        moved.append(home)
        return move(devices, state, tensor, home)

    with opened(small) as backend:
        with monkeypatch.context() as patch:
            patch.setattr(StateDevices, "_move", cramped)
            (full,) = measurements(backend.evaluate([there]))
        assert full.overfull
        assert len(moved) == 2
        state = executor_of(backend)._extraction.step.named_state()
        assert {tensor.device.type for tensor in state.values()} == {"cpu"}
        assert all(one.ok for one in measurements(backend.evaluate([there, *others])))


@pytest.mark.slow
def test_a_step_that_hangs_ends_the_process_with_a_sentence(
    small: Small, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    statuses: list[int] = []
    ended = threading.Event()

    def leave(status: int) -> None:
        statuses.append(status)
        ended.set()

    def hang(*_: object) -> None:
        assert ended.wait(timeout=60)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(PlacedModule, "step", hang)
    with opened(small, timeout_s=0.01) as backend:
        backend.evaluate(small[2][:1])
    assert statuses == [STUCK]
    assert "0.01 s" in capfd.readouterr().err


def test_ops_of_the_cpu_are_launched_after_what_runs_beside_them() -> None:
    graph = new_graph("beside")
    for name, seconds in (("host", 3e-3), ("a", 1e-3), ("b", 1e-3), ("after", 1e-3)):
        add_op(graph, name, cost_s={"*": seconds})
    for source in ("host", "b"):
        add_edge(graph, source, "after")
    add_edge(graph, "a", "b")
    arrays, devices = GraphArrays.from_graph(graph), np.array([1, 0, 0, 0], np.int32)
    problem = Problem.of(arrays, replace(linked(), hosts=()))
    schedule = Simulator(problem).run(devices, np.zeros(4))
    order = launch_order(problem, schedule)
    assert [problem.graph.ids[i] for i in order] == ["a", "b", "host", "after"]
    priority = np.empty(4)
    priority[order] = -np.arange(4.0)
    again = Simulator(problem).run(devices, priority)
    assert again.start_ns.tolist() == schedule.start_ns.tolist()


def test_with_a_host_ops_are_launched_as_simulated() -> None:
    graph = new_graph("beside")
    for name in "abc":
        add_op(graph, name, cost_s={"*": 1e-3})
    problem = Problem.of(GraphArrays.from_graph(graph), linked())
    schedule = Simulator(problem).run(np.array([1, 0, 0], np.int32), np.array([2.0, 1.0, 3.0]))
    assert launch_order(problem, schedule) == [2, 0, 1]


@pytest.mark.slow_repeats
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("extractor", ["auto", "modules"])
def test_a_model_that_keeps_computed_tensors_is_measured(extractor: str) -> None:
    normed = torch.nn.utils.weight_norm(nn.Linear(6, 6))
    step = Workload.of(
        nn.Sequential(normed, nn.ReLU(), nn.Linear(6, 3)),
        (torch.randn(5, 6), torch.randn(5, 3)),
        nn.MSELoss(),
    )
    found = placer.optimize(
        step.model,
        step.inputs,
        loss=step.loss,
        extractor=extractor,
        devices="cuda:0,cpu",
        constraints=placer.Constraints(memory=MEMORY, pins={"0": "cuda:0", "2": "cpu"}),
        search=placer.SearchConfig(budget="5e", policy=None),
        progress=False,
    )
    assert found.best.measurement is not None
    assert found.best.measurement.ok, found.best.measurement.failure
    assert not normed.weight.is_leaf
    with placer.apply(step.model, found) as placed:
        assert placed.get_submodule("0").weight_v.device.type == "cuda"


class Growing(nn.Module):
    """Appends to the list that it is passed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, found: list[Tensor]) -> Tensor:
        found.append(self.linear(sum(found)))
        return found[-1]


def test_every_step_of_a_turn_begins_with_the_same_lists() -> None:
    step = Workload.of(Growing(), ([torch.randn(3, 4)], torch.randn(3, 4)), nn.MSELoss())
    extraction = extract(step, "modules")
    modules = module_map(extraction)
    problem = equal_costs(modules.graph)
    none = np.zeros(problem.op_count)
    placement = Placement.of(problem.graph, problem.cluster, none.astype(int), none)
    with Measured(TorchExecutor(extraction, modules, problem), rounds=2) as backend:
        assert measurements(backend.evaluate([placement]))[0].ok
        assert len(executor_of(backend)._extraction.step.inputs[0]) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_placement_over_the_limit_of_a_gpu_fails_and_the_others_go_on() -> None:
    model = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 4096))
    step = Workload.of(model, (torch.randn(8, 4096), torch.randn(8, 4096)), nn.MSELoss())
    extraction = extract(step)
    calls = call_graph(extraction)
    cluster = discover("cuda:0,cpu")
    costs_s = profile_calls(extraction, calls, cluster.devices)
    assert all(np.isfinite(cost_s).all() for cost_s in costs_s.values())
    link = Link(between=cluster.names, latency_s=1e-5, bandwidth_bytes_per_s=1e10)
    graph = with_costs(calls.graph, costs_s, dict.fromkeys(costs_s, "made"))
    problem = Problem.of(GraphArrays.from_graph(graph), replace(cluster, links=(link,)))
    everywhere = [np.full(problem.op_count, d) for d in range(2)]
    placements = [
        Placement.of(problem.graph, problem.cluster, devices, np.zeros(problem.op_count))
        for devices in everywhere
    ]
    limited = TorchExecutor(extraction, calls, problem, limits={"cuda:0": 200 << 20})
    with Measured(limited, rounds=1) as backend:
        full, fine = backend.evaluate(placements)
    assert "GB on cuda:0" in full.why
    assert fine.feasible, fine.why
    with Measured(TorchExecutor(extraction, calls, problem), rounds=1) as backend:
        (there,) = backend.evaluate(placements[:1])
    assert there.feasible, there.why
    assert there.peak_memory_bytes["cuda:0"] >= sum(2 * p.nbytes for p in model.parameters())
