"""Placing modules repeatedly, the order of launches, and refusals."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from envs.executors.torch.placed_module import PlacedModule
from graphs.extract import Workload, extract
from tests.helpers.extracted_steps import fresh, on
from tests.helpers.tiny_models import Plain
from tests.helpers.trained_alike import gradients, on_cpu

torch.set_num_threads(1)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="vdev would take CUDA's place")


# --- placing again


def test_gradients_move_with_their_parameters(device: torch.device) -> None:
    extraction = fresh("conv_net")
    placed = PlacedModule(extraction, on(extraction, device, lambda key: False))
    placed(*extraction.step.inputs).backward()
    before = {name: own.clone() for name, own in gradients(placed).items()}
    placed.place(on(extraction, device, lambda key: True))
    assert {own.device for own in gradients(placed).values()} == {device}
    torch.testing.assert_close(on_cpu(gradients(placed)), before, rtol=0, atol=0)


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
