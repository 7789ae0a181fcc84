"""torch.compile of placed modules: same losses and gradients, without graph breaks."""

from __future__ import annotations

import copy
import random
import shutil
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from envs.executors.torch.placed_module import PlacedModule
from graphs.extract import Extraction, Workload, extract
from tests.helpers import tiny_models
from tests.helpers.trained_alike import assert_trains_alike

NEEDS_COMPILER = pytest.mark.skipif(
    not (shutil.which("c++") or shutil.which("g++")), reason="inductor needs a C++ compiler"
)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Reset dynamo, whose limit also counts what other tests compiled."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def placed_on(extraction: Extraction, *devices: torch.device) -> PlacedModule:
    """Place calls at random, with colocated ones together."""
    randomly = random.Random(0)
    chosen = {c.key: randomly.choice(devices) for c in extraction.forward.placed_calls}
    for keys in extraction.forward.together():
        chosen |= dict.fromkeys(keys, chosen[keys[0]])
    return PlacedModule(extraction, chosen)


@pytest.mark.slow_repeats
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of inductor
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "aot_eager") for name in ("conv_net", "tied_weights", "views")),
        pytest.param("attention", "aot_eager", marks=pytest.mark.slow),
        pytest.param("attention", "inductor", marks=[pytest.mark.slow, NEEDS_COMPILER]),
    ],
)
def test_a_placed_module_is_one_graph_to_dynamo(name: str, backend: str) -> None:
    step = tiny_models.STEPS[name]()
    placed = placed_on(extract(copy.deepcopy(step)), torch.device("cpu"))
    compiled = torch.compile(placed, backend=backend, fullgraph=True)
    assert_trains_alike(step, placed, run=compiled, steps=2, tolerance=1e-5)


@pytest.mark.slow
def test_what_was_compiled_is_compiled_anew_for_another_placement() -> None:
    step = tiny_models.views()
    extraction = extract(copy.deepcopy(step))
    placed = placed_on(extraction, torch.device("cpu"))
    compiled = torch.compile(placed, backend="aot_eager", fullgraph=True)
    compiled(*step.inputs)
    order = [call.key for call in extraction.forward.placed_calls]
    placed.place(dict.fromkeys(order, "cpu"), order[::-1])
    assert_trains_alike(step, placed, run=compiled, steps=2, tolerance=1e-5)


@pytest.mark.slow
def test_what_was_compiled_has_both_modes() -> None:
    step = tiny_models.norm_twice()
    placed = placed_on(extract(copy.deepcopy(step)), torch.device("cpu"))
    compiled = torch.compile(placed, backend="aot_eager", fullgraph=True)
    assert isinstance(compiled, nn.Module)
    assert_trains_alike(step, placed, run=compiled, steps=1, tolerance=1e-5)
    expected = copy.deepcopy(step.model).eval()
    expected.load_state_dict(placed.state_dict())
    compiled.eval()
    torch.testing.assert_close(compiled(*step.model_inputs), expected(*step.model_inputs))
    compiled.train()
    assert compiled(*step.inputs).requires_grad


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("types", [("cuda",), ("cuda", "cpu")])
def test_a_module_on_a_gpu_compiles(backend: str, types: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.Tanh())
    step = Workload.of(model, (torch.randn(4, 8), torch.randn(4, 16)), nn.MSELoss())
    devices = [torch.empty(0, device=kind).device for kind in types]
    placed = placed_on(extract(copy.deepcopy(step)), *devices)
    assert_trains_alike(
        step, placed, run=torch.compile(placed, backend=backend), steps=2, tolerance=1e-4
    )
