"""The dry run of device maps, compared with real runs by accelerate on two devices."""

from __future__ import annotations

import copy
import functools
import random
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from graphs.extract import Extraction, Workload, extract
from graphs.extract.placeable import call_graph
from placer.exports.device_map import device_map
from placer.exports.dry_run import flow
from placer.exports.existing_map import DeviceMap
from placer.exports.format import StepPredictor, export_extracted
from placer.exports.placed_modules import PlacedModules
from tests.fake_cuda import fake_cuda
from tests.helpers.placed_at_random import placement_of, random_placement
from tests.helpers.tiny_models import Plain, squared
from tests.placer.exports.test_export_prediction import NAMES, problem_of

accelerate = pytest.importorskip("accelerate")


class Inner(nn.Module):
    """Two layers with a function of the module's code between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.relu = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.cos(self.relu(self.first(x))))
        return out


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Inner(), nn.Sequential(Inner(), nn.Tanh())
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([self.left(torch.exp(x)), self.right(x)], 1)
        out: Tensor = self.head(torch.sin(both))
        return out


@functools.cache
def outer() -> Extraction:
    torch.manual_seed(0)
    return extract(Workload.of(Outer(), torch.randn(3, 4), training=False))


def random_map(model: nn.Module, seed: int) -> dict[str, str]:
    """Return a random map, in which modules may be nested."""
    randomly, found = random.Random(seed), dict[str, str]()

    def walk(module: nn.Module, path: str) -> None:
        children = list(module.named_children())
        if not children or randomly.random() < 0.3:
            found[path] = randomly.choice(["cpu", "cuda:0"])
        for name, child in children:
            walk(child, f"{path}.{name}" if path else name)

    walk(model, "")
    return found


class Recorded(TorchFunctionMode):
    """Records the device of every torch function call, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: defaultdict[str, list[str]] = defaultdict(list)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.devices[func.__name__.strip("_")].append(str(result.device))
        return result


def dispatched(extraction: Extraction, devices: dict[str, str]) -> dict[str, str]:
    """Return {call: device} of a run by accelerate; calls of one function have the same order."""
    step, recorded, found = extraction.step, Recorded(), dict[str, str]()
    with fake_cuda():
        model = accelerate.dispatch_model(copy.deepcopy(step.model), devices, main_device="cpu")
        with torch.no_grad(), recorded:
            model(*step.inputs)
    for op in {call.op for call in extraction.forward.calls}:
        keys = [call.key for call in extraction.forward.calls if call.op == op]
        found |= zip(keys, recorded.devices[op], strict=True)
    return found


@pytest.mark.slow
def test_calls_run_where_accelerate_runs_them_and_what_it_cannot_run_is_found() -> None:
    extraction = outer()
    step, ran, failed = extraction.step, 0, 0
    for seed in range(30):
        devices = random_map(step.model, seed)
        if len(set(devices.values())) == 1:
            continue
        found = flow(extraction.forward, step, devices, "cpu")
        if found.conflict is None:
            assert dispatched(extraction, devices) == found.devices, seed
            ran += 1
        else:
            with pytest.raises(RuntimeError, match="all tensors to be on the same device"):
                dispatched(extraction, devices)
            failed += 1
    assert min(ran, failed) >= 3


@pytest.mark.slow_repeats
@pytest.mark.parametrize("by", ["op", "module"])
def test_an_export_counts_the_ops_that_accelerate_runs_elsewhere_than_placed(by: str) -> None:
    extraction, ran, moving = outer(), 0, 0
    for seed in range(12):
        placement = random_placement(extraction, ("cpu", "cuda:0"), seed, by=by)
        placed = PlacedModules.of(extraction, placement, main_device="cpu")
        found = export_extracted(device_map, extraction, placement, main_device="cpu")
        if len(set(found.content.values())) == 1:
            continue
        seen = dispatched(extraction, found.content)
        moved = sum(seen[op.call] != op.device for op in placed.ops)
        assert (found.moved_op_count, found.op_count) == (moved, len(placed.ops))
        ran += 1
        moving += moved > 0
    assert min(ran, moving) >= 3


