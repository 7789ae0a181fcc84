"""Steps with an optimizer: updates, state, and placement."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import placer
from envs.costs.ops import profile_runs
from envs.executors.cores.instruction_lists import Run, device_lists, priority_order
from envs.executors.cores.placed_model import PlacedModel
from envs.hardware.discover import discover
from envs.placement import Placement
from graphs.extract import Extraction, ExtractionError, Workload, extract
from graphs.extract.program import Call, Ref, Source, StepProgram, Value
from graphs.graph import PHASES, GraphArrays
from graphs.optimizer import STATE, Optimizer
from tests.helpers import one_process, tiny_models
from tests.helpers.in_turn import in_turn
from tests.helpers.tiny_models import Plain, assert_same, forward, state_of
from tests.helpers.trained_alike import torch_optimizer, with_optimizer

CORES = sorted(os.sched_getaffinity(0))
EVERY_KIND = pytest.mark.parametrize("kind", STATE)
EVERY_MODEL = pytest.mark.parametrize(
    "name", in_turn(sorted(tiny_models.TRAINING.keys() - {"inception"}))
)


def at_random(extraction: Extraction, count: int, seed: int) -> tuple[list[int], list[int]]:
    """Return random devices, one for each co-location group or other op, and a random order."""
    randomly = random.Random(seed)
    home: dict[str, int] = {}
    devices = [
        home.setdefault(data["colocate"] or op_id, randomly.randrange(count))
        for op_id, data in extraction.graph.nodes(data=True)
    ]
    return devices, priority_order(extraction.program, [randomly.random() for _ in devices])


def placed(extraction: Extraction, count: int, seed: int = 0) -> PlacedModel:
    if len(CORES) < count:
        pytest.skip(f"{count} devices need {count} cores")
    cluster = discover(",".join(f"core:{core}" for core in CORES[:count]))
    return PlacedModel(extraction, cluster, *at_random(extraction, count, seed))


def trained(step: Workload, steps: int, *, count: int = 2, seed: int = 0) -> dict[str, Tensor]:
    """Return the state after some placed steps, with the devices taking turns in this process."""
    extraction = extract(step)
    devices, order = at_random(extraction, count, seed)
    lists = device_lists(extraction.program, devices, order, count)
    return one_process.run(extraction, lists, steps=steps).state


def eager_training(step: Workload, steps: int) -> dict[str, Tensor]:
    """Return the state after some steps with torch's own optimizer."""
    step = copy.deepcopy(step)
    assert step.optimizer is not None
    optimizer = torch_optimizer(step.model, step.optimizer, fused=True)
    for _ in range(steps):
        optimizer.zero_grad()
        forward(step).backward()
        optimizer.step()
    return state_of(step)


# --- updates


@pytest.mark.slow_repeats
@pytest.mark.parametrize("name", in_turn([*tiny_models.TRAINING, "other_layouts"]))
def test_any_model_is_updated_as_by_torch(name: str) -> None:
    make = other_layouts if name == "other_layouts" else tiny_models.STEPS[name]
    step = with_optimizer(make(), "adamw", learning_rate=0.01)
    assert_same(trained(step, 3, seed=len(name)), eager_training(step, 3))


