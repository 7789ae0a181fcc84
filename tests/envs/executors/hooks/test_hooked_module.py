"""Models that run their own code with hooks: data-dependent code, writes, and their lifetime."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from envs.executors.hooks.hooked_module import HookedModule
from graphs.extract import Workload, extract
from tests.helpers import tiny_models
from tests.helpers.extracted_steps import made, placed_at, two_linear
from tests.helpers.placed_steps import by_modules
from tests.helpers.second_devices import VDEV, opened_device
from tests.helpers.tiny_models import Plain, forward
from tests.helpers.trained_alike import assert_trains_alike

# --- what the model does depends on its data


class Until(nn.Module):
    """Grows its input until it is large enough."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.grow = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.last = nn.Linear(4, 3)
        self.taken = 0

    def forward(self, x: Tensor) -> Tensor:
        x, self.taken = self.first(x), 0
        while x.norm() < 10:
            x = 1.5 * x + self.grow(x)
            self.taken += 1
        found: Tensor = self.last(x)
        return found


@pytest.mark.slow_repeats
@pytest.mark.parametrize("seed", range(2))
def test_what_depends_on_the_data_is_trained_on_any_data(seed: int, device: torch.device) -> None:
    torch.manual_seed(seed)
    step = Workload.of(Until(), (torch.randn(5, 4), torch.randn(5, 3)), tiny_models.squared)
    extraction = extract(copy.deepcopy(step), "modules")
    placed = by_modules(extraction, ["cpu", device], seed)
    paths = set()
    for scale in (1.0, 0.05, 8.0):
        inputs = (scale * torch.randn(7, 4), torch.randn(7, 3))  # also of another shape
        other = Workload.of(copy.deepcopy(step.model), inputs, step.loss)
        other.model.load_state_dict(placed.state_dict())
        assert_trains_alike(other, placed)
        paths.add(extraction.step.model.taken)
    assert len(paths) > 1


# --- tensors on different devices


