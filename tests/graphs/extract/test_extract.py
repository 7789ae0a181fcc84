"""Extraction: graphs and programs of models, their attributes, and refusals."""

from __future__ import annotations

import copy
import functools
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from envs.executors.cores.instruction_lists import device_lists, priority_order
from graphs.extract import Extraction, ExtractionError, StepError, Workload, extract
from graphs.extract.module_calls import Homes
from graphs.extract.program import VIEW
from graphs.graph import GraphArrays, attributes_of
from tests.helpers import one_process, tiny_models
from tests.helpers.in_turn import in_turn
from tests.helpers.tiny_models import Plain, assert_same, eager, forward, squared, tied_gradients

torch.set_num_threads(1)

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@functools.cache
def extracted(name: str) -> Extraction:
    return extract(tiny_models.STEPS[name]())


def linear_step(function: Callable[..., Any], *inputs: Any, training: bool = True) -> Workload:
    return Workload.of(Plain(function, linear=nn.Linear(8, 8)), inputs or X, training=training)


def groups_of(graph: nx.DiGraph[str]) -> dict[str, set[str]]:
    groups: defaultdict[str, set[str]] = defaultdict(set)
    for op_id in graph:
        group = attributes_of(graph, op_id)["colocate"]
        if group is not None:
            groups[group].add(op_id)
    return dict(groups)


def total(graph: nx.DiGraph[str], name: str) -> int:
    return sum(data[name] for _, data in graph.nodes(data=True))


# --- the program computes what the model computes


@pytest.mark.parametrize("name", in_turn(tiny_models.STEPS))
def test_a_step_is_bit_for_bit_what_torch_computes(name: str) -> None:
    extraction = extracted(name)
    expected = eager(extraction.step)
    count = extraction.program.op_count
    randomly = random.Random(name)
    for devices in ([0] * count, [randomly.randrange(3) for _ in range(count)]):
        order = priority_order(extraction.program, [randomly.random() for _ in range(count)])
        found = one_process.run(extraction, device_lists(extraction.program, devices, order, 3))
        assert_same(found.output, expected.output)
        assert_same(tied_gradients(found.gradients, extraction.step), expected.gradients)
        assert_same(found.state, expected.state)


@settings(max_examples=25)
@given(st.data())
def test_any_placement_gives_the_same_views(data: st.DataObject) -> None:
    extraction = extracted("views")
    count = extraction.program.op_count
    devices = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    priority = data.draw(st.lists(st.floats(0, 1), min_size=count, max_size=count))
    order = priority_order(extraction.program, priority)
    found = one_process.run(extraction, device_lists(extraction.program, devices, order, 4))
    expected = eager(extraction.step)
    assert_same(found.output, expected.output)
    assert_same(found.gradients, expected.gradients)


def test_an_lstm_layer_on_plain_inputs_can_be_trained() -> None:
    extraction = extract(tiny_models.lstm())
    expected = eager(extraction.step)
    count = extraction.program.op_count
    lists = device_lists(extraction.program, [i % 2 for i in range(count)], range(count), 2)
    found = one_process.run(extraction, lists)
    torch.testing.assert_close(found.output, expected.output.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.gradients, expected.gradients, rtol=1e-5, atol=1e-6)


# --- the graph


@pytest.mark.parametrize("name", in_turn(tiny_models.STEPS))
def test_the_graph_is_complete_and_its_ops_are_those_of_the_program(name: str) -> None:
    extraction = extracted(name)
    arrays = GraphArrays.from_graph(extraction.graph)
    assert len(arrays) == extraction.program.op_count
    modules = {path for path, _ in extraction.step.model.named_modules()}
    own_modules = modules if extraction.step.loss is None else modules | {"loss"}
    assert set(arrays.modules) <= own_modules
    called = [call.op for call in extraction.program.calls if call.op != VIEW]
    assert sorted(called) == list(range(len(arrays)))


@pytest.mark.slow
def test_nearly_every_op_maps_to_a_module() -> None:
    graph = extracted("inception").graph
    unowned = [i for i in graph if not attributes_of(graph, i)["module"]]
    assert len(unowned) < 0.05 * len(graph)


@pytest.mark.parametrize("name", ["conv_net", "tied_weights", "views", "structured_output"])
def test_two_extractions_agree_in_every_id_and_number(name: str) -> None:
    first, second = extracted(name), extract(tiny_models.STEPS[name]())
    assert list(first.graph.nodes(data=True)) == list(second.graph.nodes(data=True))
    assert list(first.graph.edges(data=True)) == list(second.graph.edges(data=True))


@pytest.mark.parametrize("name", in_turn(sorted(tiny_models.STEPS)))
def test_parameter_bytes_are_those_of_the_model(name: str) -> None:
    extraction = extracted(name)
    parameters = extraction.step.model.parameters()
    expected = sum(p.numel() * p.element_size() for p in parameters)
    assert total(extraction.graph, "parameter_bytes") == expected


