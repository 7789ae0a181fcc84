"""Placed modules on two torch devices: what they compute is what the model computes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import tiny_models
import tiny_reference_models
import tiny_transformers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_devices import random_devices, random_order
from tiny_models import Plain, forward
from torch import Tensor, nn
from vdev import TRANSFERS, vdev

from envs.executor.placed_module import PlacedModule
from graphs.extract import Extraction, Step, extract

torch.set_num_threads(1)

STEPS = tiny_models.STEPS | tiny_reference_models.STEPS | tiny_transformers.STEPS
INFERENCE = [
    *("structured_output", "conv_net_inference", "channels_last_inference"),
    *("norm_twice_inference", "views_inference", "lstm_inference"),
]
TRAINING = [name for name in STEPS if name not in tiny_models.INFERENCE]
QUICK = (
    *("conv_net", "tied_weights", "norm_twice", "views", "attention", "own_loss", "nmt"),
    *("decaying_weight", "weighted_loss", "rnnlm", "separate_moe", "bert", "t5", "mixtral"),
)
DOUBLE = ("inception", "nasnet")
"""Batch norm over two tiny images magnifies what is rounded."""


@pytest.fixture
def device() -> Iterator[torch.device]:
    with vdev() as found:
        yield found


@functools.cache
def extracted(name: str) -> Extraction:
    torch.manual_seed(0)
    step = STEPS[name]()
    if name in DOUBLE:
        images, *rest = step.inputs
        step = Step.of(step.model.double(), (images.double(), *rest), step.loss)
    return extract(step)


def fresh(name: str) -> Extraction:
    """An extraction with a model of its own, for tests that change it."""
    return copied(extracted(name))


def copied(extraction: Extraction) -> Extraction:
    memo: dict[int, Any] = {id(extraction.forward): extraction.forward}
    step = copy.deepcopy(extraction.step, memo)
    return Extraction(
        step,
        extraction.graph,
        extraction.program,
        extraction.outputs,
        extraction.forward_of,
        extraction.forward,
        extraction.call_of,
    )


def on_cpu(found: Any) -> Any:
    return {name: tensor.detach().cpu() for name, tensor in found.items()}


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def assert_trains_alike(extraction: Extraction, placed: PlacedModule, steps: int = 3) -> None:
    """Loss, gradients, parameters and buffers of some steps of SGD are those of the model."""
    plain = copy.deepcopy(extraction.step)
    plain_sgd = torch.optim.SGD(plain.model.parameters(), lr=0.01)
    placed_sgd = torch.optim.SGD(placed.parameters(), lr=0.01)
    step = extraction.step
    for number in range(steps):
        plain_sgd.zero_grad()
        placed_sgd.zero_grad()
        torch.manual_seed(number)
        expected = forward(plain)
        expected.backward()
        torch.manual_seed(number)
        loss = placed(*step.inputs, **step.keywords)
        loss.backward()
        torch.testing.assert_close(loss.cpu(), expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(
            on_cpu(gradients(placed)), on_cpu(gradients(plain.model)), rtol=0, atol=1e-6
        )
        plain_sgd.step()
        placed_sgd.step()
    torch.testing.assert_close(
        on_cpu(placed.state_dict()), on_cpu(plain.model.state_dict()), rtol=0, atol=1e-6
    )


def seeds(names: tuple[str, ...] | list[str]) -> list[Any]:
    """Two seeds of the quick ones, twenty of all that are slow."""
    return [
        pytest.param(name, seed, marks=() if name in QUICK and seed < 2 else pytest.mark.slow)
        for name in names
        for seed in range(20)
    ]


# --- any placement computes what the model computes


@pytest.mark.parametrize(("name", "seed"), seeds(TRAINING))
def test_training_on_two_devices_is_that_of_the_model(
    name: str, seed: int, device: torch.device
) -> None:
    original = extracted(name)
    extraction = fresh(name)
    devices = random_devices(extraction, ["cpu", device], seed)
    order = random_order(extraction, seed) if seed % 2 else ()
    placed = PlacedModule(extraction, devices, order)
    TRANSFERS.clear()
    assert_trains_alike(original, placed, steps=3 if name in QUICK else 1)
    assert TRANSFERS


@pytest.mark.parametrize("name", INFERENCE)
@pytest.mark.parametrize("seed", range(3))
def test_inference_on_two_devices_is_that_of_the_model(
    name: str, seed: int, device: torch.device
) -> None:
    extraction = fresh(name)
    expected = forward(copy.deepcopy(extraction.step))
    placed = PlacedModule(extraction, random_devices(extraction, ["cpu", device], seed))
    TRANSFERS.clear()
    found = placed(*extraction.step.step_inputs, **extraction.step.keywords)
    on_one = torch.utils._pytree.tree_map_only(Tensor, lambda t: t.detach().cpu(), found)
    torch.testing.assert_close(on_one, expected, rtol=0, atol=1e-6)
    assert TRANSFERS


# --- what is written in place


def written_through_views(writes: list[tuple[str, int]]) -> Step:
    """Writes and reads of one tensor, through views of it; results are added up."""

    def forward(m: nn.Module, x: Tensor) -> Any:
        held = m.get_submodule("linear")(x) * 2
        rows, total = held.t(), x.sum()
        for kind, at in writes:
            if kind == "fill":
                held[at].fill_(0.5)
            elif kind == "add":
                rows[at].add_(x.sum() * 0.1)
            elif kind == "copy":
                held[:, at : at + 1].copy_(x[:, :1])
            elif kind == "read":
                total = total + held.clone().exp().mean() * (at + 1)
            else:
                total = total + rows[at].clone().sin().sum()
        return total + held.mean()

    torch.manual_seed(0)
    return Step.of(Plain(forward, linear=nn.Linear(3, 3)), (torch.randn(3, 3),))


WRITES = st.tuples(st.sampled_from(("fill", "add", "copy", "read", "read part")), st.integers(0, 2))


@settings(max_examples=12, deadline=None)
@given(st.lists(WRITES, min_size=2, max_size=8), st.integers(0, 99))
def test_what_is_written_through_views_is_read_as_it_was(
    writes: list[tuple[str, int]], seed: int
) -> None:
    extraction = extract(written_through_views(writes))
    with vdev() as device:
        expected = copied(extraction)
        devices = random_devices(extraction, ["cpu", device], seed)
        placed = PlacedModule(extraction, devices, random_order(extraction, seed))
        TRANSFERS.clear()
        assert_trains_alike(expected, placed, steps=1)
        assert TRANSFERS


def test_a_copy_from_before_a_write_is_not_used_after_it(device: torch.device) -> None:
    extraction = extract(written_through_views([("read", 0), ("fill", 1), ("read", 0)]))
    devices: dict[str, torch.device | str] = {
        call.key: device if call.op == "clone" else "cpu"
        for call in extraction.forward.placed_calls
    }
    expected = copied(extraction)
    placed = PlacedModule(extraction, devices)
    assert placed.transfers == 2 + 2, "the tensor in both states, and what came of them"
    assert_trains_alike(expected, placed, steps=1)


def test_calls_that_write_one_tensor_may_not_be_apart(device: torch.device) -> None:
    extraction = fresh("norm_twice")
    devices: dict[str, torch.device | str] = {
        call.key: device if call.key == "norm@1:batch_norm" else "cpu"
        for call in extraction.forward.placed_calls
    }
    with pytest.raises(ValueError, match="norm:batch_norm, norm@1:batch_norm write or view one"):
        PlacedModule(extraction, devices)