def chain(*, training: bool = False) -> Extraction:
    """Return two layers with two functions of the model's code between them."""
    torch.manual_seed(0)
    layers = {"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)}
    model = Plain(lambda m, x: m.second(torch.exp(torch.sin(m.first(x)))), **layers)
    inputs = (torch.ones(2, 4), torch.ones(2, 4)) if training else torch.ones(2, 4)
    return extract(Workload.of(model, inputs, squared if training else None, training=training))


@pytest.mark.slow
def test_functions_outside_of_modules_count_where_they_would_run() -> None:
    extraction = chain()
    placement = placement_of(call_graph(extraction).graph, NAMES, [0, 1, 0, 1])
    found = export_extracted(device_map, extraction, placement, problem=problem_of(extraction))
    assert found.content == {"first": 0, "second": 1}
    assert (found.moved_op_count, found.op_count) == (1, 4)
    # Four ops of 1 ms; three device changes become one.
    assert found.placed_step is not None
    assert found.exported_step is not None
    assert (found.placed_step.step_s, found.exported_step.step_s) == (0.007, 0.005)


def test_a_loss_is_computed_where_the_output_is_returned_but_is_no_part_of_the_map() -> None:
    extraction = chain(training=True)
    graph = call_graph(extraction).graph
    problem = problem_of(extraction)
    on_second = [int("sub" in op or "pow" in op or "mean" in op) for op in graph]
    placement = placement_of(graph, NAMES, on_second)
    found = export_extracted(device_map, extraction, placement, problem=problem)
    assert found.content == {"": 0}
    assert found.moved_op_count == 0
    assert set(flow(extraction.forward, extraction.step, {"": "cuda:0"}, "cuda:0").of_loss) == {
        op for op, device in zip(graph, on_second, strict=True) if device and "backward" not in op
    }
    predictor = StepPredictor(problem, placement, extraction)
    assert predictor.step({"second:linear": "cuda:0"}).step_s == predictor.placed_step.step_s


def test_keywords_beside_a_loss_are_inputs_of_the_model() -> None:
    model = Plain(
        lambda m, *, x: m.second(m.first(x)), first=nn.Linear(4, 4), second=nn.Linear(4, 4)
    )
    step = Workload.of(model, {"x": torch.ones(2, 4)}, squared, target=torch.ones(2, 4))
    extraction = extract(step)
    found = flow(extraction.forward, step, {"first": "cuda:0", "second": "cuda:1"}, "cuda:0")
    assert found.devices["second:linear"] == "cuda:1"
    assert not {"first:linear", "second:linear"} & found.of_loss


def test_what_a_map_has_on_the_cpu_beside_an_accelerator_is_computed_there() -> None:
    extraction = chain()
    on_gpus = placement_of(call_graph(extraction).graph, NAMES, [0, 0, 0, 1])
    found = export_extracted(
        device_map,
        extraction,
        on_gpus,
        problem=problem_of(extraction),
        renamed={"cuda:1": "cpu"},
    )
    assert found.content == {"first": 0, "second": "cpu"}
    assert found.moved_op_count == 1
    assert found.exported_step is None, "sending the weights in every step takes time, too"


@pytest.mark.slow
def test_the_code_around_nested_modules_of_a_map_is_followed() -> None:
    model = Plain(lambda m, x: m.left(x) + m.right(x), left=nn.Linear(4, 4), right=nn.Linear(4, 4))
    extraction = extract(Workload.of(model, torch.ones(2, 4), training=False))
    for devices, conflict in (
        ({"": "cuda:0", "right": "cuda:1"}, "add in Plain.forward"),
        ({"": "cuda:1", "right": "cuda:0"}, "the rest of the model would be computed on cuda:0"),
        ({"left": "cuda:0", "right": "cpu"}, "right would be computed on cuda:0"),
    ):
        assert conflict in DeviceMap(devices).conflict(extraction)
    assert DeviceMap({"": "cuda:0", "right": "cuda:0"}).conflict(extraction) == ""
    assert DeviceMap({"": "cuda:0", "second": "cuda:1"}).conflict(chain()) == ""
