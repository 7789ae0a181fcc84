"""Placing modules repeatedly, the order of launches, and refusals."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from envs.executors.torch.placed_module import PlacedModule
from graphs.extract import Workload, extract
from graphs.optimizer import Optimizer
from tests.helpers.extracted_steps import fresh, on
from tests.helpers.tiny_models import Plain, forward
from tests.helpers.torch_optimizers import torch_optimizer, with_optimizer
from tests.helpers.trained_alike import gradients, on_cpu
from tests.helpers.vdev import TRANSFERS

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


@pytest.mark.parametrize("keep_copies", [True, False])
def test_with_copies_kept_weights_go_to_a_device_once(
    keep_copies: bool, device: torch.device
) -> None:
    extraction = fresh("conv_net")
    here = on(extraction, device, lambda key: False)
    there = on(extraction, device, lambda key: True)
    placed = PlacedModule(extraction, here, keep_copies=keep_copies)
    weights = sum(p.nbytes for p in placed.parameters())
    statistics = sum(b.nbytes for b in placed.buffers())
    TRANSFERS.clear()

    def sent_by(placement: dict[str, torch.device | str]) -> int:
        TRANSFERS.clear()
        placed.place(placement)
        return sum(size for _, _, size in TRANSFERS)

    assert sent_by(here) == 0
    assert sent_by(there) == weights + statistics
    assert sent_by(there) == 0
    assert sent_by(here) == statistics + (0 if keep_copies else weights)
    assert sent_by(there) == statistics + (0 if keep_copies else weights)
    with torch.no_grad():
        for parameter in placed.parameters():
            parameter.mul_(2)
    doubled = on_cpu(placed.state_dict())
    assert sent_by(here) == weights + statistics, "what has changed is sent"
    torch.testing.assert_close(on_cpu(placed.state_dict()), doubled, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_copies_from_before_updates_of_the_step_are_not_used(
    kind: str, device: torch.device
) -> None:
    step = with_optimizer(fresh("conv_net").step, kind, learning_rate=0.1)
    plain = copy.deepcopy(step)
    extraction = extract(step)
    placements = [on(extraction, device, lambda key, there=there: there) for there in (False, True)]  # type: ignore[misc]  # mypy takes no default there
    placed = PlacedModule(extraction, placements[0], keep_copies=True)
    optimizer = torch_optimizer(plain.model, Optimizer(kind=kind, learning_rate=0.1))
    for number in range(4):
        placed.place(placements[number % 2])
        placed.place(placements[1 - number % 2])
        optimizer.zero_grad()
        torch.manual_seed(number)
        expected = forward(plain)
        expected.backward()
        optimizer.step()
        torch.manual_seed(number)
        torch.testing.assert_close(placed.step(*plain.inputs).cpu(), expected.detach())
    torch.testing.assert_close(on_cpu(placed.state_dict()), on_cpu(plain.model.state_dict()))


@pytest.mark.parametrize("moved_between", [True, False])
def test_copies_from_before_a_fused_optimizer_are_not_used(
    moved_between: bool, device: torch.device
) -> None:
    extraction = fresh("conv_net")
    here = on(extraction, device, lambda key: False)
    there = on(extraction, device, lambda key: True)
    placed = PlacedModule(extraction, here, keep_copies=True)
    placed.place(there)
    if moved_between:
        placed(*extraction.step.inputs).backward()
        placed.place(here)
    else:
        placed.place(here)
        placed(*extraction.step.inputs).backward()
    before = on_cpu(placed.state_dict())["0.weight"].clone()
    torch.optim.SGD(placed.parameters(), lr=0.5, fused=True).step()
    trained = {name: own.clone() for name, own in on_cpu(placed.state_dict()).items()}
    assert not torch.equal(trained["0.weight"], before)
    placed.place(there)
    torch.testing.assert_close(on_cpu(placed.state_dict()), trained, rtol=0, atol=0)


def test_copies_of_state_that_was_replaced_are_not_used(device: torch.device) -> None:
    extraction = fresh("conv_net")
    placements = [on(extraction, device, lambda key, there=there: there) for there in (False, True)]  # type: ignore[misc]  # mypy takes no default there
    placed = PlacedModule(extraction, placements[0], keep_copies=True)
    placed.place(placements[1])
    doubled = {name: 2 * own.detach().cpu() for name, own in placed.state_dict().items()}
    extraction.step.model.load_state_dict(
        {name: own.to(device) for name, own in doubled.items()}, assign=True
    )
    for placement in placements:
        placed.place(placement)
        torch.testing.assert_close(on_cpu(placed.state_dict()), doubled, rtol=0, atol=0)


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
