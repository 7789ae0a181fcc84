"""What overlapping copies must keep right, as scenarios on two fake CUDA devices and the host.

Each takes the seed of the order in which streams run, and fails if a result is wrong. They are
tests, and they are what the check of removed waits runs.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from envs.executors.torch import streams
from envs.executors.torch.placed_module import PlacedModule
from envs.executors.torch.staging import HostSender
from envs.executors.torch.streams import arrived, sending
from envs.measured import TimedStep
from envs.torch_runtime import executor
from graphs.extract import Extraction, Workload, extract
from graphs.extract.placeable import call_graph
from placer.parallel.buckets import filled_buckets
from tests.fake_cuda import fake_cuda
from tests.helpers.clusters import equal_costs
from tests.helpers.extracted_steps import copied, fresh
from tests.helpers.on_torch_devices import alternating, everywhere
from tests.helpers.placed_steps import random_devices, random_order
from tests.helpers.tiny_models import Plain, forward
from tests.helpers.trained_alike import assert_trains_alike

CPU: Final = torch.device("cpu")
FIRST, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)
WAYS: Final = {
    "into": (CPU, FIRST),
    "out": (FIRST, CPU),
    "across": (FIRST, OTHER),
}
SIZE: Final = 64
MODELS: Final = ("conv_net", "tied_weights", "norm_twice", "views", "attention")


def made_on(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a tensor that needs a gradient, and one that is computed from it."""
    leaf = torch.arange(float(SIZE)).to(device).requires_grad_()
    return leaf, (leaf * 2).sin() + 1


def expected_there() -> Tensor:
    return (torch.arange(float(SIZE)) * 2).sin() + 1


def busy(device: torch.device) -> None:
    """Let memory that is free on a device be used by its stream."""
    if device != CPU:
        for _ in range(3):
            torch.full((SIZE,), 7.0, device=device).mul_(2)


def assert_equal(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.detach().cpu(), expected, rtol=1e-6, atol=1e-6)


# --- single copies


def sent_without_gradient(way: str, seed: int) -> None:
    """The source is gone at once, and the copy after its reader was launched."""
    source, destination = WAYS[way]
    with fake_cuda(2, seed=seed), torch.no_grad():
        _, made = made_on(source)
        sent = sending(made, destination)
        del made
        busy(source)
        busy(destination)
        there = arrived(sent)
        assert there.device == destination
        del sent
        read = there * 3
        del there
        busy(destination)
        assert_equal(read, expected_there() * 3)


def sent_twice(way: str, seed: int) -> None:
    """Copies and readers of a second tensor meet those of the first, in memory that is free."""
    source, destination = WAYS[way]
    with fake_cuda(2, seed=seed), torch.no_grad():
        results = []
        for factor in range(1, 6):
            _, made = made_on(source)
            sent = sending(made * factor, destination)
            del made
            busy(source)
            there = arrived(sent)
            del sent
            results.append(there + 1)
            del there
            busy(destination)
        for factor, result in enumerate(results, start=1):
            assert_equal(result, expected_there() * factor + 1)


def sent_with_gradient(way: str, seed: int) -> None:
    source, destination = WAYS[way]
    with fake_cuda(2, seed=seed):
        for _ in range(2):
            leaf, made = made_on(source)
            sent = sending(made, destination)
            del made
            there = arrived(sent)
            loss = (there * there).sum()
            assert_equal(there, expected_there())
            del sent, there
            torch.autograd.backward(loss)
            busy(source)
            assert leaf.grad is not None
            plain = torch.arange(float(SIZE)).requires_grad_()
            torch.autograd.backward((((plain * 2).sin() + 1) ** 2).sum())
            assert plain.grad is not None
            assert_equal(leaf.grad, plain.grad)


def leaves_compute_alone(way: str, seed: int) -> None:
    """What is computed on a device after a copy has begun does not wait for it."""
    source, destination = WAYS[way]
    with fake_cuda(2, seed=0 * seed) as machine, torch.no_grad():
        _, made = made_on(source)
        sent = sending(made, destination)
        side = [stream for stream in machine.queues.streams if stream.number]
        before = [stream.done for stream in side]
        for device in (source, destination):
            if device != CPU:
                busy(device)
                torch.cuda.current_stream(device).synchronize()
        waits = any(stream.pending for stream in side)
        assert waits or not machine.thread.is_idle, "the copy is still to come"
        assert [stream.done for stream in side] == before
        assert_equal(arrived(sent), expected_there())


