"""Placed modules on two torch devices: what they compute is what the model computes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import tiny_models
import tiny_reference_models
import tiny_transformers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_devices import random_devices, random_order
from tiny_models import Plain, forward, state_of
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
    *("decaying_weight", "weighted_loss", "bert", "mixtral"),
)
DOUBLE = ("inception", "nasnet")
"""Batch norm over two tiny images magnifies what is rounded."""


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="vdev would take CUDA's place")


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
    return replace(extraction, step=step)


def on(
    extraction: Extraction, device: torch.device, chosen: Callable[[str], bool]
) -> dict[str, torch.device | str]:
    """Calls with a chosen key on the device, others on the CPU."""
    calls = extraction.forward.placed_calls
    return {call.key: device if chosen(call.key) else "cpu" for call in calls}


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
    model = Plain(forward, linear=nn.Linear(3, 3)).double()
    return Step.of(model, (torch.randn(3, 3).double(),))


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
    devices = on(extraction, device, lambda key: key == "norm@1:batch_norm")
    with pytest.raises(ValueError, match="norm:batch_norm, norm@1:batch_norm write or view one"):
        PlacedModule(extraction, devices)


# --- what is sent


def fork() -> Step:
    def forward(m: nn.Module, x: Tensor) -> Any:
        hidden = m.get_submodule("first")(x)
        return hidden.sin().sum() + hidden.cos().sum() + (hidden.t() * 2).sum()

    torch.manual_seed(0)
    return Step.of(Plain(forward, first=nn.Linear(4, 4)), (torch.randn(3, 4),))


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
    assert_trains_alike(expected, placed, steps=1)


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


def test_intermediate_tensors_are_let_go_of_after_their_last_use(device: torch.device) -> None:
    model = Plain(lambda m, x: m.linear(m.linear(m.linear(x))).sin(), linear=nn.Linear(4, 4))
    extraction = extract(Step.of(model, torch.randn(3, 4), training=False))
    placed = PlacedModule(extraction, random_devices(extraction, ["cpu", device], 0))
    lines = [line.strip() for line in placed.source.splitlines()[1:]]
    made = {line.partition(" = ")[0] for line in lines if " = " in line}
    ended = {name for line in lines if line.startswith("del ") for name in line[4:].split(", ")}
    assert len(made - ended) == 1, "only the result is left"
    assert made >= ended


# --- the model stays the model


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


def test_a_step_of_adam_with_clipped_gradients_is_that_of_the_model(device: torch.device) -> None:
    extraction = fresh("bert")
    plain = copy.deepcopy(extraction.step)
    placed = PlacedModule(extraction, random_devices(extraction, ["cpu", device], 2))
    norms = []
    runs: list[tuple[nn.Module, Callable[[], Tensor]]] = [
        (plain.model, lambda: forward(plain)),
        (placed, lambda: placed(*plain.inputs, **plain.keywords)),
    ]
    for module, run in runs:
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        for seed in range(2):
            module.zero_grad()
            torch.manual_seed(seed)
            torch.autograd.backward(run())
            norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.1)))
            optimizer.step()
    assert norms[:2] == pytest.approx(norms[2:], abs=1e-5)
    torch.testing.assert_close(
        on_cpu(placed.state_dict()), on_cpu(plain.model.state_dict()), rtol=0, atol=1e-5
    )


def test_autocast_around_it_holds_inside() -> None:
    extraction = fresh("attention")
    placed = PlacedModule(extraction, on(extraction, torch.device("cpu"), lambda key: True))
    expected = forward(replace(copy.deepcopy(extraction.step), dtype="bf16"))
    with torch.autocast("cpu", torch.bfloat16):
        found = placed(*extraction.step.inputs)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    exact = placed(*extraction.step.inputs)
    assert not torch.equal(found, exact)


def test_autocast_within_the_model_stays() -> None:
    def forward_(m: Any, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = m.second(m.first(x))
        return hidden.float().sum()

    layers = {"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)}
    extraction = extract(Step.of(Plain(forward_, **layers), (torch.randn(3, 4),)))
    plain = copy.deepcopy(extraction.step)
    placed = PlacedModule(extraction, on(extraction, torch.device("cpu"), lambda key: True))
    assert torch.equal(placed(*plain.inputs), forward(plain))


def test_the_mode_is_that_of_the_step() -> None:
    extraction = fresh("frozen_norm")
    placed = PlacedModule(extraction, on(extraction, torch.device("cpu"), lambda key: True))
    assert placed.training
    assert placed.train() is placed
    assert not placed.get_submodule("1").training, "frozen modules stay so"
    with pytest.raises(RuntimeError, match="in training mode was placed"):
        placed.eval()


# --- placing it again


def test_it_can_be_placed_again_and_again(device: torch.device) -> None:
    original, extraction = extracted("norm_twice"), fresh("norm_twice")
    placed = PlacedModule(extraction, on(extraction, device, lambda key: True))
    for seed in range(3):
        placed.place(
            random_devices(extraction, ["cpu", device], seed), random_order(extraction, seed)
        )
    assert_trains_alike(original, placed)


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


def test_state_that_was_replaced_elsewhere_is_taken_home(device: torch.device) -> None:
    original, extraction = extracted("conv_net"), fresh("conv_net")
    placed = PlacedModule(
        extraction, random_devices(extraction, ["cpu", device], 4), keep_copies=True
    )
    state = {name: own.detach().cpu().clone() for name, own in placed.state_dict().items()}
    extraction.step.model.load_state_dict(state, assign=True)
    assert_trains_alike(original, placed, steps=1)


# --- the order of launches


def branches() -> Step:
    heads = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}
    model = Plain(lambda m, x: m.a(x).sin().sum() + m.b(x).cos().sum(), **heads)
    return Step.of(model, (torch.randn(3, 4),))


def lines_of(placed: PlacedModule, *names: str) -> list[int]:
    """The line in which each call of an operator starts."""
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


# --- what is refused


def test_placements_that_do_not_fit_are_refused(device: torch.device) -> None:
    extraction = fresh("conv_net")
    whole = on(extraction, device, lambda key: False)
    placed = PlacedModule(extraction, whole)
    with pytest.raises(ValueError, match="1 calls have no device, such as '0:conv2d'"):
        placed.place({key: "cpu" for key in whole if key != "0:conv2d"})
    with pytest.raises(ValueError, match="'9:conv2d' has a device, but is no call"):
        placed.place({**whole, "9:conv2d": "cpu"})
    with pytest.raises(ValueError, match="the order names '9:conv2d', which is no call"):
        placed.place(whole, ["9:conv2d"])
    with pytest.raises(ValueError, match="device cuda:99 cannot be used: "):
        placed.place({**whole, "0:conv2d": "cuda:99"})
    with pytest.raises(ValueError, match=r"input \[0\] of the batch is .* shape \(1, 3, 16, 16\)"):
        placed(torch.zeros(1, 3, 16, 16), extraction.step.inputs[1])
    placed(*extraction.step.inputs)


def test_a_model_without_memory_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    extraction = extract(Step.of(model, torch.zeros(2, 3), training=False))
    with pytest.raises(ValueError, match="weight is on the meta device"):
        PlacedModule(extraction, on(extraction, torch.device("cpu"), lambda key: True))


def test_weights_that_are_tied_no_longer_are_refused() -> None:
    extraction = fresh("tied_weights")
    placed = PlacedModule(extraction, on(extraction, torch.device("cpu"), lambda key: True))
    head = placed.get_submodule("head")
    head.weight = nn.Parameter(head.get_parameter("weight").detach().clone())
    with pytest.raises(ValueError, match="is tied no longer"):
        placed(*extraction.step.inputs)


def test_what_fails_on_a_device_names_the_call(device: torch.device) -> None:
    extraction = fresh("dlrm")
    placed = PlacedModule(extraction, on(extraction, device, lambda key: "bottom" in key))
    dense, rows, target = extraction.step.inputs
    with pytest.raises((RuntimeError, IndexError)) as failure:
        placed(dense, rows + 1000, target)
    assert "embedding" in str(getattr(failure.value, "__notes__", failure.value))