def test_an_unread_parameter_counts_with_the_first_op_of_the_nearest_module_around_it() -> None:
    homes = Homes([(0, "a.b"), (1, "a"), (2, "c.d"), (3, "c.d")])
    homed = {name: homes.of(name) for name in ("a.b.w", "a.w", "a.x.w", "c.d.e.w", "c.w", "w")}
    assert homed == {"a.b.w": 0, "a.w": 0, "a.x.w": 0, "c.d.e.w": 2, "c.w": 2, "w": 0}


def test_an_unread_parameter_takes_memory_but_has_no_gradient() -> None:
    graph = extracted("own_loss").graph
    assert total(graph, "gradient_bytes") == 4 * (4 * 4 + 4)
    assert total(graph, "parameter_bytes") == 2 * total(graph, "gradient_bytes")


@pytest.mark.parametrize("name", ["conv_net", "norm_twice", "views", "conv_net_inference"])
def test_flops_are_those_that_torch_counts_in_a_real_run(name: str) -> None:
    extraction = extracted(name)
    with FlopCounterMode(display=False) as counter:
        eager(extraction.step)
    assert total(extraction.graph, "flops") == counter.get_total_flops() > 0


@pytest.mark.parametrize("training", [True, False])
def test_attention_counts_its_two_products(training: bool) -> None:
    step = tiny_models.attention()
    step = Workload(step.model, step.inputs, step.keywords, step.loss, training)
    graph = extract(step).graph
    ops = {i: n["flops"] for i, n in graph.nodes(data=True) if "attention" in n["op"]}
    forward = 2 * 2 * (2 * 2 * 3 * 3 * 4)  # multiply-add, two products of 2 heads by 3 by 3 by 4
    assert sum(f for i, f in ops.items() if "backward" not in i) == forward
    assert sum(f for i, f in ops.items() if "backward" in i) == (2.5 * forward if training else 0)


def test_edges_carry_the_part_that_is_read_not_the_whole() -> None:
    graph = extract(linear_step(lambda m, x: (m.linear(x)[:, :3] * 2).sum())).graph
    assert graph.edges["linear:addmm", ":slice"]["bytes"] == 4 * 4 * 8
    assert graph.edges[":slice", ":mul"]["bytes"] == 4 * 4 * 3


def test_the_backward_of_a_convolution_is_two_ops() -> None:
    graph = extracted("conv_net").graph
    input_part = "4:backward/convolution_backward.input"
    weight_part = "4:backward/convolution_backward.weight"
    assert {input_part, weight_part} <= set(graph)
    assert not graph.has_edge(input_part, weight_part)
    whole = attributes_of(graph, "4:convolution")["flops"]
    assert attributes_of(graph, input_part)["flops"] == whole
    assert attributes_of(graph, weight_part)["flops"] == whole
    assert "0:backward/convolution_backward" in graph  # its input needs no gradient


# --- co-location


def test_a_batch_norm_called_twice_keeps_its_calls_together() -> None:
    groups = groups_of(extracted("norm_twice").graph)
    together = {
        "norm:_native_batch_norm_legit_functional",
        "norm@1:_native_batch_norm_legit_functional",
    }
    assert any(together <= ops for ops in groups.values())


def test_readers_of_a_tied_parameter_stay_together() -> None:
    groups = groups_of(extracted("tied_weights").graph)
    assert {"embedding:embedding", "head:mm"} in groups.values()


def test_parts_stay_with_their_tensor_and_apart_from_those_of_others() -> None:
    step = Workload.of(
        Plain(
            lambda m, x: F.relu(m.a(x))[:, :3].sum() + F.relu(m.b(x))[:, 3:].sum(),
            a=nn.Linear(8, 8),
            b=nn.Linear(8, 8),
        ),
        X,
    )
    groups = groups_of(extract(step).graph)
    assert {":relu", ":slice"} in groups.values()
    assert {":relu#1", ":slice#1"} in groups.values()


def test_a_plain_chain_has_no_groups() -> None:
    assert not groups_of(extracted("conv_net").graph)


# --- the model is not changed


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mode", [True, False])
def test_the_model_is_left_as_it_was(training: bool, mode: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout())
    model.train(mode)
    model[2].train(not mode)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [part.training for part in model.modules()]
    ids = [id(parameter) for parameter in model.parameters()]
    randomness = torch.get_rng_state()
    extract(Workload.of(model, (X, X), squared, training=training))
    assert [part.training for part in model.modules()] == modes
    assert [id(parameter) for parameter in model.parameters()] == ids
    assert_same(dict(model.state_dict()), before)
    assert torch.equal(torch.get_rng_state(), randomness)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_in_eval_mode_is_trained_in_train_mode() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).eval()
    assert "1:native_dropout" in extract(Workload.of(model, (X, X), squared)).graph


def test_a_training_step_can_be_extracted_where_gradients_are_off() -> None:
    step = linear_step(lambda m, x: m.linear(x).sum())
    with torch.no_grad():
        graph = extract(step).graph
    assert "linear:backward/mm" in graph


def test_torch_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ExtractionError):
        extract(linear_step(lambda m, x: m.linear(x[:, :3]).sum()))
    extract(linear_step(lambda m, x: m.linear(x), training=False))
    out, err = capfd.readouterr()
    assert out == err == ""


