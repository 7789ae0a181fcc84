"""Functions with a backward of their own on torch devices: placed, compiled, in workers, timed."""

from __future__ import annotations

import copy
import functools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import placer
from envs.costs.calls import profile_calls
from envs.costs.ops import node_signatures
from envs.executors.device_workers.placed_step import PlacedStep
from envs.executors.hooks.hooked_module import HookedModule
from envs.executors.unplaced import UnplacedModel
from envs.hardware.discover import discover, present
from envs.placement import Placement
from envs.torch_runtime import TorchRuntime
from graphs.extract import Extraction, ExtractionError, extract
from graphs.extract.placeable import call_graph
from graphs.graph import GraphArrays
from tests.fake_cuda.sharing import FakeSharing
from tests.helpers.extracted_steps import copied
from tests.helpers.own_functions import STEPS, Summed, own_step
from tests.helpers.placed_steps import by_calls, on_cores, random_devices, two_cores
from tests.helpers.second_devices import FAKE, VDEV, opened_device
from tests.helpers.trained_alike import assert_close, assert_trains_alike, on_cpu, with_optimizer


@functools.cache
def extracted(name: str) -> Extraction:
    return extract(own_step(STEPS[name]))


@pytest.mark.slow_repeats
@pytest.mark.parametrize("kind", [VDEV, FAKE])
@pytest.mark.parametrize("name", sorted(STEPS.keys() - {"random"}))
def test_random_placements_train_as_the_model_does(
    name: str, kind: str, request: pytest.FixtureRequest
) -> None:
    extraction = extracted(name)
    plain = copied(extraction).step
    with opened_device(kind, request.node.name) as device:
        for seed in range(2):
            step = replace(extraction, step=copy.deepcopy(plain))
            placed = by_calls(step, ["cpu", device], seed)
            assert_trains_alike(plain, placed, steps=2)


def test_a_device_as_a_text_is_that_of_the_module_that_gives_it() -> None:
    def where_it_is(m: Any, x: torch.Tensor) -> Any:
        return Summed.apply(m.first(x), [x, m.second(x)], str(x.device))  # type: ignore[no-untyped-call]  # torch leaves it untyped

    extraction = extract(own_step(where_it_is), needs="calls")
    plain = copy.deepcopy(extraction.step)
    with opened_device("fake cuda 0") as device:
        runtime = TorchRuntime(extraction, present([str(device)]))
        graph = GraphArrays.from_graph(runtime.graph)
        zeros = np.zeros(len(graph))
        placement = Placement.of(graph, present([str(device)]), zeros.astype(np.int32), zeros)
        placed = runtime.apply(placement)
        assert isinstance(placed, HookedModule)
        assert_trains_alike(plain, placed, steps=2)


@pytest.mark.slow_repeats
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by dynamo
@pytest.mark.parametrize("name", ["held", "parameter", "view"])
def test_a_placed_module_is_one_graph_to_dynamo(name: str) -> None:
    torch._dynamo.reset()
    step = own_step(STEPS[name])
    placed = by_calls(extract(copy.deepcopy(step)), ["cpu"])
    compiled = torch.compile(placed, backend="aot_eager", fullgraph=True)
    assert_trains_alike(step, placed, run=compiled, steps=2)
    torch._dynamo.reset()


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in ("held", "lists", "members")))
        for name in sorted(STEPS.keys() - {"random", "local"})
    ],
)
def test_workers_import_the_functions(name: str) -> None:
    step = with_optimizer(own_step(STEPS[name]), "sgd", learning_rate=0.01)
    extraction, plain = extract(copy.deepcopy(step)), copy.deepcopy(step).model
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    gpus = [torch.device("cuda", index) for index in range(2)]
    places = {k: torch.device(d) for k, d in random_devices(extraction, gpus, 0).items()}
    with PlacedStep(extraction, places, sharing=FakeSharing(2, 0), step_timeout_s=60.0) as workers:
        for _ in range(2):
            assert step.loss is not None
            loss = step.loss(plain(step.inputs[0]), step.inputs[1])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            assert_close(workers.step(*step.inputs), loss.detach(), 1e-6)
        workers.read_back()
        assert_close(on_cpu(extraction.step.model.state_dict()), on_cpu(plain.state_dict()), 1e-6)


def test_workers_cannot_have_a_local_function() -> None:
    extraction = extract(with_optimizer(own_step(STEPS["local"]), "sgd"))
    places = {call.key: torch.device("cpu") for call in extraction.forward.placed_calls}
    with pytest.raises(ExtractionError, match=r"cannot import .*<locals>\.Local, .* module of its"):
        PlacedStep(extraction, places)


def test_cores_train_as_the_model_does() -> None:
    step = own_step(STEPS["held"])
    with on_cores(extract(copy.deepcopy(step)), cluster=two_cores()) as placed:
        assert_trains_alike(step, placed)


# --- costs


def test_forward_and_backward_of_a_call_are_timed() -> None:
    extraction = extract(own_step(STEPS["held"]))
    calls = call_graph(extraction)
    costs = profile_calls(extraction, calls, discover("cpu").devices)
    nodes = [
        node
        for node, call in zip(calls.node_of.tolist(), extraction.call_of, strict=True)
        if call == ":ClampedRoot"
    ]
    assert len(set(nodes)) == 2
    for cost_s in costs.values():
        assert np.isfinite(cost_s).all()
        assert (cost_s[nodes] > 0).all()


SIGNATURES = """
from envs.costs.ops import node_signatures
from graphs.extract import extract
from graphs.extract.placeable import call_graph
from tests.helpers.own_functions import STEPS, own_step
extraction = extract(own_step(STEPS["held"]))
print(*node_signatures(extraction, call_graph(extraction)))
"""


@pytest.mark.slow
def test_the_costs_of_a_function_are_not_those_of_its_ops_and_the_same_in_every_process() -> None:
    def signatures(function: Any) -> list[str]:
        extraction = extract(own_step(function))
        calls = call_graph(extraction)
        return list(node_signatures(extraction, calls))

    own = signatures(STEPS["held"])
    nested = signatures(STEPS["nested"])  # a function that computes the same
    different = [one != other for one, other in zip(own, nested, strict=True)]
    assert sum(different) == 2  # forward and backward
    elsewhere = subprocess.run(
        [sys.executable, "-c", SIGNATURES],
        env=os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert elsewhere.stdout.split() == own


# --- the public interface


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["cuda:0,cpu", "cores"])
def test_a_saved_placement_keeps_the_backward(devices: str, tmp_path: Path) -> None:
    step, path = own_step(STEPS["held"]), tmp_path / "placement.json"
    cluster = two_cores() if devices == "cores" else devices
    names = list(two_cores().names) if devices == "cores" else devices.split(",")
    limits = {"cuda:0": 1 << 30, "cpu": 1 << 30} if devices != "cores" else {}
    with opened_device(FAKE):
        result = placer.optimize(
            copy.deepcopy(step),
            cluster,
            search=placer.SearchConfig(budget="20e", policy=None, measure="1s"),
            constraints=placer.Constraints(
                memory=limits, pins={"first": names[1], "second": names[0]}
            ),
            progress=False,
        )
        assert not result.placement.unplaced
        result.save(path)
        for placement in (result, path):
            own = copy.deepcopy(step)
            with placer.apply(own.model, placement, step.inputs, loss=step.loss) as placed:
                assert not isinstance(placed, UnplacedModel)
                assert_trains_alike(step, placed)
