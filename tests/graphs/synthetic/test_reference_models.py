"""The published reference models as graphs: extracted, placed, and built with inputs."""

from __future__ import annotations

import random
from importlib import import_module

import pytest
import torch
from torch import Tensor

from envs.executors.cores.instruction_lists import device_lists, priority_order
from graphs.models import moe
from tests.helpers import one_process
from tests.helpers.extracted_steps import of_reference
from tests.helpers.in_turn import in_turn
from tests.helpers.tiny_models import assert_same, eager
from tests.helpers.tiny_reference_models import STEPS, TINY_MOE, parameter_count

EITHER_MODE = pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])


@EITHER_MODE
@pytest.mark.parametrize("name", in_turn(STEPS))
def test_a_placed_step_is_bit_for_bit_what_torch_computes(name: str, training: bool) -> None:
    extraction = of_reference(name, training)
    expected = eager(extraction.step)
    count = extraction.program.op_count
    randomly = random.Random(name)
    for device_count in (1, 3):
        order = priority_order(extraction.program, [randomly.random() for _ in range(count)])
        devices = [randomly.randrange(device_count) for _ in range(count)]
        lists = device_lists(extraction.program, devices, order, device_count)
        placed = one_process.run(extraction, lists)
        assert_same(placed.output, expected.output)
        assert_same(placed.state, expected.state)
        assert_same(placed.gradients, expected.gradients)


@pytest.mark.parametrize("name", in_turn(STEPS))
def test_training_reaches_every_parameter(name: str) -> None:
    extraction = of_reference(name, True)
    gradients = eager(extraction.step).gradients
    assert gradients.keys() == {name for name, _ in extraction.step.model.named_parameters()}
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())


@EITHER_MODE
@pytest.mark.parametrize("name", in_turn(STEPS))
def test_every_module_with_parameters_of_its_own_has_an_op(name: str, training: bool) -> None:
    extraction = of_reference(name, training)
    owners = {path.rpartition(".")[0] for path, _ in extraction.step.model.named_parameters()}
    assert owners <= {module for _, module in extraction.graph.nodes(data="module")}


@pytest.mark.slow
@EITHER_MODE
def test_experts_of_a_layer_do_not_wait_for_each_other(training: bool) -> None:
    graph = of_reference("separate_moe", training).graph
    experts = [
        [
            op_id
            for op_id, data in graph.nodes(data=True)
            if data["module"].startswith(f"layers.0.block_sparse_moe.experts.{number}.")
        ]
        for number in range(TINY_MOE.experts)
    ]
    forward = [[op for op in own if graph.nodes[op]["phase"] == "forward"] for own in experts]
    assert all(forward)
    for own in forward:
        below = {successor for op in own for successor in graph.successors(op)}
        others = {op for other in forward if other is not own for op in other}
        assert not below & others
    groups = {graph.nodes[op]["colocate"] for own in experts for op in own}
    assert groups == {None}, "every expert may be placed on its own"


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    "name", in_turn(["two_towers", "inception", "nmt", "resnet", "rnnlm", "moe", "dlrm", "nasnet"])
)
def test_a_reference_model_builds_a_training_step_that_repeats_exactly(name: str) -> None:
    build = import_module(f"graphs.models.{name}").build

    def step() -> Tensor:
        model, inputs, loss = build()
        assert model.training
        value = loss(model(*inputs[:-1]), inputs[-1])
        assert isinstance(value, Tensor)
        return value.detach()

    first = step()
    assert first.ndim == 0
    assert torch.isfinite(first)
    assert torch.equal(first, step())


def test_the_stacked_model_is_as_large_as_the_separate_one() -> None:
    separate, stacked = moe.build()[0], moe.build_stacked()[0]
    assert parameter_count(stacked) == parameter_count(separate)
    assert len(list(stacked.parameters())) < len(list(separate.parameters()))
