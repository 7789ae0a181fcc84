"""Extractors other than torch.export: accepted models, attributes, and the order of fall-backs."""

from __future__ import annotations

import copy
import functools
import math
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from envs.costs.modules import profile_modules
from envs.executors.cores.instruction_lists import device_lists
from envs.executors.cores.placed_model import PlacedModel
from envs.hardware.cluster import Cluster, Device
from graphs.extract import Extraction, ExtractionError, StepError, Workload, extract
from graphs.extract.extraction import EXTRACTORS
from graphs.flops import further_formulas
from graphs.graph import GraphArrays
from graphs.optimizer import Optimizer
from tests.helpers import one_process, tiny_models, tiny_reference_models, tiny_transformers
from tests.helpers.in_turn import LARGE, in_turn
from tests.helpers.saved_tensors import saved_bytes
from tests.helpers.tiny_models import Plain, assert_same, eager, forward, squared, tied_gradients

torch.set_num_threads(1)
pytest.importorskip("transformers")

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
STEPS = {
    **tiny_models.TRAINING,
    "lstm": tiny_models.lstm,
    **tiny_reference_models.STEPS,
    **tiny_transformers.STEPS,
}
EVERY_STEP = pytest.mark.parametrize(
    ("name", "training"),
    [
        pytest.param(name, training, marks=[pytest.mark.slow] * (name in LARGE))
        for name in STEPS
        for training in (True, False)
        if training or name != "own_loss"  # its output is a custom object
    ],
)
EVERY_MODEL = pytest.mark.parametrize("name", in_turn(STEPS))
EITHER_MODE = pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])


@functools.cache
def extracted(name: str, extractor: str, training: bool = True) -> Extraction:
    torch.manual_seed(0)
    if name in tiny_transformers.TARGETS:
        target = tiny_transformers.TARGETS[name] + tiny_transformers.WITHOUT_DROPOUT.get(name, "")
        return extract(tiny_transformers.load(target, training=training), extractor)
    return extract(replace(STEPS[name](), training=training), extractor)


def linear_step(
    function: Callable[..., Any], training: bool = True, **modules: nn.Module
) -> Workload:
    torch.manual_seed(0)
    return Workload.of(Plain(function, linear=nn.Linear(8, 8), **modules), X, training=training)


def run(extraction: Extraction) -> tiny_models.Outcome:
    count = extraction.program.op_count
    lists = device_lists(extraction.program, [i % 2 for i in range(count)], range(count), 2)
    return one_process.run(extraction, lists)


def assert_runs_as_eager(extraction: Extraction) -> None:
    found, expected = run(extraction), eager(extraction.step)
    torch.testing.assert_close(found.output, expected.output, rtol=1e-6, atol=1e-6)
    gradients = tied_gradients(found.gradients, extraction.step)
    torch.testing.assert_close(gradients, expected.gradients, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.state, expected.state, rtol=1e-6, atol=1e-6)


def total(extraction: Extraction, attribute: str) -> int:
    return sum(data[attribute] for _, data in extraction.graph.nodes(data=True))


def line_of(function: Callable[..., Any], offset: int) -> str:
    return f'File "{__file__}", line {function.__code__.co_firstlineno + offset}'


# --- the recorder


@EVERY_STEP
def test_a_recorded_step_computes_what_torch_computes(name: str, training: bool) -> None:
    extraction = extracted(name, "dispatch", training)
    assert extraction.extractor == "dispatch"
    found, expected = run(extraction), eager(extraction.step)
    # In inference torch runs an attention layer as one op with another order of additions.
    if (
        name not in tiny_transformers.STEPS
        and name != "lstm"
        and (name, training) != ("attention", False)
    ):
        assert_same(found.output, expected.output.detach())
        assert_same(found.state, expected.state)
        assert_same(tied_gradients(found.gradients, extraction.step), expected.gradients)
    else:
        assert_runs_as_eager(extraction)


@pytest.mark.parametrize(
    "name", ["conv_net", "tied_weights", "norm_twice", "views", "lstm", "dlrm"]
)
def test_a_recording_is_the_same_graph_as_an_export(name: str) -> None:
    recording, export = extracted(name, "dispatch"), extracted(name, "export")
    assert list(recording.graph) == list(export.graph)
    assert nx.utils.graphs_equal(recording.graph, export.graph)
    assert recording.forward_of == export.forward_of
    assert recording.depends_on_data == ()


