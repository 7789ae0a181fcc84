"""The order in which a training step issues its ops, as the simulator predicts it."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from envs.executors.torch.placed_module import PlacedModule
from envs.problem import Problem
from envs.simulator import Simulator
from envs.torch_runtime import TorchRuntime
from envs.torch_runtime.executor import placed_module
from graphs.extract import Workload, extract
from graphs.extract.placeable import CallGraph
from tests.helpers.clusters import equal_costs, pair
from tests.helpers.op_log import OpLog
from tests.helpers.second_devices import DEVICES, second
from tests.helpers.tiny_models import Plain

SEEN = ("tanh", "sigmoid", "softshrink", "gelu", "elu", "softplus", "hardtanh", "leaky_relu")
"""Functions with an op each for forward and backward; the last two run on the CPU."""
OF_CPU = SEEN[-2:]


def branches() -> Workload:
    """Return a step of three branches; none waits for what one on the other device computes."""

    def compute(m: nn.Module, x: Tensor) -> Tensor:
        left = F.softshrink(m.get_submodule("left")(x).tanh().sigmoid())
        right = F.elu(F.gelu(m.get_submodule("right")(x)) + 0.5 * left)
        middle = F.softplus(m.get_submodule("middle")(x))
        other = F.leaky_relu(F.hardtanh(m.get_submodule("other")(x)))
        return (left * right * middle).mean() + other.mean()

    torch.manual_seed(0)
    layers = {name: nn.Linear(4, 4) for name in ("left", "right", "middle", "other")}
    return Workload.of(Plain(compute, **layers), (torch.randn(3, 4),))


def name_of(node: str) -> str:
    """Return the name of an op of torch from a node such as ``left:backward/tanh``."""
    phase, is_backward, op = node.rpartition(":")[2].partition("/")
    return f"{op}_{phase}" if is_backward else phase


def part(names: list[str], *, of_cpu: bool) -> list[str]:
    kept = [name for name in SEEN if (name in OF_CPU) is of_cpu]
    return [name for name in names if name.removesuffix("_backward") in kept]


@pytest.mark.slow_repeats
@pytest.mark.parametrize("second_device", DEVICES, indirect=True)
@pytest.mark.usefixtures("second_device")
@pytest.mark.parametrize("beside", [False, True])
def test_forward_and_backward_ops_are_issued_in_the_simulated_order(beside: bool) -> None:
    extraction = extract(branches())
    runtime = TorchRuntime(copy.deepcopy(extraction), pair())
    calls = runtime.calls
    assert isinstance(calls, CallGraph)
    known = equal_costs(calls.graph)
    problem = Problem.of(known.graph, runtime.planned(known.cluster))
    devices = np.array(
        [beside and any(op in node for op in ("other", *OF_CPU)) for node in calls.graph], np.int32
    )
    simulator, orders = Simulator(problem), set()
    for seed in range(8):
        priority = np.random.default_rng(seed).random(problem.op_count)
        schedule = simulator.run(devices, priority)
        assert schedule.issued is not None
        simulated = [name_of(problem.graph.ids[i]) for i in schedule.issued.tolist()]
        where = [(second(), torch.device("cpu"))[d] for d in devices.tolist()]
        placed = placed_module(runtime.extraction, calls, where, priority.tolist())
        assert isinstance(placed, PlacedModule)
        with OpLog() as log:
            placed.step(*extraction.step.inputs)
        for of_cpu in (False, True):
            assert part(log.names, of_cpu=of_cpu) == part(simulated, of_cpu=of_cpu)
        orders.add(tuple(part(simulated, of_cpu=False)))
    assert len(orders) > 4
