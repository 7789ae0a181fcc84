"""Calls of placed modules on two torch devices: writes, transfers, state and autocast."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from envs.executors.torch.placed_module import PlacedModule
from graphs.extract import Extraction, Workload, extract
from tests.helpers.extracted_steps import copied, fresh, on
from tests.helpers.placed_steps import random_devices, random_order
from tests.helpers.second_devices import FAKE, VDEV, opened_device
from tests.helpers.tiny_models import Plain, forward, state_of
from tests.helpers.trained_alike import assert_trains_alike, on_cpu
from tests.helpers.vdev import TRANSFERS

# --- in-place writes


def written_through_views(writes: Sequence[tuple[str, int]]) -> Workload:
    """Return a step that writes and reads one tensor through views and sums the results."""

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
    model = Plain(forward, linear=nn.Linear(3, 3)).double()
    return Workload.of(model, (torch.randn(3, 3).double(),))


@functools.lru_cache(100)
def extracted(writes: tuple[tuple[str, int], ...]) -> Extraction:
    return extract(written_through_views(writes))


WRITES = st.tuples(st.sampled_from(("fill", "add", "copy", "read", "read part")), st.integers(0, 2))


@pytest.mark.slow
@settings(max_examples=8)
@given(st.lists(WRITES, min_size=2, max_size=8), st.integers(0, 99))
@pytest.mark.parametrize("kind", [VDEV, FAKE])
def test_what_is_written_through_views_is_read_as_it_was(
    kind: str, writes: list[tuple[str, int]], seed: int
) -> None:
    extraction = copied(extracted(tuple(writes)))
    with opened_device(kind) as device:
        expected = copied(extraction)
        devices = random_devices(extraction, ["cpu", device], seed)
        placed = PlacedModule(extraction, devices, random_order(extraction, seed))
        TRANSFERS.clear()
        assert_trains_alike(expected.step, placed, steps=1)
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
    assert_trains_alike(expected.step, placed, steps=1)


def test_calls_that_write_one_tensor_may_not_be_apart(device: torch.device) -> None:
    extraction = fresh("norm_twice")
    devices = on(extraction, device, lambda key: key == "norm@1:batch_norm")
    with pytest.raises(ValueError, match="norm:batch_norm, norm@1:batch_norm write or view one"):
        PlacedModule(extraction, devices)


# --- transfers


def fork() -> Workload:
    def forward(m: nn.Module, x: Tensor) -> Any:
        hidden = m.get_submodule("first")(x)
        return hidden.sin().sum() + hidden.cos().sum() + (hidden.t() * 2).sum()

    torch.manual_seed(0)
    return Workload.of(Plain(forward, first=nn.Linear(4, 4)), (torch.randn(3, 4),))


def test_a_tensor_is_sent_once_to_a_device_and_its_view_is_made_there(device: torch.device) -> None:
    extraction = extract(fork())
    expected = copied(extraction)
    readers = (":sin", ":cos", ":mul", ":sum", ":add")
    placed = PlacedModule(extraction, on(extraction, device, lambda key: key.startswith(readers)))
    assert placed.transfers == 1
    placed(*extraction.step.inputs).backward()
    hidden_bytes = 3 * 4 * 4
    cpu = torch.device("cpu")
    sent = [row for row in TRANSFERS if row[2] == hidden_bytes]
    assert sent == [(cpu, device, hidden_bytes), (device, cpu, hidden_bytes)], "and its gradient"
    assert_trains_alike(expected.step, placed, steps=1)


@pytest.mark.slow_repeats
def test_the_result_of_a_free_first_call_is_where_its_input_is(device: torch.device) -> None:
    def transposed_and_used(m: nn.Module, x: Tensor) -> Any:
        weight = m.get_submodule("linear").get_parameter("weight").t()
        return weight, x.sin(), x @ weight

    model = Plain(transposed_and_used, linear=nn.Linear(4, 4))
    extraction = extract(Workload.of(model, torch.randn(3, 4), training=False))
    assert extraction.forward.calls[0].is_free
    placed = PlacedModule(extraction, on(extraction, device, lambda key: key == ":matmul"))
    weight, _, product = placed(*extraction.step.inputs)
    assert weight.device == product.device == device
    assert placed.transfers == 0


def test_inputs_may_be_on_any_device(device: torch.device) -> None:
    extraction = extract(fork())
    placed = PlacedModule(extraction, on(extraction, device, lambda key: True))
    (x,) = extraction.step.inputs
    here = x.to(device)
    TRANSFERS.clear()
    loss = placed(here)
    assert not TRANSFERS
    torch.testing.assert_close(placed(x), loss)
    assert [(torch.device("cpu"), device, x.nbytes)] == TRANSFERS


@pytest.mark.slow_repeats
def test_intermediate_tensors_are_let_go_of_after_their_last_use(device: torch.device) -> None:
    model = Plain(lambda m, x: m.linear(m.linear(m.linear(x))).sin(), linear=nn.Linear(4, 4))
    extraction = extract(Workload.of(model, torch.randn(3, 4), training=False))
    placed = PlacedModule(extraction, random_devices(extraction, ["cpu", device], 0))
    lines = [line.strip() for line in placed.source.splitlines()[1:]]
    made = {line.partition(" = ")[0] for line in lines if " = " in line}
    ended = {name for line in lines if line.startswith("del ") for name in line[4:].split(", ")}
    assert len(made - ended) == 1, "only the result is left"
    assert made >= ended


# --- state of the model


def test_state_keeps_its_names_ties_and_values(device: torch.device) -> None:
    extraction = fresh("tied_weights")
    before = state_of(extraction.step)
    placed = PlacedModule(extraction, random_devices(extraction, ["cpu", device], 1))
    model = extraction.step.model
    assert placed.state_dict().keys() == before.keys() == model.state_dict().keys()
    torch.testing.assert_close(on_cpu(placed.state_dict()), before, rtol=0, atol=0)
    assert placed.get_parameter("head.weight") is placed.get_parameter("embedding.weight")
    assert dict(placed.named_parameters()) == dict(model.named_parameters())
    assert {p.device for p in placed.parameters()} == {torch.device("cpu"), device}
    doubled = {name: 2 * tensor for name, tensor in before.items()}
    placed.load_state_dict(doubled)
    torch.testing.assert_close(on_cpu(model.state_dict()), doubled, rtol=0, atol=0)


def test_parameters_that_stay_on_a_device_stay_the_same_objects() -> None:
    extraction = fresh("conv_net")
    before = dict(extraction.step.model.named_parameters())
    placed = PlacedModule(extraction, on(extraction, torch.device("cpu"), lambda key: True))
    after = dict(placed.named_parameters())
    assert all(after[name] is own for name, own in before.items())


def test_autocast_around_it_holds_inside() -> None:
    extraction = fresh("attention")
    placed = PlacedModule(extraction, on(extraction, torch.device("cpu"), lambda key: True))
    expected = forward(replace(copy.deepcopy(extraction.step), dtype="bf16"))
    with torch.autocast("cpu", torch.bfloat16):
        found = placed(*extraction.step.inputs)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    exact = placed(*extraction.step.inputs)
    assert not torch.equal(found, exact)


def test_autocast_within_the_model_stays() -> None:
    def forward_(m: Any, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = m.second(m.first(x))
        return hidden.float().sum()

    layers = {"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)}
    extraction = extract(Workload.of(Plain(forward_, **layers), (torch.randn(3, 4),)))
    plain = copy.deepcopy(extraction.step)
    placed = PlacedModule(extraction, on(extraction, torch.device("cpu"), lambda key: True))
    assert torch.equal(placed(*plain.inputs), forward(plain))
