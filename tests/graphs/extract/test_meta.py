"""Extraction of models without memory, built on the meta device."""

from __future__ import annotations

import copy
from dataclasses import replace

import networkx as nx
import pytest
import torch
from torch import nn

from graphs.extract import ExtractionError, Workload, extract
from graphs.extract.eager import check_has_memory
from tests.helpers import tiny_models
from tests.helpers.tiny_models import Plain, squared


def on_meta(step: Workload) -> Workload:
    return replace(step, model=copy.deepcopy(step.model).to("meta"))


CASES = [(name, "export") for name in ("conv_net", "norm_twice", "attention", "weighted_loss")]
CASES += [(name, "dispatch") for name in ("norm_twice", "views")]
CASES += [(name, "modules") for name in ("norm_twice", "views")]


@pytest.mark.slow_repeats
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize(("name", "extractor"), CASES)
def test_a_model_on_meta_has_the_graph_of_the_real_one(
    name: str, extractor: str, training: bool
) -> None:
    step = tiny_models.STEPS[name]()
    step = replace(step, training=training)
    expected = extract(step, extractor).graph
    found = extract(on_meta(step), extractor).graph
    assert list(found) == list(expected)
    if extractor != "dispatch" or training:
        assert nx.utils.graphs_equal(found, expected)


def test_tied_parameters_stay_tied() -> None:
    step = tiny_models.tied_weights()
    with torch.device("meta"):
        embedding, head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        middle = nn.Linear(6, 6)
    head.weight = embedding.weight
    assert isinstance(step.model, Plain)
    model = Plain(step.model.function, embedding=embedding, middle=middle, head=head)
    expected = extract(step).graph
    found = extract(Workload.of(model, step.inputs, step.loss)).graph
    assert nx.utils.graphs_equal(found, expected)


@pytest.mark.parametrize("inputs", ["cpu", "meta"])
def test_inputs_may_be_anywhere(inputs: str) -> None:
    with torch.device("meta"):
        model = nn.Linear(8, 8)
    x = torch.empty(4, 8, device=inputs)
    assert ":backward/mm" in extract(Workload.of(model, (x, x), squared)).graph


@pytest.mark.parametrize("what", ["parameters", "inputs"])
def test_what_cannot_be_run_is_refused(what: str) -> None:
    model, x = nn.Linear(8, 8), torch.empty(4, 8)
    check_has_memory(Workload.of(model, {"input": x}))
    step = (
        Workload.of(model, {"input": x.to("meta")})
        if what == "inputs"
        else on_meta(Workload(model))
    )
    with pytest.raises(ExtractionError, match=f"{what} of Linear are on the meta device"):
        check_has_memory(step)


def test_the_model_has_its_own_tensors_back() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to("meta")
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    ids = {name: id(tensor) for name, tensor in state.items()}
    for columns in (8, 3):
        x = torch.empty(4, columns)
        try:
            extract(Workload.of(model, (x, x), squared))
        except ExtractionError:
            assert columns == 3
        after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        assert {name: id(tensor) for name, tensor in after.items()} == ids
        assert all(tensor.is_meta for tensor in after.values())