# --- outputs


def test_a_tensor_that_is_given_twice_is_two_inputs() -> None:
    step = Workload.of(nn.Linear(8, 8), (X, X), squared)
    extraction = extract(step)
    other = Workload.of(step.model, (X, X + 1), squared)
    count = extraction.program.op_count
    lists = device_lists(extraction.program, [0] * count, range(count), 1)
    found = one_process.run(replace(extraction, step=other), lists)
    assert_same(found.output, eager(other).output.detach())


def test_a_parameter_without_gradient_gets_none() -> None:
    program = extracted("own_loss").program
    gradients = {r.name for r in program.results if r.role == "gradient"}
    assert gradients == {"linear.weight", "linear.bias"}


class Scaled(nn.Module):
    """Takes a keyword-only argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * scale
        return out


@pytest.mark.parametrize("extractor", ["export", "dispatch", "modules"])
def test_of_keywords_the_one_that_the_model_does_not_take_is_the_target(extractor: str) -> None:
    inputs = {"x": X, "target": X.flip(0), "scale": torch.tensor(2.0)}
    step = Workload.of(Scaled(), inputs, squared)
    by_hand = squared(step.model(X, scale=torch.tensor(2.0)), X.flip(0))
    assert_same(forward(copy.deepcopy(step)), by_hand)
    assert total(extract(step, extractor).graph, "gradient_bytes") == 4 * (8 * 8 + 8)
    alone = Workload.of(step.model, inputs, squared, training=False)
    assert_same(forward(copy.deepcopy(alone)), step.model(X, scale=torch.tensor(2.0)).detach())


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (Scaled(), {"x": X, "scale": X}),
        (Scaled(), {"x": X, "scale": X, "target": X, "weight": X}),
        (Plain(lambda m, **given: None), {"x": X, "target": X}),
    ],
)
def test_keywords_without_one_target_are_refused_with_what_to_give_instead(
    model: nn.Module, inputs: dict[str, Tensor]
) -> None:
    with pytest.raises(StepError, match="forward does not take"):
        Workload.of(model, inputs, squared)


# --- refusals


def refusal(step: Workload) -> str:
    with pytest.raises(ExtractionError) as refused:
        extract(step, "export")
    text = str(refused.value)
    assert len(text) < 600
    assert "\n" not in text
    return text


def branching(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.linear(x).sum() if x.sum() > 0 else x.sum()
    return out


def counting(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.linear(x)[: int(x.sum().item())].sum()
    return out


def masking(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.linear(x)[x[:, 0] > 0].sum()
    return out


def conditional(m: Any, x: Tensor) -> Tensor:
    branches = (lambda y: y.sin(), lambda y: y.cos())
    out: Tensor = torch.cond(x.sum() > 0, *branches, (m.linear(x),)).sum()
    return out


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (branching, "control flow"),
        (counting, "depends on"),
        (masking, "depends on"),
        (conditional, "higher-order ops"),
        (lambda m, x: m.linear(x.add_(1)).sum(), "in place; clone it first"),
        (lambda m, x: m.linear(x[:, :3]).sum(), "must run on the example inputs"),
        (lambda m, x: m.missing(x), "has no attribute 'missing'"),
    ],
)
def test_what_cannot_be_placed_is_refused_in_a_sentence(
    function: Callable[..., Any], reason: str, training: bool
) -> None:
    assert reason in refusal(linear_step(function, training=training))


def test_a_refusal_names_the_line_of_the_model() -> None:
    assert f'{__file__}", line {branching.__code__.co_firstlineno + 1}' in refusal(
        linear_step(branching)
    )


def test_a_refusal_names_the_input_that_is_written() -> None:
    step = linear_step(lambda m, n, x, y: (m.linear(x) + y.mul_(2)).sum(), 1, X, X.clone())
    assert "tensor 1 of its inputs" in refusal(step)


def test_an_input_that_requires_a_gradient_is_refused() -> None:
    step = linear_step(lambda m, x, y: (m.linear(x) * y).sum(), X, X.clone().requires_grad_())
    assert "tensor 1 of the inputs requires a gradient" in refusal(step)


@pytest.mark.parametrize(
    ("function", "shown"),
    [
        (lambda m, x: m.linear(x), "a tensor of shape (4, 8)"),
        (lambda m, x: {"logits": m.linear(x)}, "dict"),
        (lambda m, x: m.linear(x).argmax(), "a tensor of shape ()"),
    ],
)
def test_a_training_step_needs_a_scalar_loss(function: Callable[..., Any], shown: str) -> None:
    text = refusal(linear_step(function))
    assert "needs a scalar loss" in text
    assert shown in text


def test_a_loss_function_needs_a_target() -> None:
    with pytest.raises(ExtractionError, match="target"):
        Workload.of(nn.Linear(8, 8), (), squared)


def test_nothing_to_train_is_said() -> None:
    model = nn.Linear(8, 8).requires_grad_(False)
    assert "no parameter that requires a gradient" in refusal(Workload.of(model, (X, X), squared))