def sent_through_little_memory(dense: bool, small: bool, seed: int) -> None:
    """Buffers are written again and again, and tensors are larger than one or than a part of it.

    A small tensor may be written at once, a large one when its reader has been launched.
    """
    with fake_cuda(2, seed=seed) as machine, pytest.MonkeyPatch.context() as patch, torch.no_grad():
        sender = HostSender(1 << 10, 64 * SIZE if small else 0, machine.thread)
        patch.setattr(streams, "_HOST_SENDER", sender)
        for size in (SIZE // 8, SIZE, *(() if small else (5 * SIZE, 20 * SIZE))):
            given = torch.arange(2.0 * size).reshape(-1, 8)
            sent = []
            for number, device in enumerate((FIRST, OTHER, FIRST)):
                made = (given + number) if dense else (given + number).t()[::2]
                sent.append((sending(made, device), made, made.clone()))
                if small:
                    made.zero_()
                busy(device)
            for each, made, expected in sent:
                read = arrived(each) + 1
                made.zero_()
                assert_equal(read, expected + 1)


def gradients_that_others_hold(seed: int) -> None:
    """A gradient on its way to a GPU is also that of a tensor of the host, which may add to it."""
    for order in (1, -1):
        with fake_cuda(1, seed=seed):
            leaf, made = made_on(FIRST)
            there = arrived(sending(made, CPU))
            here = torch.ones(SIZE, requires_grad=True)
            total = sum([there, here, here.view(8, -1).view(SIZE)][::order])
            torch.autograd.backward((total * torch.arange(float(SIZE))).sum())
            assert here.grad is not None
            here.grad.add_(5.0)
            assert leaf.grad is not None
            plain = torch.arange(float(SIZE)).requires_grad_()
            torch.autograd.backward((((plain * 2).sin() + 1) * plain.detach()).sum())
            assert plain.grad is not None
            assert_equal(leaf.grad, plain.grad)


def without_autograd_and_with(seed: int) -> None:
    """Send in inference mode and then outside it, and the other way round."""
    with fake_cuda(1, seed=seed):
        for inference in (True, False, True):
            for size in (SIZE // 8, SIZE):
                with torch.inference_mode(inference):
                    given = torch.arange(float(size))
                    assert_equal(arrived(sending(given, FIRST)) + 1, given + 1)


# --- whole steps


def on_a_stream_of_the_caller(overlap: bool, seed: int) -> None:
    """A caller may compute on streams of its own."""
    extraction = fresh("attention")
    step = copy.deepcopy(extraction.step)
    with fake_cuda(2, seed=seed), ExitStack() as current:
        devices = random_devices(extraction, [CPU, FIRST, OTHER], seed)
        placed = PlacedModule(extraction, devices, overlap=overlap)
        for device in (FIRST, OTHER):
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it so
            stream.wait_stream(torch.cuda.current_stream(device))
            current.enter_context(torch.cuda.stream(stream))
        assert_trains_alike(step, placed, steps=2, tolerance=1e-5)


def weights_in_pinned_memory(overlap: bool, seed: int) -> None:
    """An optimizer on the host writes weights that were sent from where they are."""
    extraction = fresh("conv_net")
    step = copy.deepcopy(extraction.step)
    with fake_cuda(2, seed=seed):
        for parameter in extraction.step.model.parameters():
            parameter.data = parameter.detach().pin_memory()
        devices = random_devices(extraction, [CPU, FIRST], 1)
        placed = PlacedModule(extraction, devices, overlap=overlap)
        assert any(parameter.is_pinned() for parameter in placed.parameters())
        assert_trains_alike(step, placed, steps=2, tolerance=1e-5)


def placed_at_random(name: str, overlap: bool, seed: int) -> None:
    """Training of a model with each of its calls anywhere is that of the model."""
    extraction = fresh(name)
    step = copy.deepcopy(extraction.step)
    with fake_cuda(2, seed=seed):
        devices = random_devices(extraction, [CPU, FIRST, OTHER], seed)
        order = random_order(extraction, seed) if seed % 2 else ()
        placed = PlacedModule(extraction, devices, order, overlap=overlap)
        assert placed.transfers > 0
        assert ("sending(" in placed.source) == overlap
        assert_trains_alike(step, placed, steps=2, tolerance=1e-5)


def measured_while_idle(overlap: bool, seed: int) -> None:
    """The executor reads the clock only while no device works."""
    extraction = fresh("conv_net")
    calls = call_graph(extraction)
    ticks = itertools.count()
    with fake_cuda(2, seed=seed) as machine, pytest.MonkeyPatch.context() as patch:

        def idle_clock() -> float:
            assert all(stream.is_idle for stream in machine.queues.streams)
            return float(next(ticks))

        patch.setattr(executor, "time", SimpleNamespace(perf_counter=idle_clock))
        problem = equal_costs(calls.graph)
        placed = executor.TorchExecutor(extraction, calls, problem, overlap=overlap)
        side = torch.cuda.Stream(FIRST)  # type: ignore[no-untyped-call]  # torch leaves it so
        for placement in (everywhere(problem, 0), alternating(problem)):
            step = placed.load(placement)
            for _ in range(2):
                assert isinstance(step, executor.PlacementTurns)
                found = step.run()
                assert isinstance(found, TimedStep), found
                with torch.cuda.stream(side):  # the caller's own work, before the next turn
                    torch.ones(SIZE, device=FIRST).mul_(2)
        placed.close()
        assert next(ticks) > 0


def input_arrives(pinned: bool, seed: int) -> None:
    """Inputs of a placed step may be anywhere, and in page-locked memory."""
    extraction = fresh("attention")
    step = copy.deepcopy(extraction.step)
    expected = forward(step).detach()
    with fake_cuda(2, seed=seed):
        for devices in ([CPU, FIRST], [FIRST, OTHER]):
            placed = PlacedModule(extraction, random_devices(extraction, devices, seed))
            inputs = [
                tensor.pin_memory() if pinned else (tensor * 2).to(FIRST) / 2
                for tensor in step.inputs
            ]
            assert_equal(placed(*inputs), expected)
            for tensor in inputs:
                tensor.zero_()


def written_and_sent_again(m: Any, x: Tensor) -> Tensor:
    held: Tensor = m.linear(x) * 2
    before = held.exp().mean()
    held[0].fill_(0.5)
    return before + held.exp().mean()


@functools.cache
def extracted_write() -> Extraction:
    torch.manual_seed(0)
    model = Plain(written_and_sent_again, linear=nn.Linear(3, 3))
    return extract(Workload.of(model, (torch.randn(3, 3),)))


def written_in_place(overlap: bool, seed: int) -> None:
    """Each reader elsewhere gets what it would have read here, before or after a write."""
    extraction = copied(extracted_write())
    step = copy.deepcopy(extraction.step)
    with fake_cuda(2, seed=seed):
        for home, reader in ((FIRST, OTHER), (FIRST, CPU), (CPU, FIRST)):
            devices: dict[str, torch.device | str] = {
                call.key: reader if call.key.startswith(":exp") else home
                for call in extraction.forward.placed_calls
            }
            placed = PlacedModule(extraction, devices, overlap=overlap)
            assert placed.transfers >= 2
            assert_equal(placed(*step.inputs), forward(copy.deepcopy(step)).detach())


@functools.cache
def extracted_tied() -> Extraction:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[2].weight = model[0].weight  # of which another thread writes what is sent from the host
    return extract(Workload.of(model, torch.randn(3, 6), training=False))


def weights_written_after(overlap: bool, seed: int) -> None:
    """Check that a pass does not see what the caller writes into a weight after it."""
    extraction = copied(extracted_tied())
    step = copy.deepcopy(extraction.step)
    expected = forward(copy.deepcopy(step))
    with fake_cuda(2, seed=seed), torch.no_grad():
        for home, reader in ((FIRST, OTHER), (FIRST, CPU), (CPU, FIRST)):
            devices: dict[str, torch.device | str] = {
                call.key: reader if call.key.startswith("2") else home
                for call in extraction.forward.placed_calls
            }
            placed = PlacedModule(extraction, devices, overlap=overlap)
            assert placed.transfers > 0
            weight = placed.get_parameter("0.weight")
            values = weight.cpu().clone()
            found = placed(*step.inputs)
            weight.zero_()
            assert_equal(found, expected)
            weight.copy_(values)


def reduced_by_another_thread(seed: int) -> None:
    """A reduction waits for gradients that arrived on streams of the caller.

    The thread of autograd for another device may start it, on the default stream.
    """
    with fake_cuda(1, seed=seed):
        weight = nn.Parameter(torch.zeros(SIZE, device=FIRST))
        [bucket] = filled_buckets({"weight": weight}, 1 << 20, 1)
        bucket.adopt_all()
        assert weight.grad is not None
        stream = torch.cuda.Stream(FIRST)  # type: ignore[no-untyped-call]  # torch leaves it so
        stream.wait_stream(torch.cuda.current_stream(FIRST))
        with torch.cuda.stream(stream):
            weight.grad += 3.0
            bucket.arrive(0)
        bucket.await_gradients()
        assert_equal(bucket.buffer().cpu(), torch.full((SIZE,), 3.0))


SCENARIOS: Final[dict[str, Callable[[int], None]]] = {
    "reduced by another thread": reduced_by_another_thread,
    "gradients that others hold": gradients_that_others_hold,
    "without autograd and with": without_autograd_and_with,
    **{
        f"{work.__name__} {way}": partial(work, way)
        for work in (sent_without_gradient, sent_twice, sent_with_gradient, leaves_compute_alone)
        for way in WAYS
    },
    **{
        f"little memory, {'dense' if dense else 'parts'}{', small' * small}": partial(
            sent_through_little_memory, dense, small
        )
        for dense in (True, False)
        for small in (True, False)
    },
    **{f"input pinned {pinned}": partial(input_arrives, pinned) for pinned in (False, True)},
    **{
        f"{work.__name__}{' overlap' * overlap}": partial(work, overlap)
        for work in (
            written_in_place,
            weights_written_after,
            weights_in_pinned_memory,
            on_a_stream_of_the_caller,
        )
        for overlap in (True, False)
    },
    **{
        f"measured{' overlap' * overlap}": partial(measured_while_idle, overlap)
        for overlap in (True, False)
    },
    **{
        f"placed {name}{' overlap' * overlap}": partial(placed_at_random, name, overlap)
        for name in MODELS
        for overlap in (True, False)
    },
}
