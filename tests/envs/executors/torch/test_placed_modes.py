"""Placed modules in train and eval mode, in usual loops that train and validate."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from envs.executors.torch.placed_module import PlacedModule
from graphs.extract import Extraction, ExtractionError, Workload, extract
from tests.helpers.extracted_steps import copied, fresh, on
from tests.helpers.in_turn import in_turn
from tests.helpers.placed_steps import random_devices
from tests.helpers.tiny_models import squared
from tests.helpers.trained_alike import on_cpu
from tests.helpers.vdev import TRANSFERS


def dropping() -> Workload:
    """Return a step with dropout and batch norm."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)),
        *(nn.Linear(6, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 2)),
    )
    return Workload.of(model, (torch.randn(5, 4), torch.randn(5, 2)), squared)


@functools.cache
def extracted() -> Extraction:
    return extract(dropping())


def answer(step: Workload) -> Any:
    """Return the model's output in eval mode."""
    model = copy.deepcopy(step.model).eval()
    with torch.no_grad():
        return model(*step.model_inputs, **step.keywords)


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    "name",
    in_turn(
        ["conv_net", "tied_weights", "norm_twice", "bert", "frozen_norm"], slow=["conv_net", "bert"]
    ),
)
def test_other_models_answer_as_they_do_in_eval_mode(name: str, device: torch.device) -> None:
    extraction = fresh(name)
    expected = answer(extraction.step)
    placed = PlacedModule(extraction, random_devices(extraction, ["cpu", device], 1)).eval()
    step = extraction.step
    found = placed(*step.model_inputs, **step.keywords)
    found = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), found)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow_repeats
def test_training_goes_on_after_validation_bit_for_bit(device: torch.device) -> None:
    runs = []
    for validate in (False, True):
        extraction = copied(extracted())
        placed = PlacedModule(extraction, random_devices(extraction, ["cpu", device], 0))
        optimizer = torch.optim.SGD(placed.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for seed in range(3):
            torch.manual_seed(seed)
            optimizer.zero_grad()
            loss = placed(*extraction.step.inputs)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().cpu())
            if validate:
                placed.eval()(*extraction.step.model_inputs)
                placed.train()
        runs.append((losses, on_cpu(placed.state_dict())))
    torch.testing.assert_close(runs[0], runs[1], rtol=0, atol=0)


@pytest.mark.slow_repeats
def test_switching_sends_no_state_and_leaves_random_numbers_alone(device: torch.device) -> None:
    extraction = copied(extracted())
    placed = PlacedModule(extraction, random_devices(extraction, ["cpu", device], 2))
    where = {name: own.device for name, own in placed.state_dict().items()}
    random, sent = torch.get_rng_state(), placed.moved_bytes
    placed.eval()
    assert torch.equal(torch.get_rng_state(), random)
    placed(*extraction.step.model_inputs)
    placed.train()
    placed(*extraction.step.inputs)
    assert {name: own.device for name, own in placed.state_dict().items()} == where
    assert placed.moved_bytes == sent
    TRANSFERS.clear()
    placed.eval().train().eval()
    assert not TRANSFERS


@pytest.mark.slow_repeats
def test_what_is_placed_anew_is_so_in_both_modes(device: torch.device) -> None:
    extraction = copied(extracted())
    expected = answer(extraction.step)
    placed = PlacedModule(extraction, on(extraction, device, lambda key: False)).eval()
    placed.place(on(extraction, device, lambda key: True))
    found = placed(*extraction.step.model_inputs)
    assert found.device == device
    assert {own.device for own in placed.parameters()} == {device}
    torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.slow_repeats
def test_a_call_that_training_lacks_goes_where_its_module_is(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Clamped())
    step = Workload.of(model, (torch.randn(3, 4), torch.randn(3, 4)), squared)
    expected = answer(step)
    extraction = extract(step)
    placed = PlacedModule(extraction, on(extraction, device, lambda key: key.startswith("1")))
    placed.eval()
    found = placed(*step.model_inputs)
    assert found.device == device
    torch.testing.assert_close(found.cpu(), expected)


class Clamped(nn.Linear):
    """A layer that limits its output."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, input: Tensor) -> Tensor:
        """Return the output, limited in eval mode only."""
        made = super().forward(input)
        return made if self.training else made.clamp(-0.1, 0.1)


@pytest.mark.slow
def test_a_copy_has_both_modes_of_its_own() -> None:
    extraction = copied(extracted())
    placed = PlacedModule(extraction, on(extraction, torch.device("cpu"), lambda key: True)).eval()
    inputs = extraction.step.model_inputs
    before = placed(*inputs)
    other = copy.deepcopy(placed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert torch.equal(placed(*inputs), before)
    assert not other(*inputs).any()
    assert other.train()(*extraction.step.inputs) == (extraction.step.inputs[1] ** 2).mean()


@pytest.mark.slow
def test_a_step_of_inference_may_be_trained_with_its_loss() -> None:
    step = dropping()
    asking = Workload.of(step.model, step.inputs, step.loss, training=False)
    extraction = extract(asking)
    placed = PlacedModule(extraction, on(extraction, torch.device("cpu"), lambda key: True))
    placed.train()
    torch.autograd.backward(placed(*step.inputs))
    assert all(p.grad is not None for p in placed.parameters())


@pytest.mark.slow
def test_a_mode_that_cannot_be_extracted_is_refused() -> None:
    step = dropping()
    extraction = extract(Workload.of(step.model, step.model_inputs, training=False))
    placed = PlacedModule(extraction, on(extraction, torch.device("cpu"), lambda key: True))
    with pytest.raises(ExtractionError, match="needs a scalar loss"):
        placed.train()
    assert not placed.training
    placed(*step.model_inputs)


def test_replaced_submodules_and_new_hooks_are_refused() -> None:
    extraction = fresh("conv_net")
    step = extraction.step
    model = step.model
    placed = PlacedModule(extraction, random_devices(extraction, ["cpu"], 1))
    relu = model.get_submodule("2")
    model.add_module("2", nn.GELU())
    with pytest.raises(ValueError, match="the model has other submodules, forwards or hooks"):
        placed(*step.inputs)
    model.add_module("2", relu)
    hook = model.get_submodule("4").register_forward_hook(lambda module, inputs, output: -output)
    with pytest.raises(ValueError, match="4 has other submodules, forwards or hooks"):
        placed(*step.inputs)
    hook.remove()
    flatten = model.get_submodule("6")
    flatten.forward = lambda x: 2 * x.flatten(1)
    with pytest.raises(ValueError, match="6 has other submodules, forwards or hooks"):
        placed(*step.inputs)
    del flatten.forward
    placed(*step.inputs)