@EVERY_STEP
@pytest.mark.parametrize("extractor", ["dispatch", "modules"])
def test_flops_and_parameters_are_those_of_a_real_run(
    extractor: str, name: str, training: bool
) -> None:
    extraction = extracted(name, extractor, training)
    step = copy.deepcopy(extraction.step)
    with FlopCounterMode(display=False, custom_mapping=further_formulas()) as counter:
        output = forward(step)
        if training:
            output.backward()
    # To torch's counter, attention in inference and LSTM layers are one op without a formula.
    if name != "lstm" and (name, training) != ("attention", False):
        assert total(extraction, "flops") == counter.get_total_flops() > 0
    parameters = list(step.model.parameters())
    assert total(extraction, "parameter_bytes") == sum(p.nbytes for p in parameters)
    gradients = sum(p.nbytes for p in parameters if p.grad is not None)
    assert total(extraction, "gradient_bytes") == gradients


def test_dropout_draws_the_numbers_that_an_exported_step_draws() -> None:
    step = Workload.of(
        nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5)), (X, torch.ones(4, 64)), squared
    )
    recording, export = extract(step, "dispatch"), extract(step, "export")
    outcomes = []
    for extraction, seed in ((recording, 1), (export, 1), (recording, 2)):
        torch.manual_seed(seed)
        outcomes.append(run(extraction))
    assert_same(outcomes[0].gradients, outcomes[1].gradients)
    assert not torch.equal(outcomes[0].output, outcomes[2].output)


