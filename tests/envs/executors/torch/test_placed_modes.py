"""Placed modules in train and eval mode, in usual loops that train and validate."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from envs.executors.torch.placed_module import PlacedModule
from graphs.extract import ExtractionError, Workload, extract
from tests.helpers.extracted_steps import fresh, on
from tests.helpers.in_turn import in_turn
from tests.helpers.placed_steps import random_devices
from tests.helpers.tiny_models import Plain, squared
from tests.helpers.trained_alike import on_cpu
from tests.helpers.vdev import TRANSFERS

torch.set_num_threads(1)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="vdev would take CUDA's place")


def dropping() -> Workload:
    """Return a step with dropout and batch norm."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)),
        *(nn.Linear(6, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 2)),
    )
    return Workload.of(model, (torch.randn(5, 4), torch.randn(5, 2)), squared)


def host_only(found: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, lambda t: t.detach().cpu(), found)


def answer(step: Workload) -> Any:
    """Return the model's output in eval mode."""
    model = copy.deepcopy(step.model).eval()
    with torch.no_grad():
        return model(*step.model_inputs, **step.keywords)


def trained(
    step: Workload, module: Callable[..., Any], rounds: int, validate: bool
) -> list[Tensor]:
    """Return the losses of a usual training loop and the validation outputs in between."""
    assert isinstance(module, nn.Module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for number in range(rounds):
        module.train()
        torch.manual_seed(number)
        optimizer.zero_grad()
        loss = module(*step.inputs)
        loss.backward()
        optimizer.step()
        seen.append(loss.detach().cpu())
        if validate:
            module.eval()
            seen.append(module(*step.model_inputs).cpu())
    return seen


@pytest.mark.parametrize(
    "name", in_turn(["conv_net", "tied_weights", "norm_twice", "bert", "frozen_norm"])
)
def test_other_models_answer_as_they_do_in_eval_mode(name: str, device: torch.device) -> None:
    extraction = fresh(name)
    expected = answer(extraction.step)
    placed = PlacedModule(extraction, random_devices(extraction, ["cpu", device], 1)).eval()
    step = extraction.step
    found = placed(*step.model_inputs, **step.keywords)
    torch.testing.assert_close(host_only(found), expected, rtol=1e-5, atol=1e-6)


def test_training_goes_on_after_validation_bit_for_bit(device: torch.device) -> None:
    losses = []
    for validate in (False, True):
        extraction = extract(dropping())
        placed = PlacedModule(extraction, random_devices(extraction, ["cpu", device], 0))
        seen = trained(extraction.step, placed, 3, validate)
        losses.append((seen[:: 2 if validate else 1], on_cpu(placed.state_dict())))
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=0)


def test_switching_sends_no_state_and_leaves_random_numbers_alone(device: torch.device) -> None:
    extraction = extract(dropping())
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


def test_what_is_placed_anew_is_so_in_both_modes(device: torch.device) -> None:
    extraction = extract(dropping())
    expected = answer(extraction.step)
    placed = PlacedModule(extraction, on(extraction, device, lambda key: False)).eval()
    placed.place(on(extraction, device, lambda key: True))
    found = placed(*extraction.step.model_inputs)
    assert found.device == device
    assert {own.device for own in placed.parameters()} == {device}
    torch.testing.assert_close(found.cpu(), expected)


def test_a_call_that_training_lacks_goes_where_its_module_is(device: torch.device) -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        first, second = m.get_submodule("first"), m.get_submodule("second")
        made: Tensor = second(first(x))
        return made

    torch.manual_seed(0)
    layers = {"first": nn.Linear(4, 4), "second": Clamped()}
    step = Workload.of(Plain(forward, **layers), (torch.randn(3, 4), torch.randn(3, 4)), squared)
    expected = answer(step)
    extraction = extract(step)
    placed = PlacedModule(extraction, on(extraction, device, lambda key: key.startswith("second")))
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


def test_a_copy_has_both_modes_of_its_own() -> None:
    extraction = extract(dropping())
    placed = PlacedModule(extraction, on(extraction, torch.device("cpu"), lambda key: True)).eval()
    inputs = extraction.step.model_inputs
    before = placed(*inputs)
    copied = copy.deepcopy(placed)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert torch.equal(placed(*inputs), before)
    assert not copied(*inputs).any()
    assert copied.train()(*extraction.step.inputs) == (extraction.step.inputs[1] ** 2).mean()


def test_a_step_of_inference_may_be_trained_with_its_loss() -> None:
    step = dropping()
    asking = Workload.of(step.model, step.inputs, step.loss, training=False)
    extraction = extract(asking)
    placed = PlacedModule(extraction, on(extraction, torch.device("cpu"), lambda key: True))
    placed.train()
    torch.autograd.backward(placed(*step.inputs))
    assert all(p.grad is not None for p in placed.parameters())


def test_a_mode_that_cannot_be_extracted_is_refused() -> None:
    step = dropping()
    extraction = extract(Workload.of(step.model, step.model_inputs, training=False))
    placed = PlacedModule(extraction, on(extraction, torch.device("cpu"), lambda key: True))
    with pytest.raises(ExtractionError, match="needs a scalar loss"):
        placed.train()
    assert not placed.training
    placed(*step.model_inputs)
