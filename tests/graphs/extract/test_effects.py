"""Effects of a model's code that no op shows: seeds, replaced memory, state of a first run."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from graphs.extract import ExtractionError, extract
from graphs.extract.reads.effects import effects_refused
from graphs.workload import Workload

INPUTS = (torch.ones(4, 4), torch.zeros(4, 4))


class Effect(nn.Module):
    """Two layers, with an effect of its code in between."""

    mean: Tensor
    later: Tensor | None
    first: nn.Linear
    slow: nn.Linear

    def __init__(self, effect: Callable[[Effect, Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.slow = copy.deepcopy(self.first).requires_grad_(False)
        self.last = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("later", None)
        self.effect = effect

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.effect(self, self.first(x)))
        return found


def momentum(model: Effect, x: Tensor) -> Tensor:
    for new, old in zip(model.first.parameters(), model.slow.parameters(), strict=True):
        old.data = old.data * 0.9 + new.data * 0.1
    slow: Tensor = model.slow(x)
    return x + slow


def assigned_data(model: Effect, x: Tensor) -> Tensor:
    mean = model.get_buffer("mean")
    mean.data = mean * 0.5 + x.detach().mean(0)
    return x - mean


def set_memory(model: Effect, x: Tensor) -> Tensor:
    mean = model.get_buffer("mean")
    mean.set_(mean * 0.5 + x.detach().mean(0))  # type: ignore[call-overload]  # missing in stubs
    return x - mean


def seeded(model: Effect, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return x + torch.randn(4, 4)


def forked(model: Effect, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        return x + torch.randn(4, 4)


def restored(model: Effect, x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    noise = torch.randn(4, 4)
    torch.set_rng_state(state)
    return x + noise


def first_run(model: Effect, x: Tensor) -> Tensor:
    mean = x.detach().mean(0)
    model.later = mean if model.later is None else 0.5 * model.later + mean
    return x - model.later


def frozen_for_a_part(model: Effect, x: Tensor) -> Tensor:
    for parameter in model.last.parameters():
        parameter.requires_grad = False
    first: Tensor = model.last(x)
    for parameter in model.last.parameters():
        parameter.requires_grad = True
    return x + first


def frozen_module(model: Effect, x: Tensor) -> Tensor:
    model.last.requires_grad_(False)
    first: Tensor = model.last(x)
    model.last.requires_grad_(True)
    return x + first


MEMORY, SEED = "replaces the memory of a tensor", "seeds torch's random numbers"
REFUSED: dict[Callable[[Effect, Tensor], Tensor], str] = {
    momentum: MEMORY,
    assigned_data: MEMORY,
    set_memory: MEMORY,
    seeded: SEED,
    forked: SEED,
    restored: SEED,
    first_run: "buffer later has no value until the model has run",
}


@pytest.mark.parametrize("effect", REFUSED, ids=lambda effect: effect.__name__)
@pytest.mark.parametrize("training", [True, False])
def test_effects_that_no_op_shows_are_left_to_the_models_own_code(
    effect: Callable[[Effect, Tensor], Tensor], training: bool
) -> None:
    model = Effect(effect)
    loss = nn.functional.mse_loss if training else None
    step = Workload.of(model, INPUTS[: 1 + training], loss, training=training)
    before = copy.deepcopy(model.state_dict())
    for extractor in ("export", "dispatch"):
        with pytest.raises(ExtractionError, match=REFUSED[effect]):
            extract(step, extractor)
    assert extract(step).extractor == "modules"
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())


def test_torch_is_as_before_afterwards() -> None:
    def functions() -> tuple[Any, ...]:
        return torch.manual_seed, torch.random.fork_rng, torch.Tensor.data, torch.Tensor.set_

    before = functions()
    with pytest.raises(ExtractionError):
        extract(Workload.of(Effect(seeded), INPUTS, nn.functional.mse_loss), "export")
    assert functions() == before
    tensor = torch.zeros(2)
    tensor.data = torch.ones(2)
    assert tensor.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("effect", [frozen_for_a_part, frozen_module], ids=lambda e: e.__name__)
def test_parameters_that_are_frozen_for_a_part_of_a_step_are_left_to_the_models_own_code(
    effect: Callable[[Effect, Tensor], Tensor],
) -> None:
    step = Workload.of(Effect(effect), INPUTS, nn.functional.mse_loss)
    for extractor in ("export", "dispatch"):
        with pytest.raises(ExtractionError, match="changes which parameters are trained"):
            extract(step, extractor)
    assert extract(step).extractor == "modules"
    inference = Workload.of(Effect(effect), INPUTS[:1], training=False)
    assert extract(inference).extractor == "export"


def other_generator(model: Effect, x: Tensor) -> Tensor:
    random.seed(3)  # of Python, which draws no tensors
    return x + model.slow.weight.data.sum()  # reads memory only


def frozen_already(model: Effect, x: Tensor) -> Tensor:
    model.slow.requires_grad_(False)
    x = x.detach()
    x.requires_grad_(requires_grad=True)  # type: ignore[call-arg]  # another name in the stubs
    found: Tensor = model.slow(x)
    return found


def recomputed(model: Effect, x: Tensor) -> Tensor:
    found: Tensor = checkpoint(
        lambda y: nn.functional.dropout(model.slow(y)), x, use_reentrant=False
    )
    return found


@pytest.mark.parametrize(
    "effect", [other_generator, frozen_already, recomputed], ids=lambda e: e.__name__
)
def test_what_is_like_such_an_effect_is_traced(effect: Callable[[Effect, Tensor], Tensor]) -> None:
    step = Workload.of(Effect(effect), INPUTS, nn.functional.mse_loss)
    assert extract(step).extractor in ("export", "dispatch")


def test_contexts_may_be_nested_and_threads_wait_for_each_other() -> None:
    before = torch.manual_seed, torch.Tensor.data
    done: list[bool] = []
    step = Workload.of(Effect(seeded), INPUTS, nn.functional.mse_loss)

    def elsewhere() -> None:
        with effects_refused(step):
            done.append(True)

    with effects_refused(step):
        with effects_refused(step):
            pass
        assert torch.manual_seed is not before[0]
        thread = threading.Thread(target=elsewhere)
        thread.start()
        assert not done
    thread.join()
    assert done
    assert (torch.manual_seed, torch.Tensor.data) == before


def test_constants_that_a_first_run_keeps_in_new_buffers_are_traced() -> None:
    def masked(model: Effect, x: Tensor) -> Tensor:
        if "mask" not in model._buffers:
            model.register_buffer("mask", torch.arange(4.0), persistent=False)
        return x * model.get_buffer("mask")

    model = Effect(masked)
    assert extract(Workload.of(model, INPUTS, nn.functional.mse_loss)).extractor == "export"
    assert "mask" not in model._buffers