class Experts(nn.Module):
    """Every expert computes only the tokens that the router sends to it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(1)
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows = (chosen == number).nonzero().flatten()
            out.index_add_(0, rows, self.experts[number](x[rows]))
        return out


def experts_step() -> Workload:
    torch.manual_seed(3)
    return Workload.of(Experts(), (X, X.flip(0)), squared)


def test_a_loop_over_the_experts_that_were_hit_is_recorded_and_says_what_it_reads() -> None:
    step = experts_step()
    extraction = extract(step)
    assert extraction.extractor == "dispatch"
    assert [tried.extractor for tried in extraction.fell_back] == ["export"]
    assert "depends on the values in a tensor" in extraction.fell_back[0].reason
    assert_runs_as_eager(extraction)
    first = Experts.forward.__code__.co_firstlineno
    lines = [line.partition("line ")[2].partition(",")[0] for line in extraction.depends_on_data]
    assert set(map(int, lines)) == {first + 3, first + 4}
    assert all(__file__ in line for line in extraction.depends_on_data)
    hit = set(step.model.get_submodule("router")(X).argmax(1).tolist())
    modules = {module for _, module in extraction.graph.nodes(data="module")}
    assert {f"experts.{i}" for i in range(3)} & modules == {f"experts.{i}" for i in hit}


@pytest.mark.slow
def test_mixtral_with_its_own_loop_is_recorded() -> None:
    step = tiny_transformers.load(tiny_transformers.TARGETS["mixtral"])
    configs: list[Any] = [getattr(module, "config", None) for module in step.model.modules()]
    for config in filter(None, configs):
        config._experts_implementation = "eager"
    extraction = extract(step)
    assert extraction.extractor == "dispatch"
    assert any("modeling_mixtral.py" in line for line in extraction.depends_on_data)
    assert_runs_as_eager(extraction)


def branching(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.linear(x).sum() if x.sum() > 0 else m.linear(x).mean()
    return out


def listing(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.linear(x).sum() * x.tolist()[1][2]
    return out


def masking(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.linear(x)[x[:, 0] > 0].sum()
    return out


def weighing(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.linear(x).sum() * m.linear.bias[0].item()
    return out


@pytest.mark.parametrize("function", [branching, listing, masking, weighing])
def test_a_line_that_reads_values_is_named(function: Callable[..., Tensor]) -> None:
    extraction = extract(linear_step(function), "dispatch")
    assert [line.startswith(line_of(function, 1)) for line in extraction.depends_on_data] == [True]
    assert_runs_as_eager(extraction)


def test_reading_what_does_not_come_from_data_makes_nothing_depend_on_it() -> None:
    def constant(m: Any, x: Tensor) -> Tensor:
        number = torch.arange(3)[2].item() + torch.zeros_like(x).sum().item()
        out: Tensor = m.linear(x)[:, torch.tensor([0, 2])].sum() * number
        return out

    extraction = extract(linear_step(constant), "dispatch")
    assert extraction.depends_on_data == ()
    assert_runs_as_eager(extraction)


def test_a_placed_model_refuses_a_recording_that_depends_on_data() -> None:
    extraction = extract(experts_step())
    core = min(os.sched_getaffinity(0))
    device = Device(name=f"core:{core}", kind="core", memory_bytes=1 << 30)
    cluster = Cluster(name="one", devices=(device,))
    count = extraction.program.op_count
    with pytest.raises(ExtractionError, match="reads values of tensors") as refused:
        PlacedModel(extraction, cluster, [0] * count, range(count))
    assert __file__ in str(refused.value)
    assert "torch.where" in str(refused.value)


class Average(nn.Module):
    """A running mean that is reassigned, and two buffers that are swapped."""

    mean: Tensor
    odd: Tensor
    even: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("odd", torch.ones(8))
        self.register_buffer("even", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.odd, self.even = self.even, self.odd
        out: Tensor = self.linear(x - self.mean + self.odd)
        return out


@EITHER_MODE
@pytest.mark.parametrize("extractor", ["export", "dispatch"])
@pytest.mark.parametrize("nested", [False, True], ids=["its own", "of a submodule"])
def test_a_buffer_that_is_assigned_is_updated(nested: bool, extractor: str, training: bool) -> None:
    model = nn.Sequential(Average(), nn.Linear(8, 8)) if nested else Average()
    buffers = dict(model.named_buffers())
    extraction = extract(Workload.of(model, (X, X), squared, training=training), extractor)
    assert {name: id(own) for name, own in model.named_buffers()} == {
        name: id(own) for name, own in buffers.items()
    }
    written = {result.name for result in extraction.program.results if result.role == "state"}
    assert written == set(buffers)
    assert_runs_as_eager(extraction)
    assert "forward" not in vars(model)


def test_a_buffer_that_grows_is_refused() -> None:
    class Growing(nn.Module):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("seen", torch.zeros(1, 8))

        def forward(self, x: Tensor) -> Tensor:
            self.seen = torch.cat([self.seen, x])
            out: Tensor = self.linear(x).sum()
            return out

    step = Workload.of(nn.Sequential(Growing()), X)
    for extractor in ("export", "dispatch"):
        with pytest.raises(ExtractionError, match=r"0\.seen the shape"):
            extract(step, extractor)


def test_a_tensor_that_is_no_buffer_is_not_written_but_refused() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.calls = torch.zeros(())

        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1)
            out: Tensor = self.linear(x).sum()
            return out

    model = Counting()
    with pytest.raises(ExtractionError, match="make it one with register_buffer") as refused:
        extract(Workload.of(model, X), "dispatch")
    assert line_of(Counting.forward, 1) in str(refused.value)
    extract(Workload.of(model, X), "modules")
    assert model.calls == 0


@pytest.mark.parametrize("held", [lambda tensor: tensor, lambda tensor: {"last": [tensor]}])
def test_a_tensor_that_is_no_buffer_is_not_replaced_but_refused(held: Callable[..., Any]) -> None:
    class Averaging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.mean = held(torch.zeros(8))
            self.seen: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.seen = x  # never read, so it may be kept
            (mean,) = tree_leaves(self.mean)
            self.mean = held(0.9 * mean + 0.1 * x.mean(0))
            out: Tensor = self.linear(x - mean).sum()
            return out

    model = nn.Sequential(Averaging())
    with pytest.raises(ExtractionError, match=r"assigns 0\.mean"):
        extract(Workload.of(model, X), "dispatch")
    assert torch.equal(tree_leaves(model[0].mean)[0], torch.zeros(8))
    assert model[0].seen is None


@pytest.mark.parametrize("extractor", ["dispatch", "modules"])
@EITHER_MODE
def test_the_model_is_left_as_it_was(extractor: str, training: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout()).train(not training)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ids = [id(tensor) for tensor in (*model.parameters(), *model.buffers())]
    randomness = torch.get_rng_state()
    extract(Workload.of(model, (X, X), squared, training=training), extractor)
    assert [id(tensor) for tensor in (*model.parameters(), *model.buffers())] == ids
    assert_same(dict(model.state_dict()), before)
    assert torch.equal(torch.get_rng_state(), randomness)
    assert all(module.training is not training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@EITHER_MODE
@pytest.mark.parametrize("extractor", ["dispatch", "modules"])
@pytest.mark.parametrize("name", ["norm_twice", "views"])
def test_a_model_on_meta_has_the_graph_of_the_real_one(
    name: str, extractor: str, training: bool
) -> None:
    step = replace(STEPS[name](), training=training)
    meta = replace(step, model=copy.deepcopy(step.model).to("meta"))
    found, expected = extract(meta, extractor).graph, extract(step, extractor).graph
    assert list(found) == list(expected)
    assert total(extract(meta, extractor), "flops") == total(extract(step, extractor), "flops")
    if extractor == "modules" or training:
        assert nx.utils.graphs_equal(found, expected)


# --- the graph of modules


def residual(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)
    out: Tensor = (y + m.second(F.relu(y))).sum()
    return out


def test_the_own_code_of_a_module_is_one_op_between_two_calls() -> None:
    graph = extract(linear_step(residual, second=nn.Linear(8, 8)), "modules").graph
    forward_ops = [op for op in graph if "backward/" not in op]
    assert forward_ops == ["linear:Linear", ":Plain", "second:Linear", ":Plain#1"]
    size = 4 * 4 * 8
    edges = {
        ("linear:Linear", ":Plain"): size,
        (":Plain", "second:Linear"): size,
        ("second:Linear", ":Plain#1"): size,
        ("linear:Linear", ":Plain#1"): size,
    }
    among = graph.subgraph(forward_ops)
    found = {edge: among.edges[edge]["bytes"] for edge in among.edges}
    assert found == edges
    back = {op: op.replace(":", ":backward/") for op in forward_ops}
    for (source, target), moved in edges.items():
        assert graph.edges[back[target], back[source]]["bytes"] == moved


@EVERY_MODEL
def test_a_backward_op_is_at_home_with_its_forward_op(name: str) -> None:
    extraction = extracted(name, "modules")
    nodes = [data for _, data in extraction.graph.nodes(data=True)]
    GraphArrays.from_graph(extraction.graph)  # raises if there is a cycle
    for data, forward_op in zip(nodes, extraction.forward_of, strict=True):
        assert (forward_op is None) == (data["phase"] == "forward")
        if forward_op is not None:
            assert nodes[forward_op]["op"] == data["op"]
            assert nodes[forward_op]["colocate"] == data["colocate"] is not None


@pytest.mark.parametrize(
    "name", in_turn(["conv_net", "norm_twice", "dlrm", "bert", "separate_moe"])
)
def test_saved_bytes_of_modules_are_what_autograd_saves(name: str) -> None:
    extraction = extracted(name, "modules")
    assert total(extraction, "saved_bytes") == pytest.approx(saved_bytes(extraction.step), rel=0.1)


def test_calls_that_share_parameters_or_state_stay_together() -> None:
    for name, together in (
        ("norm_twice", {"norm:BatchNorm1d", "norm@1:BatchNorm1d", "norm:backward/BatchNorm1d"}),
        ("tied_weights", {"embedding:Embedding", "head:Linear", "head:backward/Linear"}),
    ):
        nodes = extracted(name, "modules").graph.nodes
        (group,) = {nodes[op]["colocate"] for op in together}
        assert group.startswith("state ")
        assert {op for op in nodes if nodes[op]["colocate"] == group} - together <= {
            *("norm@1:backward/BatchNorm1d", "embedding:backward/Embedding")
        }


class NumpyTanh(torch.autograd.Function):
    """Forward and backward computed outside of torch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(np.tanh(x.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * torch.from_numpy(1 - np.tanh(x.numpy()) ** 2)


class Outside(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return NumpyTanh.apply(x)  # type: ignore[no-untyped-call]


def numpy_step() -> Workload:
    return linear_step(lambda m, x: m.linear(m.outside(m.linear(x))).sum(), outside=Outside())


def test_a_module_that_calls_numpy_is_placed_by_its_modules() -> None:
    extraction = extract(numpy_step())
    assert extraction.extractor == "modules"
    assert [tried.extractor for tried in extraction.fell_back] == ["export", "dispatch"]
    assert "NumpyTanh" in extraction.fell_back[0].reason
    assert ".numpy()" in extraction.fell_back[1].reason
    assert list(nx.dag_longest_path(extraction.graph))[:4] == [
        *("linear:Linear", "outside:Outside", "linear@1:Linear", ":Plain")
    ]
    assert "outside:backward/Outside" in extraction.graph


def test_what_numpy_made_between_modules_comes_after_all_that_was_there() -> None:
    def glue(m: Any, x: Tensor) -> Tensor:
        first, second = m.linear(x), m.second(x)
        made = torch.from_numpy(np.abs(first.numpy()) + np.abs(second.numpy()))
        out: Tensor = m.third(made)
        return out

    step = linear_step(glue, training=False, second=nn.Linear(8, 8), third=nn.Linear(8, 8))
    graph = extract(step).graph
    assert nx.ancestors(graph, "third:Linear") >= {"linear:Linear", "second:Linear"}


def test_branches_in_threads_of_their_own_do_not_wait_for_each_other() -> None:
    def both(m: Any, x: Tensor) -> Tensor:
        found: dict[str, Tensor] = {}
        threads = [
            threading.Thread(
                target=lambda name=name: found.update({name: m.get_submodule(name)(x)})
            )
            for name in ("linear", "second")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return (found["linear"] * found["second"]).sum()

    graph = extract(linear_step(both, second=nn.Sequential(nn.Linear(8, 8), nn.Tanh()))).graph
    assert not nx.has_path(graph, "linear:Linear", "second.1:Tanh")
    assert not nx.has_path(graph, "second.0:Linear", "linear:Linear")
    assert nx.has_path(graph, "second.0:Linear", ":Plain")
    assert {"linear:backward/Linear", "second.1:backward/Tanh"} <= set(graph)


def test_a_graph_of_modules_has_no_program_and_says_so() -> None:
    extraction = extract(numpy_step())
    with pytest.raises(ExtractionError, match="no program"):
        extraction.check_any_data()


def test_modules_are_timed_in_both_directions() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1024), nn.Linear(1024, 1024))
    x = torch.randn(64, 8)
    extraction = extract(Workload.of(model, (x, torch.zeros(64, 1024)), squared), "modules")
    core = min(os.sched_getaffinity(0))
    device = Device(name=f"core:{core}", kind="core", memory_bytes=1 << 30)
    before = os.sched_getaffinity(0)
    costs_s = profile_modules(extraction, [device], repeats=3)
    assert os.sched_getaffinity(0) == before
    assert costs_s.keys() == {"core"}
    of = dict(zip(extraction.graph, costs_s["core"].tolist(), strict=True))
    assert all(math.isfinite(seconds) and seconds > 0 for seconds in of.values())
    assert of["2:Linear"] > of["0:Linear"]  # 16,384 times the FLOPs
    assert of["2:backward/Linear"] > of["0:backward/Linear"]


def test_modules_without_memory_cannot_be_timed() -> None:
    model = nn.Linear(8, 8, device="meta")
    extraction = extract(Workload.of(model, (X, X), squared), "modules")
    core = min(os.sched_getaffinity(0))
    device = Device(name=f"core:{core}", kind="core", memory_bytes=1 << 30)
    with pytest.raises(ExtractionError, match="cannot be timed"):
        profile_modules(extraction, [device])


# --- fall-backs


def test_an_unknown_extractor_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="export, dispatch, modules"):
        extract(tiny_models.conv_net(), "dynamo")


@pytest.mark.parametrize("extractor", ["auto", *EXTRACTORS])
@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda m, x: m.linear(x), "needs a scalar loss"),
        (lambda m, x: m.linear(x.add_(1)).sum(), "in place; clone it first"),
    ],
)
def test_a_step_that_is_at_fault_is_tried_once(
    extractor: str, function: Callable[..., Any], told: str
) -> None:
    with pytest.raises(StepError, match=told) as refused:
        extract(linear_step(function), extractor)
    assert "no extractor takes" not in str(refused.value)