class Doubled(nn.Module):
    """In-place operation."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


def written_by_a_module(m: Any, x: Tensor) -> Tensor:
    hidden = m.first(x) * 3
    m.doubled(hidden)
    m.doubled(hidden[:2]).add_(1)
    found: Tensor = m.second(hidden) + hidden
    return found


def read_from_a_module(m: Any, x: Tensor) -> Tensor:
    found: Tensor = nn.functional.linear(m.first(x), m.second.weight, bias=m.first.bias)
    return found


def assigned_in_parts(m: Any, x: Tensor) -> Tensor:
    out = torch.empty(6, 4)
    out[:3] = m.first(x)
    out[3:].copy_(m.second(x))
    out += torch.cat([m.second(x), m.first(x)])
    return out[:3] * out[3:]


@pytest.mark.slow_repeats
@pytest.mark.parametrize("where", [0, 1, 2, 4, 6])
@pytest.mark.parametrize("function", [written_by_a_module, read_from_a_module, assigned_in_parts])
def test_what_a_models_code_brings_together_meets_on_one_device(
    function: Any, where: int, device: torch.device
) -> None:
    step = two_linear(function, doubled=Doubled())
    paths = ("", "first", "second")
    devices = {path: device if where >> i & 1 else "cpu" for i, path in enumerate(paths)}
    swapped = "cpu" if where & 1 else device
    assert_trains_alike(*placed_at(step, {**devices, "doubled": swapped}))


class Writer(nn.Module):
    """Writes to its inputs or reads them."""

    def __init__(self, kind: str, at: int) -> None:
        super().__init__()
        self.kind, self.at = kind, at
        self.scale = nn.Parameter(torch.tensor(0.5 + at))

    def forward(self, held: Tensor, x: Tensor) -> Tensor:
        if self.kind == "fill":
            return held[self.at].fill_(0.5)
        if self.kind == "add":
            return held.t()[self.at].add_(x.sum() * self.scale)
        if self.kind == "copy":
            return held[:, self.at : self.at + 1].copy_(x[:, :1] * self.scale)
        return held.clone().exp().mean() * self.scale


WRITES = st.tuples(st.sampled_from(("fill", "add", "copy", "read")), st.integers(0, 2))


@pytest.mark.slow
@settings(max_examples=15)
@given(st.lists(WRITES, min_size=1, max_size=6), st.integers(0, 2**9 - 1))
def test_what_modules_write_through_views_is_read_as_it_was(
    writes: list[tuple[str, int]], where: int
) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        held = m.linear(x) * 2
        total, rows = x.sum(), held.t()
        for number, (kind, _) in enumerate(writes):
            found = m.get_submodule(f"part{number}")(held if number % 2 else rows, x)
            total = total + found if kind == "read" else total + held.clone().sin().sum()
        out: Tensor = total + rows.mean()
        return out

    parts: dict[str, nn.Module] = {f"part{i}": Writer(*write) for i, write in enumerate(writes)}
    torch.manual_seed(0)
    model = Plain(forward, linear=nn.Linear(3, 3), **parts).double()
    step = Workload.of(model, (torch.randn(3, 3).double(),))
    with opened_device(VDEV) as device:  # on fake CUDA no gradient crosses devices by a write
        paths = ["", "linear", *parts]
        chosen = {path: device if where >> i & 1 else "cpu" for i, path in enumerate(paths)}
        assert_trains_alike(*placed_at(step, chosen), rate=1e-3)


def test_tied_parameters_live_with_the_first_module_and_are_sent_to_the_others(
    device: torch.device,
) -> None:
    step = made("tied_weights")
    _, placed = placed_at(step, {"": "cpu", "embedding": device, "head": "cpu"})
    assert_trains_alike(step, placed)
    head, embedding = (placed.get_submodule(name).weight for name in ("head", "embedding"))
    assert head is embedding
    assert embedding.device == device


def test_a_step_in_bf16_is_under_autocast_on_each_of_its_devices(device: torch.device) -> None:
    step = replace(two_linear(lambda m, x: m.second(m.first(x).relu())), dtype="bf16")
    found = {}
    for where in ("cpu", device):
        _, placed = placed_at(step, {"": "cpu", "first": where})
        seen: list[torch.dtype] = []
        first = placed.get_submodule("first")
        hook = first.register_forward_hook(lambda _, given, out, seen=seen: seen.append(out.dtype))
        found[where] = placed(*step.inputs).item()
        hook.remove()
        assert seen == [torch.bfloat16]
    assert found["cpu"] == found[device] == forward(copy.deepcopy(step)).item()


# --- lifetime of a placed model


@pytest.mark.slow_repeats
def test_it_is_placed_anew_and_moves_back_what_was_moved(device: torch.device) -> None:
    step = made("norm_twice")
    _, placed = placed_at(step, {"": "cpu"})
    placements: list[dict[str, torch.device | str]] = [{"": device}, {"": "cpu", "norm": device}]
    for devices in placements:
        placed.place(devices)
        assert placed.get_submodule("norm").running_mean.device == device
        placed.load_state_dict(step.model.state_dict())
        assert_trains_alike(step, placed)
    placed.get_submodule("norm").to("cpu")
    placed(*step.inputs)
    placed.load_state_dict(step.model.state_dict())
    assert_trains_alike(step, placed)
    assert placed.get_submodule("norm").running_mean.device == device


def test_a_direct_call_of_the_model_runs_placed(device: torch.device) -> None:
    extraction = extract(made("conv_net"), "modules")
    with HookedModule(extraction, {"": device}):
        assert extraction.step.model(*extraction.step.model_inputs).device == device


def test_modules_that_are_called_in_threads_run_on_their_devices(device: torch.device) -> None:
    def both(m: Any, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(lambda name: m.get_submodule(name)(x), ("first", "second")))
        out: Tensor = found[0].cpu() * found[1].cpu()
        return out

    step = two_linear(both)
    _, placed = placed_at(step, {"": "cpu", "second": "cpu"})
    assert_trains_alike(step, placed)


def test_ctrl_c_in_the_model_leaves_nothing_behind(device: torch.device) -> None:
    pressed: list[bool] = []

    def stopped(m: Any, x: Tensor) -> Tensor:
        if pressed:
            pressed.clear()
            raise KeyboardInterrupt
        out: Tensor = x * 2
        return out

    step = two_linear(lambda m, x: m.second(m.inner(m.first(x))), inner=Plain(stopped))
    _, placed = placed_at(step, {"": "cpu", "first": device})
    pressed.append(True)
    with pytest.raises(KeyboardInterrupt):
        placed(*step.inputs)
    with pytest.raises(RuntimeError, match=r"(one|same) device"):
        torch.ones(2) + torch.ones(2, device=device)
    assert_trains_alike(step, placed)


def test_modules_and_devices_that_are_not_there_are_named(device: torch.device) -> None:
    step = two_linear(lambda m, x: m.second(m.first(x)))
    _, placed = placed_at(step, {"": "cpu", "first": device})
    refused: tuple[tuple[dict[str, str], str], ...] = (
        ({"": "cpu", "frist": "cpu"}, "frist"),
        ({"first": "nowhere:0"}, "nowhere:0"),
        ({}, "no module"),
    )
    for devices, named in refused:
        with pytest.raises(ValueError, match=named):
            placed.place(devices)
        assert placed.get_submodule("first").weight.device == device
    assert_trains_alike(step, placed)


def test_modules_on_two_devices_share_no_buffer(device: torch.device) -> None:
    norm, other = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    other.running_mean = norm.running_mean
    step = two_linear(lambda m, x: m.other(m.norm(m.first(x))), norm=norm, other=other)
    with pytest.raises(ValueError, match=r"norm\.running_mean"):
        placed_at(step, {"": "cpu", "other": device})
