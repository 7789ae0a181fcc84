"""Whole steps of placed modules, with an optimizer, in bf16, or both, equal the model's."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from envs.backend import measurements
from envs.costs.calls import profile_calls
from envs.executors.torch import updates
from envs.executors.torch.placed_module import PlacedModule
from envs.measured import Measured
from envs.placement import Placement
from envs.torch_runtime import TorchExecutor
from graphs.extract import Extraction, Workload, extract
from graphs.extract.placeable import call_graph
from graphs.graph import attributes_of
from tests.helpers import tiny_models
from tests.helpers.clusters import equal_costs, pair
from tests.helpers.placed_steps import random_devices, random_order
from tests.helpers.second_devices import DEVICES, second
from tests.helpers.tiny_models import Plain, forward, squared, state_of
from tests.helpers.trained_alike import torch_optimizer, with_optimizer

pytestmark = pytest.mark.usefixtures("second_device")
ON_DEVICES = pytest.mark.parametrize("second_device", DEVICES, indirect=True)
CPU = torch.device("cpu")


def two_devices() -> list[torch.device]:
    return [CPU, second()]


def apart(extraction: Extraction, seed: int = 1) -> PlacedModule:
    """Place the step at random on both devices."""
    order = random_order(extraction, seed) if seed % 2 else ()
    return PlacedModule(extraction, random_devices(extraction, two_devices(), seed), order)


def on_cpu(extraction: Extraction) -> PlacedModule:
    return PlacedModule(extraction, {call.key: CPU for call in extraction.forward.placed_calls})


def here(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in state.items()}


def steps_of_torch(step: Workload, rates: list[float]) -> list[Tensor]:
    """Return the losses of the model with torch's own optimizer."""
    assert step.optimizer is not None
    optimizer = torch_optimizer(step.model, step.optimizer, fused=True)
    losses = []
    for seed, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        torch.manual_seed(seed)
        loss = forward(step)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def steps_as_placed(placed: PlacedModule, step: Workload, rates: list[float]) -> list[Tensor]:
    losses = []
    for seed, rate in enumerate(rates):
        placed.learning_rate = rate
        torch.manual_seed(seed)
        losses.append(placed.step(*step.inputs, **step.keywords).cpu())
    return losses


# --- the optimizer


def test_a_parameter_that_backward_needs_without_its_gradient_is_updated_at_the_end() -> None:
    def twice(m: Any, x: Tensor) -> Tensor:
        first: Tensor = m.linear(x)
        return torch.nn.functional.linear(first, m.linear.weight.detach())

    torch.manual_seed(0)
    model = Plain(twice, linear=nn.Linear(4, 4))
    step = with_optimizer(
        Workload.of(model, (torch.randn(3, 4), torch.randn(3, 4)), squared), "sgd"
    )
    plain, rates = copy.deepcopy(step), [0.1, 0.1]
    placed = on_cpu(extract(step))
    assert steps_as_placed(placed, step, rates) == steps_of_torch(plain, rates)
    torch.testing.assert_close(state_of(step), state_of(plain), rtol=0, atol=0)


def test_parameters_are_updated_while_the_backward_pass_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[int, int]] = []
    update = updates.fused_update

    def watched(optimizer: Any, rate: float, parameters: list[Tensor], *rest: Any) -> None:
        gradients = [p.grad is not None for p in step.model.parameters()]
        seen.append((len(parameters), sum(gradients)))
        update(optimizer, rate, parameters, *rest)

    monkeypatch.setattr(updates, "fused_update", watched)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    step = with_optimizer(
        Workload.of(model, (torch.randn(3, 4), torch.randn(3, 4)), squared), "sgd"
    )
    on_cpu(extract(step)).step(*step.inputs)
    assert seen == [(2, 2), (2, 2)], "weight and bias of a layer, no gradients besides"


@pytest.mark.slow_repeats
@ON_DEVICES
def test_what_the_optimizer_keeps_follows_its_parameter_and_can_be_loaded() -> None:
    step = with_optimizer(tiny_models.conv_net(), "adamw")
    plain = copy.deepcopy(step)
    extraction = extract(step)
    placed = apart(extraction)
    steps_as_placed(placed, step, [0.05])
    placed.place(random_devices(extraction, two_devices(), 2))
    steps_as_placed(placed, step, [0.05])
    kept, weights = placed.optimizer_state(), copy.deepcopy(here(placed.state_dict()))
    assert kept.keys() >= {"exp_avg.0.weight", "exp_avg_sq.7.bias", "step.7.bias"}

    again = with_optimizer(tiny_models.conv_net(), "adamw")
    other = on_cpu(extract(again))
    again.model.load_state_dict(weights)
    with pytest.raises(ValueError, match=r"exp_avg\.0\.weight of the optimizer is torch.float32"):
        other.load_optimizer_state({"exp_avg.none": torch.zeros(1)})
    other.load_optimizer_state(kept)
    steps_as_placed(other, again, [0.05])
    steps_of_torch(plain, [0.05, 0.05, 0.05])
    torch.testing.assert_close(state_of(again), state_of(plain), rtol=1e-5, atol=1e-5)
    other.load_optimizer_state({})
    assert not any(tensor.any() for tensor in other.optimizer_state().values())


