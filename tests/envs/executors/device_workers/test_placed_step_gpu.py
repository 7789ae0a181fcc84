"""Steps of processes on real GPUs compute what the model computes: CUDA IPC, page-locked memory."""

from __future__ import annotations

import copy

import pytest
import torch

from envs.executors.cores.errors import WorkerMemoryError
from envs.executors.device_workers.placed_step import PlacedStep
from graphs.extract import extract
from tests.helpers.extracted_steps import made
from tests.helpers.placed_steps import random_devices
from tests.helpers.tiny_models import forward
from tests.helpers.trained_alike import assert_close, on_cpu, torch_optimizer, with_optimizer

CPU, FIRST, OTHER = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize(
    "devices",
    [
        pytest.param([CPU, FIRST], id="one GPU, CPU"),
        pytest.param([FIRST, OTHER], id="two GPUs", marks=TWO_GPUS),
        pytest.param([CPU, FIRST, OTHER], id="two GPUs, CPU", marks=TWO_GPUS),
    ],
)
@pytest.mark.parametrize("name", ["conv_net", "tied_weights", "norm_twice", "attention"])
def test_random_placements_train_as_torch_does(name: str, devices: list[torch.device]) -> None:
    # not adam: it makes steps of full size of the rounding errors that are the gradients of biases
    # before norms and of attention's keys
    step = with_optimizer(made(name), "momentum", learning_rate=0.01)
    plain = copy.deepcopy(step)
    assert plain.optimizer is not None
    optimizer = torch_optimizer(plain.model, plain.optimizer)
    extraction = extract(step)
    places = {key: torch.device(d) for key, d in random_devices(extraction, devices, 0).items()}
    with PlacedStep(extraction, places) as workers:
        for _ in range(3):
            optimizer.zero_grad()
            expected = forward(plain)
            expected.backward()
            optimizer.step()
            assert_close(workers.step(*step.inputs, **step.keywords), expected.detach(), 1e-4)
    assert_close(on_cpu(step.model.state_dict()), on_cpu(plain.model.state_dict()), 1e-4)


def test_a_full_gpu_is_named() -> None:
    extraction = extract(with_optimizer(made("conv_net"), "sgd"))
    places = dict.fromkeys((call.key for call in extraction.forward.placed_calls), FIRST)
    with pytest.raises(WorkerMemoryError, match="the worker of cuda:0 failed"):
        PlacedStep(extraction, places, limits={FIRST: 1000})