def test_nothing_to_train_and_no_ops_are_faults_of_the_step() -> None:
    frozen = nn.Linear(8, 8).requires_grad_(False)
    for extractor in ("auto", *EXTRACTORS):
        with pytest.raises(StepError, match="no parameter that requires a gradient"):
            extract(Workload.of(frozen, (X, X), squared), extractor)
        with pytest.raises(StepError, match="runs no ops"):
            extract(Workload.of(nn.Identity(), X, training=False), extractor)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_that_fails_by_itself_is_refused_with_its_own_reason(device: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(3, 3)).to(device)
    with pytest.raises(StepError, match="must run on the example inputs") as refused:
        extract(Workload.of(model, (X, X), squared))
    assert "no extractor takes" not in str(refused.value)


def test_where_none_takes_it_all_three_say_why() -> None:
    step = replace(numpy_step(), optimizer=Optimizer(kind="sgd"))
    with pytest.raises(ExtractionError, match="no extractor takes Plain") as refused:
        extract(step)
    assert all(f" {name}: " in str(refused.value) for name in EXTRACTORS)


# --- sizes and inputs that are not tensors


@pytest.mark.parametrize("extractor", EXTRACTORS)
def test_numbers_among_the_inputs_are_part_of_the_step(extractor: str) -> None:
    def scaled(m: Any, n: int, x: Tensor, flag: bool | None, y: Tensor) -> Tensor:
        assert flag is None
        out: Tensor = (m.linear(x) * n - y).sum()
        return out

    step = Workload.of(Plain(scaled, linear=nn.Linear(8, 8)), (3, X, None, X))
    extraction = extract(step, extractor)
    if extractor != "modules":
        assert [s.name for s in extraction.program.sources if s.role == "input"] == ["0", "1"]
        assert_runs_as_eager(extraction)