@pytest.mark.slow_repeats
@ON_DEVICES
def test_parameters_that_are_frozen_later_stay_as_they_are() -> None:
    step = with_optimizer(tiny_models.conv_net(), "adamw", weight_decay=0.1)
    placed = apart(extract(step))
    placed.step(*step.inputs)
    frozen = [name for name, _ in placed.named_parameters() if name.startswith(("0.", "7.b"))]
    for name in frozen:
        placed.get_parameter(name).requires_grad_(False)
    placed.place(random_devices(extract(tiny_models.conv_net()), two_devices(), 2))
    before = copy.deepcopy(here(placed.state_dict()))
    placed.step(*step.inputs)
    after = here(placed.state_dict())
    assert len(frozen) == 2
    for name, _ in placed.named_parameters():
        assert torch.equal(after[name], before[name]) == (name in frozen)


def test_a_backward_pass_outside_of_step_updates_nothing() -> None:
    step = with_optimizer(tiny_models.conv_net(), "sgd")
    placed = on_cpu(extract(step))
    placed.step(*step.inputs)
    before = {name: own.detach().clone() for name, own in placed.named_parameters()}
    placed(*step.inputs).backward()
    torch.testing.assert_close(dict(placed.named_parameters()), before, rtol=0, atol=0)
    assert all(p.grad is not None for p in placed.parameters())


def test_a_model_that_outlives_its_placed_module_keeps_nothing_of_the_optimizer() -> None:
    step = with_optimizer(tiny_models.conv_net(), "adamw")
    placed = on_cpu(extract(step))
    placed.step(*step.inputs)
    kept = weakref.ref(placed._optimizer())
    del placed
    gc.collect()
    assert kept() is None
    assert not any(own._post_accumulate_grad_hooks for own in step.model.parameters())


# --- bf16


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    "name",
    ["conv_net", "attention", "tied_weights", pytest.param("nmt", marks=pytest.mark.slow)],
)
def test_a_step_in_bf16_on_one_device_is_bit_for_bit_that_of_autocast(name: str) -> None:
    step = replace(tiny_models.STEPS[name](), dtype="bf16")
    plain = copy.deepcopy(step)
    placed = on_cpu(extract(step))
    loss, expected = placed.step(*step.inputs), forward(plain)
    expected.backward()
    assert torch.equal(loss, expected.detach())
    for own, other in zip(placed.parameters(), plain.model.parameters(), strict=True):
        assert own.grad is not None
        assert other.grad is not None
        assert torch.equal(own.grad, other.grad)


def test_inference_in_bf16_returns_bf16() -> None:
    step = replace(tiny_models.INFERENCE["conv_net_inference"](), dtype="bf16")
    expected = forward(copy.deepcopy(step))
    found = apart(extract(step)).step(*step.step_inputs)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found.cpu(), expected.detach())


# --- costs, memory, measuring and the main job


def both(make: Callable[[], Workload] = tiny_models.conv_net) -> Workload:
    return replace(with_optimizer(make(), "adamw"), dtype="bf16")


@pytest.mark.slow
def test_updates_have_costs_and_memory_where_their_parameters_are() -> None:
    step = both()
    extraction = extract(step)
    calls = call_graph(extraction)
    costs_s = profile_calls(extraction, calls, pair().devices)
    names = list(calls.graph)
    data = [attributes_of(calls.graph, name) for name in names]
    updating = [i for i, own in enumerate(data) if own["phase"] == "optimizer"]
    assert {names[i] for i in updating} == {
        *("0:optimizer/conv2d", "1:optimizer/batch_norm", "4:optimizer/conv2d"),
        "7:optimizer/linear",
    }
    assert all(np.isfinite(cost_s).all() for cost_s in costs_s.values())
    assert (costs_s["cuda:fake"][updating] > 0).all(), "they take time there"
    sizes = [p.nbytes for p in step.model.parameters()]
    assert sum(own["optimizer_bytes"] for own in data) == sum(2 * size + 4 for size in sizes)
    assert sum(own["gradient_bytes"] for own in data) == sum(sizes)
    for i in updating:
        home = attributes_of(calls.graph, names[i].replace("optimizer/", ""))
        assert data[i]["colocate"] == home["colocate"] is not None


@pytest.mark.slow
def test_measured_steps_do_all_their_work_and_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = both()
    before = state_of(step)
    extraction = extract(step)
    calls = call_graph(extraction)
    problem = equal_costs(calls.graph)
    updated: list[tuple[str, float, int]] = []
    update = updates.fused_update

    def watched(optimizer: Any, rate: float, parameters: list[Tensor], *rest: Any) -> None:
        updated.append((parameters[0].device.type, rate, len(parameters)))
        update(optimizer, rate, parameters, *rest)

    monkeypatch.setattr(updates, "fused_update", watched)
    placements = [
        Placement.of(
            problem.graph,
            problem.cluster,
            np.full(problem.op_count, d),
            np.zeros(problem.op_count),
        )
        for d in range(2)
    ]
    executor = TorchExecutor(extraction, calls, problem)
    with Measured(executor, rounds=1, warm_up=0) as backend:
        first, second = measurements(backend.evaluate(placements))
        module = executor._placed
        assert module is not None
        own, expected = here(module.state_dict()), {n: before[n] for n in module.state_dict()}
        trained = {name: own[name] for name, _ in module.named_parameters()}
        torch.testing.assert_close(trained, {n: expected[n] for n in trained}, rtol=0, atol=0)
    assert first.ok, first.failure
    assert second.ok, second.failure
    assert {rate for _, rate, _ in updated} == {0.0}
    by_type = [sum(n for kind, _, n in updated if kind == own) for own in ("cuda", "cpu")]
    steps = [count / len(list(step.model.parameters())) for count in by_type]
    assert all(count.is_integer() and count >= 2 for count in steps), "whole steps on each device"
    tiny_models.assert_same(state_of(step), before)
