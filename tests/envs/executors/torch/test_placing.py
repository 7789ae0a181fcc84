"""Placing modules repeatedly, the order of launches, and refusals."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from envs.executors.state_devices import State, StateDevices
from envs.executors.torch.placed_module import PlacedModule
from graphs.extract import Workload, extract
from tests.helpers.extracted_steps import extracted, fresh, on
from tests.helpers.tiny_models import Plain
from tests.helpers.trained_alike import assert_trains_alike, gradients, on_cpu

# --- placing again


def test_gradients_move_with_their_parameters(device: torch.device) -> None:
    extraction = fresh("conv_net")
    placed = PlacedModule(extraction, on(extraction, device, lambda key: False))
    placed(*extraction.step.inputs).backward()
    before = {name: own.clone() for name, own in gradients(placed).items()}
    placed.place(on(extraction, device, lambda key: True))
    assert {own.device for own in gradients(placed).values()} == {device}
    torch.testing.assert_close(on_cpu(gradients(placed)), before, rtol=0, atol=0)


def test_a_device_without_room_leaves_the_old_placement(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, extraction = extracted("attention"), fresh("attention")
    placed = PlacedModule(extraction, on(extraction, device, lambda key: False))
    move = StateDevices._move
    moved: list[torch.device] = []

    def cramped(
        devices: StateDevices, state: State, tensor: torch.Tensor, home: torch.device
    ) -> torch.Tensor:
        moved.append(home)
        if len(moved) == 3:
            raise torch.OutOfMemoryError("Tried to allocate 512.00 MiB")
        return move(devices, state, tensor, home)

    monkeypatch.setattr(StateDevices, "_move", cramped)
    with pytest.raises(torch.OutOfMemoryError):
        placed.place(on(extraction, device, lambda key: True))
    placed(*extraction.step.inputs)
    assert {parameter.device.type for parameter in placed.parameters()} == {"cpu"}
    assert_trains_alike(original.step, placed)


# --- the order of launches


def branches() -> Workload:
    heads = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}
    model = Plain(lambda m, x: m.a(x).sin().sum() + m.b(x).cos().sum(), **heads)
    return Workload.of(model, (torch.randn(3, 4),))


def lines_of(placed: PlacedModule, *names: str) -> list[int]:
    """Return the line in which each call of an operator starts."""
    program = placed._program
    calls = {call.op: f"= f{i}(" for i, call in enumerate(program.calls)}
    lines = placed.source.splitlines()
    return [next(i for i, line in enumerate(lines) if calls[name] in line) for name in names]


@pytest.mark.slow_repeats
def test_work_for_accelerators_is_launched_before_the_cpu_starts(device: torch.device) -> None:
    extraction = extract(branches())
    placed = PlacedModule(
        extraction, on(extraction, device, lambda key: key.startswith(("b:", ":cos")))
    )
    cos, sin = lines_of(placed, "cos", "sin")
    assert cos < sin
    order = [call.key for call in extraction.forward.placed_calls]
    placed.place(on(extraction, device, lambda key: key.startswith(("b:", ":cos"))), order)
    cos, sin = lines_of(placed, "cos", "sin")
    assert sin < cos, "a given order goes first"


# --- refusals


def test_placements_that_do_not_fit_are_refused(device: torch.device) -> None:
    extraction = fresh("conv_net")
    whole = on(extraction, device, lambda key: False)
    placed = PlacedModule(extraction, whole)
    with pytest.raises(ValueError, match=r"1 calls .* '0:conv2d'"):
        placed.place({key: "cpu" for key in whole if key != "0:conv2d"})
    with pytest.raises(ValueError, match="'9:conv2d'"):
        placed.place({**whole, "9:conv2d": "cpu"})
    with pytest.raises(ValueError, match="the order names '9:conv2d'"):
        placed.place(whole, ["9:conv2d"])
    with pytest.raises(ValueError, match="cuda:99"):
        placed.place({**whole, "0:conv2d": "cuda:99"})
    placed(*extraction.step.inputs)


def test_a_model_without_memory_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    extraction = extract(Workload.of(model, torch.zeros(2, 3), training=False))
    with pytest.raises(ValueError, match="weight is on the meta device"):
        PlacedModule(extraction, on(extraction, torch.device("cpu"), lambda key: True))