@pytest.mark.parametrize("extractor", EXTRACTORS)
def test_sizes_that_follow_the_input_are_those_of_the_example(extractor: str) -> None:
    def padded(m: Any, x: Tensor) -> Tensor:
        filler = x.new_ones(7 - x.shape[0], x.shape[1])
        out: Tensor = m.linear(torch.cat([x, filler])).sum()
        return out

    extraction = extract(linear_step(padded), extractor)
    assert total(extraction, "flops") == (2 * 7 * 8 * 8) * 2
    if extractor != "modules":
        assert_runs_as_eager(extraction)


@pytest.mark.parametrize("extractor", EXTRACTORS)
def test_a_program_with_dynamic_sizes_is_placed_for_the_example(extractor: str) -> None:
    batch = torch.export.Dim("batch", min=2, max=64)
    model = nn.Sequential(nn.Linear(8, 8), nn.Flatten(), nn.Linear(8, 2)).eval()
    program = torch.export.export(model, (X,), dynamic_shapes=({0: batch},))
    dynamic = program.module(check_guards=False)
    for module in dynamic.modules():
        module.training = False
    extraction = extract(Workload(dynamic, (X,), training=False), extractor)
    assert total(extraction, "flops") == 2 * 4 * (8 * 8 + 8 * 2)


class Logged(torch.Tensor):
    """A tensor that forwards every op to another one."""

    own: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Logged:
        made: Logged = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        made.own = inner
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without func
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = tree_map_only(Logged, lambda t: t.own, (args, kwargs or {}))
        return tree_map_only(Tensor, Logged, func(*given[0], **given[1]))


class Wrap(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Logged(x)


class Unwrap(nn.Module):
    def forward(self, x: Logged) -> Tensor:
        return x.own


def test_tensors_of_a_subclass_are_followed() -> None:
    step = linear_step(
        lambda m, x: m.unwrap(m.linear(m.wrap(x))), training=False, wrap=Wrap(), unwrap=Unwrap()
    )
    recording = extract(step)
    assert recording.extractor == "dispatch"
    assert_runs_as_eager(recording)
    graph = extract(step, "modules").graph
    assert nx.has_path(graph, "linear:Linear", "unwrap:Unwrap")
