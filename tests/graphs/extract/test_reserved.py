"""Submodules named like an attribute of torch.export's modules."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint, pipeline

from graphs.extract import Workload, extract
from graphs.extract.export.trace import reserved_at_the_top, reserved_modules, reserved_names
from placer.exports import pipelining
from placer.exports.placed_modules import PlacedModules
from placer.exports.renaming import ExportError
from tests.helpers import tiny_models
from tests.helpers.placed_at_random import cut_placement

LIKELY = ("meta", "graph")


class Named(nn.Module):
    """Two layers with a norm between them; the last has a given name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.add_module(name, nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.get_submodule(self.name)(self.norm(self.first(x)))
        return out


@pytest.mark.slow_repeats
@pytest.mark.parametrize("name", LIKELY)
def test_inference_is_exported_whatever_submodules_are_called(name: str) -> None:
    steps = [Workload.of(Named(own), (torch.ones(3, 4),), training=False) for own in (name, "last")]
    odd, plain = (extract(step, "export") for step in steps)
    assert [op.replace(name, "last") for op in odd.graph] == list(plain.graph)
    assert odd.forward.calls[-1].module == name
    assert {s.name for s in odd.forward.sources if s.role == "parameter"} == {
        key for key, _ in steps[0].model.named_parameters()
    }
    assert "norm.running_mean" in {source.name for source in odd.program.sources}


@pytest.mark.slow_repeats
@pytest.mark.parametrize("name", [*LIKELY, "recompile"])
def test_torch_fails_where_a_name_is_reserved_and_the_path_is_told(name: str) -> None:
    model = nn.Sequential(Named(name), nn.Linear(4, 4))
    assert reserved_modules(model) == [f"0.{name}"]
    assert reserved_at_the_top(model) == []
    assert reserved_at_the_top(model[0]) == [name]
    inputs = torch.ones(3, 4)
    with pytest.raises(Exception, match=rf"{name}"):
        pipeline(copy.deepcopy(model), (inputs,), split_spec={f"0.{name}": SplitPoint.BEGINNING})
    extraction = extract(Workload.of(model, (inputs, torch.ones(3, 4)), tiny_models.squared))
    placement = cut_placement(extraction, ("cuda:0", "cuda:1"), (f"0.{name}",), of_calls=True)
    with pytest.raises(ExportError, match=rf"rename the submodule '0\.{name}'"):
        pipelining.pipeline(PlacedModules.of(extraction, placement))


def test_usual_names_are_free() -> None:
    usual = {"model", "loss", "weight", "bias", "layers", "embed_tokens", "lm_head", "norm", "0"}
    assert not usual & reserved_names()
