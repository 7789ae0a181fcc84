"""Every model by every extractor: the step computes what torch does, and its graph is complete."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from envs.executors.cores.instruction_lists import device_lists, priority_order
from graphs.extract import Extraction, Workload, extract
from graphs.extract.extraction import EXTRACTORS
from graphs.extract.program import VIEW
from graphs.flops import further_formulas
from graphs.graph import GraphArrays
from tests.helpers import one_process, tiny_models, tiny_reference_models, tiny_transformers
from tests.helpers.extracted_steps import of_reference
from tests.helpers.in_turn import LARGE, in_turn
from tests.helpers.tiny_models import assert_same, eager, forward, saved_bytes, squared

pytest.importorskip("transformers")

TRANSFORMERS = {
    name: target + tiny_transformers.WITHOUT_DROPOUT.get(name, "")
    for name, target in tiny_transformers.TARGETS.items()
} | {f"hf-{name}": target for name, target in tiny_transformers.OTHERS.items()}
STEPS: dict[str, Callable[[], Workload]] = {
    **tiny_models.TRAINING,
    "structured_output": tiny_models.structured_output,
    "lstm": tiny_models.lstm,
    **tiny_reference_models.STEPS,
    **{
        name: functools.partial(tiny_transformers.load, target)
        for name, target in TRANSFORMERS.items()
    },
}
SLOW = {*LARGE, *(name for name in TRANSFORMERS if name.startswith("hf-"))}
CASES = [
    pytest.param(name, extractor, training, marks=[pytest.mark.slow] * (name in SLOW))
    for name in STEPS
    for extractor in EXTRACTORS
    for training in (True, False)
    if training or name != "own_loss"  # its output is a custom object
    if not training or name != "structured_output"
]


@functools.cache
def extracted(name: str, extractor: str, training: bool = True) -> Extraction:
    if name in tiny_reference_models.STEPS and extractor == "export":
        return of_reference(name, training)
    torch.manual_seed(0)
    return extract(replace(STEPS[name](), training=training), extractor)


def total(extraction: Extraction, attribute: str) -> int:
    return sum(data[attribute] for _, data in extraction.graph.nodes(data=True))


@pytest.mark.slow_repeats
@pytest.mark.parametrize(("name", "extractor", "training"), CASES)
def test_a_step_computes_what_torch_computes(name: str, extractor: str, training: bool) -> None:
    extraction = extracted(name, extractor, training)
    assert extraction.extractor == extractor
    assert_graph_is_complete(extraction)
    assert_sizes_are_those_of_a_real_run(extraction, name)
    if extractor == "modules":
        assert_backward_ops_are_with_their_forward_ops(extraction)
    else:
        exact = not is_rounded(name, extractor, training)
        one_process.assert_runs_as_eager(extraction, exact=exact)


def is_rounded(name: str, extractor: str, training: bool) -> bool:
    """Return whether the trace adds in another order than torch, which runs layers as one op."""
    if extractor == "dispatch":
        lstm = (name, training) == ("lstm", False)
        return name in TRANSFORMERS or lstm or (name, training) == ("attention", False)
    return name in ("llama", "mixtral") or (name, training) == ("attention", False)


def assert_graph_is_complete(extraction: Extraction) -> None:
    arrays = GraphArrays.from_graph(extraction.graph)  # raises if there is a cycle
    modules = {path for path, _ in extraction.step.model.named_modules()}
    assert set(arrays.modules) <= modules | {"loss"}
    assert len(extraction.forward_of) == len(arrays)
    if extraction.extractor != "modules":
        called = [call.op for call in extraction.program.calls if call.op != VIEW]
        assert sorted(called) == list(range(len(arrays)))


def assert_sizes_are_those_of_a_real_run(extraction: Extraction, name: str) -> None:
    step = copy.deepcopy(extraction.step)
    with FlopCounterMode(display=False, custom_mapping=further_formulas()) as counter:
        output = forward(step)
        if step.training:
            output.backward()
    # To torch's counter, attention in inference and LSTM layers are one op without a formula.
    if not name.startswith("lstm") and (name, step.training) != ("attention", False):
        assert total(extraction, "flops") == counter.get_total_flops() > 0
    parameters = list(step.model.parameters())
    tensors = [*step.named_state().values(), *constants_of(extraction)]
    held = {id(tensor): tensor.nbytes for tensor in tensors}
    assert total(extraction, "parameter_bytes") == sum(held.values())
    gradients = sum(p.nbytes for p in parameters if p.grad is not None)
    assert total(extraction, "gradient_bytes") == gradients


def constants_of(extraction: Extraction) -> list[torch.Tensor]:
    program = extraction.step_program
    sources = () if program is None else program.sources
    return [source.tensor for source in sources if source.tensor is not None]


def assert_backward_ops_are_with_their_forward_ops(extraction: Extraction) -> None:
    nodes = [data for _, data in extraction.graph.nodes(data=True)]
    for data, forward_op in zip(nodes, extraction.forward_of, strict=True):
        assert (forward_op is None) == (data["phase"] == "forward")
        if forward_op is not None:
            assert nodes[forward_op]["op"] == data["op"]
            assert nodes[forward_op]["colocate"] == data["colocate"] is not None


@pytest.mark.slow
@settings(max_examples=25)
@given(st.data())
def test_any_placement_gives_the_same_views(data: st.DataObject) -> None:
    extraction = extracted("views", "export")
    count = extraction.program.op_count
    devices = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    priority = data.draw(st.lists(st.floats(0, 1), min_size=count, max_size=count))
    order = priority_order(extraction.program, priority)
    found = one_process.run(extraction, device_lists(extraction.program, devices, order, 4))
    expected = eager(extraction.step)
    assert_same(found.output, expected.output)
    assert_same(found.gradients, expected.gradients)


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    "name", ["conv_net", "tied_weights", "norm_twice", "views", "lstm", "dlrm"]
)
def test_a_recording_is_the_same_graph_as_an_export(name: str) -> None:
    recording, export = extracted(name, "dispatch"), extracted(name, "export")
    assert list(recording.graph) == list(export.graph)
    assert nx.utils.graphs_equal(recording.graph, export.graph)
    assert recording.forward_of == export.forward_of
    assert recording.depends_on_data == ()


@pytest.mark.parametrize(
    "name", in_turn(["conv_net", "norm_twice", "dlrm", "bert", "separate_moe"])
)
def test_saved_bytes_of_modules_are_what_autograd_saves(name: str) -> None:
    extraction = extracted(name, "modules")
    assert total(extraction, "saved_bytes") == pytest.approx(saved_bytes(extraction.step), rel=0.1)


@pytest.mark.slow_repeats
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("extractor", EXTRACTORS)
def test_the_model_is_left_as_it_was(extractor: str, training: bool, mode: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout())
    model.train(mode)
    model[2].train(not mode)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [part.training for part in model.modules()]
    ids = [id(tensor) for tensor in (*model.parameters(), *model.buffers())]
    randomness = torch.get_rng_state()
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    extract(Workload.of(model, (x, x), squared, training=training), extractor)
    assert [part.training for part in model.modules()] == modes
    assert [id(tensor) for tensor in (*model.parameters(), *model.buffers())] == ids
    assert_same(dict(model.state_dict()), before)
    assert torch.equal(torch.get_rng_state(), randomness)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
