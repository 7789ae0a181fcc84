"""Two hundred training steps of a translation model: placed and unplaced losses agree."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from envs.executors.cores.instruction_lists import priority_order
from envs.executors.cores.placed_model import PlacedModel
from envs.executors.torch.placed_module import PlacedModule
from envs.hardware.discover import discover
from graphs.extract import Extraction, Workload, extract
from graphs.models import Nmt, NmtConfig
from graphs.optimizer import Optimizer
from tests.helpers.random_devices import random_devices, random_order
from tests.helpers.tiny_models import Plain, assert_same, forward, state_of
from tests.helpers.tiny_reference_models import words
from tests.helpers.vdev import vdev

torch.set_num_threads(1)

STEPS = 200
VOCABULARY = 17
CORES = sorted(os.sched_getaffinity(0))
Made = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Made] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}

pytestmark = pytest.mark.slow


def batch(number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return three-word sentences to copy: source, target prefix, next words of the target."""
    generator = torch.Generator().manual_seed(number)
    source = torch.randint(1, VOCABULARY, (4, 3), generator=generator)
    begun = torch.cat([torch.zeros_like(source[:, :1]), source[:, :-1]], 1)
    return source, begun, source


def nmt(dropout: float = 0.0) -> Workload:
    torch.manual_seed(0)
    config = NmtConfig(vocabulary=VOCABULARY, hidden=16, layers=2)
    model = Plain(
        lambda m, *tokens: m.drop(m.nmt(*tokens)), nmt=Nmt(config), drop=nn.Dropout(dropout)
    )
    return Workload.of(model, batch(0), words)


def unplaced_losses(step: Workload, make: Made) -> list[float]:
    """Return the losses of 200 steps with an optimizer; changes the step's model."""
    optimizer = make(list(step.model.parameters()))
    losses = []
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = forward(Workload.of(step.model, batch(number), step.loss))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def on_two_cores(extraction: Extraction) -> PlacedModel:
    """Place every op on a random one of two cores, in random order."""
    randomly = random.Random(7)
    count = extraction.program.op_count
    order = priority_order(extraction.program, [randomly.random() for _ in range(count)])
    cluster = discover(f"core:{CORES[0]},core:{CORES[1]}")
    group: dict[Any, int] = {}
    devices = [
        group.setdefault(data["colocate"] or op, randomly.randrange(2))
        for op, data in extraction.graph.nodes(data=True)
    ]
    return PlacedModel(extraction, cluster, devices, order)


needs_two_cores = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


@needs_two_cores
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_on_pinned_workers_losses_and_weights_are_the_same_bit_by_bit(make: Made) -> None:
    step = nmt()
    twin = copy.deepcopy(step)
    optimizer = make(list(step.model.parameters()))
    losses = []
    with on_two_cores(extract(step)) as placed:
        for number in range(STEPS):
            optimizer.zero_grad()
            losses.append(placed.step(*batch(number)).item())
            optimizer.step()
    assert losses == unplaced_losses(twin, make)
    assert losses[-1] < losses[0], "it learns"
    assert_same(state_of(step), state_of(twin))


@needs_two_cores
def test_an_optimizer_within_the_step_leaves_the_same_losses_bit_by_bit() -> None:
    plain = nmt()
    step = Workload.of(plain.model, plain.inputs, plain.loss, optimizer=Optimizer(kind="adamw"))
    twin = copy.deepcopy(plain)
    with on_two_cores(extract(step)) as placed:
        losses = [placed.step(*batch(number)).item() for number in range(STEPS)]
    assert losses == unplaced_losses(twin, lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True))
    assert_same(state_of(step), state_of(twin))


@pytest.fixture
def device() -> Iterator[torch.device]:
    with vdev() as found:
        yield found


@pytest.mark.skipif(torch.cuda.is_available(), reason="vdev would take CUDA's place")
@pytest.mark.parametrize(("optimizer_name", "dropout"), [("momentum", 0.3), ("adam", 0.0)])
def test_on_two_devices_of_torch_losses_are_the_same_up_to_rounding(
    optimizer_name: str, dropout: float, device: torch.device
) -> None:
    """Both devices share the random number generator, so dropout may be on."""
    make = OPTIMIZERS[optimizer_name]
    step = nmt(dropout)
    twin = copy.deepcopy(step)
    extraction = extract(step)
    placed = PlacedModule(
        extraction, random_devices(extraction, ["cpu", device], 5), random_order(extraction, 5)
    )
    optimizer = make(list(placed.parameters()))
    torch.manual_seed(1)
    losses = []
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = placed(*batch(number))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    torch.manual_seed(1)
    expected = unplaced_losses(twin, make)
    assert losses == pytest.approx(expected, rel=0, abs=5e-5)
    assert losses[-1] < losses[0], "it learns"