def other_layouts() -> Workload:
    """Return a step whose gradients are computed in another layout than autograd keeps them in."""

    def forward(m: Any, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = (m.across * x).sum() + (m.spread.sum() * y).sum()
        return out

    torch.manual_seed(0)
    model = Plain(forward)
    model.across = nn.Parameter(torch.randn(4, 3).t())
    model.spread = nn.Parameter(torch.randn(3, 4))
    return Workload.of(model, (torch.randn(3, 4), torch.randn(3, 4)))


@pytest.mark.slow
def test_training_goes_on_from_a_saved_state() -> None:
    step = with_optimizer(tiny_models.conv_net(), "adamw", learning_rate=0.05)
    expected = eager_training(step, 2)
    extraction = extract(step)
    with placed(extraction, 1) as model:
        model.step(*step.inputs)
        kept = model.optimizer_state()
    with placed(extraction, 2) as model:
        with pytest.raises(ValueError, match=r"exp_avg.* is .* here, but nothing was given"):
            model.load_optimizer_state({})
        model.load_optimizer_state(kept)
        model.step(*step.inputs)
        assert_same(state_of(step), expected)


@pytest.mark.slow_repeats
@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_measuring_costs_often_leaves_every_number_finite(kind: str) -> None:
    """Includes adam's first update, which divides by 0 if its count is 0."""
    step = with_optimizer(tiny_models.conv_net(), kind, learning_rate=1e9)
    before = state_of(step)
    extraction = extract(step)
    profile_runs(extraction, discover(f"core:{CORES[0]}").devices, repeats=3)
    assert_same(state_of(step), before)


# --- the graph


@pytest.mark.slow_repeats
@EVERY_KIND
@pytest.mark.parametrize("name", ["conv_net", "tied_weights", "own_loss"])
def test_sizes_are_those_of_torchs_optimizer(kind: str, name: str) -> None:
    step = with_optimizer(tiny_models.STEPS[name](), kind)
    arrays = GraphArrays.from_graph(extract(step).graph)
    assert step.optimizer is not None
    twin = copy.deepcopy(step)
    forward(twin).backward()
    optimizer = torch_optimizer(twin.model, step.optimizer)
    optimizer.step()
    state = [t for own in optimizer.state.values() for t in own.values() if t is not None]
    gradients = [p.grad for p in twin.model.parameters() if p.grad is not None]
    assert arrays.gradient_bytes.sum() == sum(g.nbytes for g in gradients) > 0
    assert arrays.optimizer_bytes.sum() == sum(t.nbytes for t in state)
    updates = arrays.phase == PHASES.index("optimizer")
    assert updates.sum() == len(gradients)
    passes = {"sgd": 3, "momentum": 5, "adam": 7, "adamw": 7}[kind]  # parameters read and written
    scalars = 8 + (4 if kind.startswith("adam") else 0)  # the learning rate, the number of updates
    expected = sum(passes * g.nbytes + scalars for g in gradients)
    assert arrays.moved_bytes[updates].sum() == expected


@pytest.mark.slow_repeats
@EVERY_MODEL
def test_a_gradient_is_counted_once(name: str) -> None:
    """It counts at its parameter's home, not also as the output of the op that makes it."""
    extraction = extract(tiny_models.STEPS[name]())
    program = extraction.program
    calls = [call for call in program.calls if call.op >= 0]
    made = sum(program.values[v].size_bytes for c in calls for v in c.outputs if v is not None)
    read = {program.values[v].root for c in calls for v in c.reads}
    gradients = {program.values[v].root for v in program.gradients.values()} - read
    arrays = GraphArrays.from_graph(extraction.graph)
    assert arrays.output_bytes.sum() == made - sum(program.values[v].size_bytes for v in gradients)
    trained = {id(p): p.nbytes for p in extraction.step.model.parameters() if p.requires_grad}
    unused = extraction.step.model.get_submodule("unused") if name == "own_loss" else nn.Module()
    expected = sum(trained.values()) - sum(p.nbytes for p in unused.parameters())
    assert arrays.gradient_bytes.sum() == expected


@pytest.mark.slow_repeats
@EVERY_MODEL
def test_an_update_is_at_home_with_all_readers_and_named_after_its_parameter(name: str) -> None:
    extraction = extract(with_optimizer(tiny_models.STEPS[name](), "sgd"))
    program, ids = extraction.program, list(extraction.graph)
    groups = {op_id: data["colocate"] for op_id, data in extraction.graph.nodes(data=True)}
    named = {s.value: s.name for s in program.sources if s.role == "parameter"}
    named |= {r.value: r.name for r in program.results if r.role == "state"}
    updates = [call for call in program.calls if call.writes]
    assert len(updates) == len(program.gradients)
    for update in updates:
        parameter = named[update.writes[0]]
        module, _, own = parameter.rpartition(".")
        assert ids[update.op] == f"{module}:optimizer/sgd.{own}"
        assert groups[ids[update.op]] is not None
        for call in program.calls:
            read = {named.get(program.values[value].root, "") for value in call.reads}
            if call.op >= 0 and program.ties.get(parameter, parameter) in {
                program.ties.get(other, other) for other in read
            }:
                assert groups[ids[call.op]] == groups[ids[update.op]]


def test_an_op_that_writes_in_place_runs_after_its_readers_whatever_the_order() -> None:
    """Three ops: 0 writes x, 1 and 2 read x, 2 through a view."""
    x, y = Value((2, 3), (3, 1), torch.float32, 0), Value((2, 3), (3, 1), torch.float32, 1)
    view = replace(x, shape=(3, 2), stride=(1, 3), root=0)
    z = replace(y, root=3)

    def call(op: int, reads: int, *outputs: int, writes: tuple[int, ...] = ()) -> Call:
        return Call(
            op, "aten.t.default", (Ref(reads),), {}, outputs, False, (reads,), writes=writes
        )

    program = StepProgram(
        values=(x, y, view, z),
        calls=(call(0, 0, writes=(0,)), call(1, 0, 1), call(-1, 0, 2), call(2, 2, 3)),
        sources=(Source(0, "parameter", "x"),),
        results=(),
        op_count=3,
        training=True,
    )
    assert program.overwritten() == {0: {1, 2}}
    for order in ([0, 1, 2], [1, 0, 2], [2, 1, 0]):
        (own,) = device_lists(program, [0, 0, 0], order, 1)
        assert [i.call for i in own if isinstance(i, Run)][-1] == 0
    (own,) = device_lists(program, [0, 0, 0], [2, 0, 1], 1)
    assert [i.call for i in own if isinstance(i, Run)] == [3, 1, 0]


def test_a_placement_with_optimizer_also_places_the_step_without() -> None:
    step = tiny_models.conv_net()
    plain = GraphArrays.from_graph(extract(step).graph)
    full = GraphArrays.from_graph(extract(with_optimizer(step, "adamw")).graph)
    assert full.hash == plain.hash
    cluster = discover(f"core:{CORES[0]}")
    zeros = torch.zeros(len(full), dtype=torch.int64).numpy()
    placement = Placement.of(full, cluster, zeros, zeros)
    assert placement.aligned(plain, cluster).ops == plain.ids
    assert placement.aligned(full, cluster).ops == full.ids
    with pytest.raises(ValueError, match="align it first"):
        placement.check(plain, cluster)
    without = placement.aligned(plain, cluster)
    with pytest.raises(ValueError, match=r"such as optimizer op '0:optimizer/adamw.weight'"):
        without.aligned(full, cluster)


@pytest.mark.slow
def test_what_was_searched_with_an_optimizer_is_applied_with_or_without() -> None:
    step = tiny_models.conv_net()
    model, twin = step.model, copy.deepcopy(step.model)
    cluster = discover(f"core:{CORES[0]}")
    found = placer.optimize(
        placer.Workload.of(model, step.inputs, loss=step.loss, optimizer="momentum"),
        devices=cluster,
        search=placer.SearchConfig(budget="20e", measure=False),
        progress=False,
    )
    assert not any("No optimizer" in remark for remark in found.remarks)
    plain = GraphArrays.from_graph(extract(step).graph)
    without = replace(found, problem=replace(found.problem, graph=plain))
    assert without.remarks[0].startswith("No optimizer is in the step")
    with placer.apply(model, found) as placed_model:
        placed_model.step(*step.inputs)
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.load_state_dict(twin.state_dict())
    optimizer = placer.Optimizer(kind="momentum", learning_rate=0.1)
    own = torch_optimizer(twin, optimizer)
    forward(replace(step, model=twin)).backward()
    own.step()
    with placer.apply(model, found, optimizer=optimizer) as placed_model:
        placed_model.step(*step.inputs)
        assert_same(state_of(step), state_of(replace(step, model=twin)))
    with pytest.raises(ValueError, match="such as optimizer op"):
        placer.apply(model, found, optimizer="sgd")


# --- refusals


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Optimizer.of("adamm"), r"'adamm' .* adam\?"),
        (lambda: Optimizer(kind="sgd", learning_rate=-1), "learning_rate of the optimizer is -1"),
        (lambda: Optimizer(kind="adam", betas=(0.9, 1.0)), "betas"),
        (
            lambda: replace(tiny_models.structured_output(), optimizer=Optimizer(kind="sgd")),
            "inference has no gradients for sgd",
        ),
    ],
)
def test_bad_optimizers_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_parameter_with_gaps_is_refused() -> None:
    step = tiny_models.views()
    weight = step.model.get_parameter("second.weight")
    weight.data = torch.randn(3, 6)[:, ::2]
    with pytest.raises(ExtractionError, match=r"second.weight cannot be updated in place.*gaps"):
        extract(with_optimizer(step, "sgd"))
