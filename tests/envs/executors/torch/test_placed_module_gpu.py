"""Placed modules on cuda:0 and the CPU compute the same as the model on the CPU.

On a real device, and on a fake one whose streams run in several orders.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from envs.executors.torch.placed_module import PlacedModule
from graphs.extract import Extraction, Workload, extract
from tests.fake_cuda.machine import is_fake
from tests.helpers import tiny_models, tiny_reference_models
from tests.helpers.extracted_steps import copied, without_dropout
from tests.helpers.in_turn import LARGE
from tests.helpers.placed_steps import random_devices, random_order
from tests.helpers.second_devices import CUDA as GPU
from tests.helpers.second_devices import FAKE, HAS_CUDA, REAL, on_gpus
from tests.helpers.tiny_models import forward
from tests.helpers.trained_alike import assert_trains_alike, torch_optimizer, with_optimizer

pytestmark = [
    pytest.mark.usefixtures("cuda"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]
STEPS = tiny_models.STEPS | tiny_reference_models.STEPS
DOUBLE = ("conv_net", "resnet", "inception")
"""Models in double precision: by default accelerators round 32-bit convolutions more."""
TRANSFORMERS = ("bert", "gpt2", "t5", "mixtral")
OTHERS = (
    *("conv_net", "tied_weights", "norm_twice", "views", "attention", "decaying_weight", "nmt"),
    *("weighted_loss", "resnet", "inception", "rnnlm", "separate_moe", "dlrm"),
)


MODELS = pytest.mark.parametrize(
    ("cuda", "name"),
    [
        *(on_gpus(1, "cuda", name) for name in (*OTHERS, *TRANSFORMERS)),
        *(pytest.param(FAKE, name) for name in (*OTHERS, *TRANSFORMERS) if name not in LARGE),
    ],
    indirect=["cuda"],
)
"""All models on a GPU; the contract of all executors has the large ones on a fake GPU."""


def extracted(name: str) -> Extraction:
    """Return an extraction with its own copy of the model."""
    extraction = extracted_once(name)
    if extraction.forward_program is None:
        pytest.skip(f"torch {torch.__version__} cannot export {name}")
    return copied(extraction)


@functools.cache
def extracted_once(name: str) -> Extraction:
    """Extract without dropout, because every device type has its own random numbers."""
    if name in TRANSFORMERS:
        return without_dropout(name)
    torch.manual_seed(0)
    step = STEPS[name]()
    if name in DOUBLE:
        images, *rest = step.inputs
        step = Workload.of(step.model.double(), (images.double(), *rest), step.loss)
    return extract(step)


def all_on(extraction: Extraction, device: torch.device | str) -> dict[str, torch.device | str]:
    return {call.key: device for call in extraction.forward.placed_calls}


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found.cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("seed", "overlap"),
    [
        *((0, False), (1, True)),
        *(pytest.param(*both, marks=pytest.mark.slow) for both in ((0, True), (1, False))),
    ],
)
@MODELS
def test_training_on_gpu_and_cpu_is_that_of_the_model(name: str, seed: int, overlap: bool) -> None:
    extraction = extracted(name)
    plain = copy.deepcopy(extraction.step)
    before = dict(extraction.step.model.named_parameters())
    order = random_order(extraction, seed) if seed % 2 else ()
    devices = random_devices(extraction, ["cpu", GPU], seed)
    placed = PlacedModule(extraction, devices, order, overlap=overlap)
    assert placed.transfers > 0
    if not is_fake():  # torch lets a tensor take over memory of a real device only
        assert all(own is before[name] for name, own in placed.named_parameters())
    assert_trains_alike(plain, placed, steps=2, tolerance=1e-4)


@pytest.mark.slow_repeats
@MODELS
def test_training_on_the_gpu_alone_sends_nothing_but_inputs(name: str) -> None:
    extraction = extracted(name)
    plain = copy.deepcopy(extraction.step)
    placed = PlacedModule(extraction, all_on(extraction, GPU))
    assert placed.transfers == 0
    assert_trains_alike(plain, placed, steps=2, tolerance=1e-4)


def test_launching_on_the_gpu_alone_never_waits_for_it() -> None:
    extraction = extracted("bert" if HAS_CUDA else "attention")
    placed = PlacedModule(extraction, all_on(extraction, GPU))
    inputs = [tensor.to(GPU) for tensor in extraction.step.inputs]
    keywords = {name: tensor.to(GPU) for name, tensor in extraction.step.keywords.items()}
    placed(*inputs, **keywords).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        placed(*inputs, **keywords).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_inputs_in_pinned_memory_arrive() -> None:
    extraction = extracted("attention")
    placed = PlacedModule(extraction, all_on(extraction, GPU))
    expected = placed(*extraction.step.inputs)
    pinned = [tensor.pin_memory() for tensor in extraction.step.inputs]
    assert torch.equal(placed(*pinned), expected)


@pytest.mark.parametrize("cuda", [REAL], indirect=True)
def test_autocast_within_the_model_is_that_of_the_device() -> None:
    def halved(m: Any, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return m.second(m.first(x))

    layers = {"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)}
    step = Workload.of(tiny_models.Plain(halved, **layers), torch.randn(3, 4), training=False)
    extraction = extract(step)
    expected = forward(copy.deepcopy(step))
    found = PlacedModule(extraction, all_on(extraction, GPU))(*step.inputs)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found.cpu(), expected, rtol=0.05, atol=0.05)


def test_a_loss_that_is_still_held_does_not_hinder_a_move() -> None:
    extraction = extracted("tied_weights")
    placed = PlacedModule(extraction, all_on(extraction, "cpu"))
    for device in (GPU, "cpu", GPU):
        held = placed(*extraction.step.inputs)
        placed.place(all_on(extraction, device))
        placed.zero_grad()
        loss = placed(*extraction.step.inputs)
        loss.backward()
        assert held.requires_grad
        assert all(p.grad is not None and p.grad.device == p.device for p in placed.parameters())


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("cuda", "name", "dtype", "tolerance"),
    [
        on_gpus(1, "cuda", "conv_net", "fp32", 1e-4),
        on_gpus(1, "cuda", "attention", "bf16", 0.02),
        (FAKE, "conv_net", "fp32", 1e-6),
    ],
    indirect=["cuda"],
)
@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_steps_with_an_optimizer_leave_what_torchs_own_leaves(
    kind: str, name: str, dtype: str, tolerance: float
) -> None:
    step = with_optimizer(extracted(name).step, kind, learning_rate=0.01)
    extraction = extract(replace(step, dtype=dtype))
    plain = copy.deepcopy(extraction.step)
    assert plain.optimizer is not None
    optimizer = torch_optimizer(plain.model, plain.optimizer)
    placed = PlacedModule(extraction, random_devices(extraction, ["cpu", GPU], 1))
    for _ in range(3):
        optimizer.zero_grad()
        expected = forward(plain)
        expected.backward()
        optimizer.step()
        assert_close(placed.step(*plain.inputs), expected.detach(), tolerance)
    for key, tensor in plain.model.state_dict().items():
        assert_close(placed.state_dict()[key], tensor, tolerance)
    assert all(own.grad is None for own in placed.parameters())
