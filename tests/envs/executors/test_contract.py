"""Contract of every executor: a placed model computes what the model computes.

On pinned cores bit for bit, on torch devices call by call or module by module up to rounding. The
latter on a device that computes at once, and on fake CUDA, where streams run in any order.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from envs.executors.cores.errors import WorkerError
from envs.executors.cores.placed_model import PlacedModel
from envs.executors.hooks.hooked_module import HookedModule
from envs.executors.torch.placed_module import PlacedModule
from envs.executors.unplaced import UnplacedModel
from graphs.extract import Workload, extract
from graphs.optimizer import STATE
from tests.helpers import tiny_models
from tests.helpers.extracted_steps import DOUBLE, FURTHER, STEPS, extracted, made
from tests.helpers.placed_steps import CORES, by_calls, by_modules, on_cores, worker_ids
from tests.helpers.processes import all_end
from tests.helpers.second_devices import FAKE, VDEV, opened_device, second
from tests.helpers.tiny_models import forward
from tests.helpers.trained_alike import (
    assert_close,
    assert_trains_alike,
    on_cpu,
    torch_optimizer,
    with_optimizer,
)
from tests.helpers.vdev import TRANSFERS

Placed = PlacedModel | PlacedModule | HookedModule | UnplacedModel
Place = Callable[..., Placed]
NO_CUDA: Final = pytest.mark.skipif(
    torch.cuda.is_available(), reason="vdev would take CUDA's place"
)
EXECUTORS: Final = [
    pytest.param("cores", marks=pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")),
    *(pytest.param(name, marks=NO_CUDA) for name in ("calls", "modules")),
    pytest.param("unplaced"),
    pytest.param("elsewhere", marks=NO_CUDA),  # the unplaced model on one device
]
QUEUED: Final = [  # as above, on fake CUDA
    pytest.param(f"queued {name}") for name in ("calls", "overlap", "modules", "elsewhere")
]
ON_CPU: Final = ("cores", "unplaced")
WITHOUT_STICKY_ERRORS = pytest.mark.parametrize("executor", EXECUTORS)
EVERY = pytest.mark.parametrize("executor", [*EXECUTORS, *QUEUED])
PLACED = pytest.mark.parametrize("executor", [*EXECUTORS[:3], *QUEUED[:3]])
WITH_CALLS = pytest.mark.parametrize("executor", [*EXECUTORS[:2], *QUEUED[:2]])
WITH_OPTIMIZER = pytest.mark.parametrize(
    "executor", [*EXECUTORS[:2], *EXECUTORS[3:], *QUEUED[:2], *QUEUED[3:]]
)
QUICK: Final = {
    *("conv_net", "tied_weights", "norm_twice", "views", "attention", "own_loss"),
    *("weighted_loss", "decaying_weight", "stacked_moe", "dlrm", "gru"),
}
QUICK_QUEUED: Final = {"conv_net", "tied_weights", "norm_twice", "views", "dlrm"}
NOT_ON_CORES: Final = {
    *("inception", "rnnlm", "nasnet", "bert", "distilbert", "gpt2", "t5"),
}
"""Models with dropout, of which workers draw their own."""
INFERENCE: Final = sorted(tiny_models.INFERENCE.keys() - {"decaying_weight_inference"})
pytestmark = pytest.mark.slow_repeats
TRAINING: Final = [n for n in (*STEPS, *FURTHER) if n not in tiny_models.INFERENCE]


@pytest.fixture
def place(executor: str, request: pytest.FixtureRequest) -> Iterator[Place]:
    """Yield a function that places a copy of a step at random; the models end with the test.

    A step with a name is extracted once for all tests, others where the second device is there.
    """
    made_here: list[Placed] = []
    opened = ExitStack()

    @functools.cache
    def devices() -> list[torch.device]:
        if executor not in ON_CPU:
            kind = FAKE if executor.startswith("queued") else VDEV
            opened.enter_context(opened_device(kind, request.node.name))
        return [torch.device("cpu"), second()]

    def placed(step: Workload, seed: int = 0, name: str = "") -> Placed:
        step, extractor = copy.deepcopy(step), "modules" if "modules" in executor else "auto"
        if name:
            extraction = replace(extracted(name, extractor, step.optimizer), step=step)
        else:
            devices()
            extraction = extract(step, extractor)
        match executor.removeprefix("queued "):
            case "cores":
                made_here.append(on_cores(extraction, seed))
            case "calls" | "overlap":
                overlap = executor.endswith("overlap")
                made_here.append(by_calls(extraction, devices(), seed, overlap=overlap))
            case "unplaced":
                made_here.append(UnplacedModel(extraction, cores=CORES[:1]))
            case "elsewhere":
                made_here.append(UnplacedModel(extraction, device=devices()[1]))
            case _:
                made_here.append(by_modules(extraction, devices(), seed))
        return made_here[-1]

    with opened:
        yield placed
        for one in made_here:
            if not isinstance(one, PlacedModule):
                with suppress(ValueError):  # weights that are tied no longer
                    one.close()


def model_of(placed: Placed) -> nn.Module:
    return placed.model if isinstance(placed, PlacedModel) else placed


def here(output: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), output)


def trained() -> list[Any]:
    """Return (executor, model, seed); quick models are quick tests with the first seed.

    Two seeds place at random where workers or copies overlap. The largest models are not run on
    fake CUDA, and only they are slow tests of the device that computes at once.
    """
    at_once = [executor for executor in EXECUTORS if executor.values[0] not in ON_CPU]
    overlapping = [EXECUTORS[0], QUEUED[1]]
    return [
        pytest.param(
            *executor.values,
            name,
            seed,
            marks=[*executor.marks, *[pytest.mark.slow] * (seed > 0 or name not in quick)],
        )
        for executors, quick in ((EXECUTORS, QUICK), (QUEUED, QUICK_QUEUED))
        for executor in executors
        for name in TRAINING
        for seed in range(2 if executor in overlapping else 1)
        if executor is not EXECUTORS[0] or name not in NOT_ON_CORES
        if executor not in QUEUED or name not in DOUBLE
        if executor not in at_once or name in quick or name in DOUBLE
    ]


@pytest.mark.parametrize(("executor", "name", "seed"), trained())
def test_training_is_that_of_the_model(executor: str, name: str, seed: int, place: Place) -> None:
    step = made(name)
    placed = place(step, seed, name)
    TRANSFERS.clear()
    tolerance = 0.0 if executor == "cores" else 1e-6
    assert_trains_alike(step, placed, tolerance=tolerance, rate=1e-4 if name in DOUBLE else 0.01)
    assert model_of(placed).state_dict().keys() == step.model.state_dict().keys()
    assert TRANSFERS or not executor.endswith(("calls", "overlap"))


@pytest.mark.parametrize(
    ("executor", "name"),
    [
        pytest.param(*executor.values, name, marks=executor.marks)
        for executor in [*EXECUTORS, *QUEUED]
        for name in INFERENCE
        if not (str(executor.values[0]).endswith("elsewhere") and name == "structured_output")
        # which makes tensors on the CPU
    ],
)
def test_inference_is_that_of_the_model(executor: str, name: str, place: Place) -> None:
    step = made(name)
    placed = place(step, 1, name)
    expected = forward(copy.deepcopy(step))
    # fake devices know no inference mode
    is_fake = executor in ("calls", "elsewhere") or executor.startswith("queued")
    with torch.no_grad() if is_fake else torch.inference_mode():
        output = placed.step(*step.step_inputs, **step.keywords)
    exact = executor == "cores"
    torch.testing.assert_close(
        here(output), expected, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6
    )


@EVERY
def test_steps_on_changing_batches_are_those_of_the_model(executor: str, place: Place) -> None:
    step = tiny_models.conv_net()
    placed, plain = place(step, 5, "conv_net"), copy.deepcopy(step)
    images, labels = step.inputs
    for number in range(3):
        batch = (images + number, labels.roll(number))
        expected = forward(replace(plain, inputs=batch)).detach()
        assert_close(placed.step(*batch), expected, 0.0 if executor == "cores" else 1e-6)


@WITH_OPTIMIZER
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, "conv_net") for kind in STATE),
        ("adamw", "tied_weights"),
        *(("momentum", name) for name in ("decaying_weight", "weighted_loss", "views", "own_loss")),
    ],
)
def test_an_optimizer_of_the_step_leaves_what_torchs_own_leaves(
    kind: str, name: str, place: Place
) -> None:
    step = with_optimizer(tiny_models.STEPS[name](), kind, weight_decay=0.1)
    placed = place(step, 1, name)
    assert not isinstance(placed, HookedModule)
    plain = copy.deepcopy(step)
    assert plain.optimizer is not None
    optimizer = torch_optimizer(plain.model, plain.optimizer)
    for rate in (0.05, 0.02, 0.01):
        placed.learning_rate = optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss = forward(plain)
        loss.backward()
        optimizer.step()
        assert_close(placed.step(*step.inputs, **step.keywords), loss.detach(), 1e-6)
    assert_close(on_cpu(model_of(placed).state_dict()), plain.model.state_dict(), 1e-6)
    assert all(parameter.grad is None for parameter in model_of(placed).parameters())
    kept = placed.optimizer_state()
    placed.load_optimizer_state({name: tensor.cpu() + 1 for name, tensor in kept.items()})
    assert_close(here(placed.optimizer_state()), {n: t + 1 for n, t in here(kept).items()}, 0.0)
    with pytest.raises(ValueError, match=r"exp_avg\.none of the optimizer is nothing"):
        placed.load_optimizer_state({**kept, "exp_avg.none": torch.zeros(1)})
    with pytest.raises(ValueError, match="learning rate nan is not"):
        placed.learning_rate = float("nan")


@WITH_OPTIMIZER
def test_without_an_optimizer_gradients_add_up(place: Place) -> None:
    step = tiny_models.conv_net()
    placed, plain = place(step, 1, "conv_net"), copy.deepcopy(step)
    assert not isinstance(placed, HookedModule)
    for _ in range(2):
        forward(plain).backward()
        placed.step(*step.inputs)
    for name, parameter in model_of(placed).named_parameters():
        expected = plain.model.get_parameter(name).grad
        assert parameter.grad is not None
        assert_close(parameter.grad, expected, 1e-6)
    assert placed.optimizer_state() == {}
    with pytest.raises(ValueError, match="has no optimizer"):
        placed.learning_rate = 0.1


@EVERY
def test_a_batch_may_come_as_one_tuple_list_or_mapping(place: Place) -> None:
    step = tiny_models.own_loss()
    expected = forward(copy.deepcopy(step)).detach()
    mirrored = dict(reversed(list(step.keywords.items())))
    placed = place(step, 0, "own_loss")
    assert_close(placed.step(mirrored), expected, 1e-6)
    step = tiny_models.conv_net()
    placed = place(step, 0, "conv_net")
    for batch in (step.inputs, list(step.inputs)):
        expected = forward(copy.deepcopy(step)).detach()
        assert_close(placed.step(batch), expected, 1e-6)


@WITH_CALLS
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: (x[:2], y[:2]), r"input \[0\] .* \(2, 3, .* \(4, 3, .*drop_last"),
        (lambda x, y: (x.double(), y), r"input \[0\] .* torch.float64"),
        (lambda x, y: (x,), r"lacks the target"),
        (lambda x, y: (x, y, y), r"holds input \[2\]"),
        (lambda x, y: (x, 3), r"the target of the batch is int, not a tensor"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(
    change: Callable[[Tensor, Tensor], tuple[object, ...]], message: str, place: Place
) -> None:
    step = tiny_models.conv_net()
    placed = place(step, 0, "conv_net")
    before = on_cpu(model_of(placed).state_dict())
    with pytest.raises(ValueError, match=message):
        placed.step(*change(*step.inputs))
    assert_close(on_cpu(model_of(placed).state_dict()), before, 0.0)
    placed.step(*step.inputs)


@WITHOUT_STICKY_ERRORS
def test_an_op_that_fails_is_named_and_leaves_the_model_as_it_was(
    executor: str, place: Place
) -> None:
    step = tiny_models.tied_weights()
    placed = place(step, 0, "tied_weights")
    before = on_cpu(model_of(placed).state_dict())
    tokens, target = step.inputs
    with pytest.raises((WorkerError, IndexError, RuntimeError)) as failure:
        placed.step(tokens + 100, target)
    text = f"{failure.value} {getattr(failure.value, '__notes__', '')}"
    assert "index out of range" in text
    assert "embedding:embedding" in text or executor in ("modules", "unplaced", "elsewhere")
    if isinstance(placed, PlacedModel):
        assert all_end(worker_ids(placed))
        placed.close()
        assert_close(placed.model.state_dict(), before, 0.0)
        assert placed.model(tokens).isfinite().all()
    else:
        assert_trains_alike(step, placed)


@PLACED
@pytest.mark.parametrize("name", ["head", "embedding"])
def test_weights_that_are_tied_no_longer_are_refused(name: str, place: Place) -> None:
    step = tiny_models.tied_weights()
    placed = place(step, 0, "tied_weights")
    module = model_of(placed).get_submodule(name)
    module.weight = nn.Parameter(module.get_parameter("weight").detach().clone())
    with pytest.raises(ValueError, match="no longer"):
        placed.step(*step.inputs)


@EVERY
def test_state_that_was_replaced_is_used(executor: str, place: Place) -> None:
    step = made("attention")
    placed = place(step, 4, "attention")
    changed = copy.deepcopy(step)
    with torch.no_grad():
        for parameter in changed.model.parameters():
            parameter.mul_(0.5)
    state = {name: tensor.clone() for name, tensor in changed.model.state_dict().items()}
    model_of(placed).load_state_dict(state, assign=True)
    assert_close(placed.step(*step.inputs), forward(copy.deepcopy(changed)).detach(), 1e-6)
    assert_trains_alike(changed, placed, tolerance=0.0 if executor == "cores" else 1e-6)


@pytest.mark.parametrize("executor", [EXECUTORS[0], EXECUTORS[2], QUEUED[2]])
def test_closing_gives_the_model_back(place: Place) -> None:
    step = made("tied_weights")
    placed = place(step, 0, "tied_weights")
    assert isinstance(placed, PlacedModel | HookedModule)
    model = placed.model if isinstance(placed, PlacedModel) else placed._step.model
    names, ids = list(model.state_dict()), [id(parameter) for parameter in model.parameters()]
    placed.step(*step.inputs)
    expected = on_cpu(model.state_dict())
    placed.close()
    placed.close()
    assert list(model.state_dict()) == names
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}
    if isinstance(placed, PlacedModel):
        assert [id(parameter) for parameter in model.parameters()] == ids
    assert model.get_parameter("head.weight") is model.get_parameter("embedding.weight")
    assert_close(model.state_dict(), expected, 0.0)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    model(*step.model_inputs)
    with pytest.raises(RuntimeError, match=r"have ended|is closed"):
        placed.step(*step.inputs)


@pytest.mark.parametrize("executor", [*EXECUTORS[1:], *QUEUED])
def test_dropout_is_off_in_eval_mode_and_on_again(place: Place) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)),
        *(nn.Linear(6, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 2)),
    )
    step = Workload.of(model, (torch.randn(5, 4), torch.randn(5, 2)), tiny_models.squared)
    placed = place(step, 0)
    assert isinstance(placed, nn.Module)
    with torch.no_grad():
        expected = copy.deepcopy(model).eval()(*step.model_inputs)
    assert placed.eval() is placed
    assert not any(module.training for module in placed.modules())
    for inputs in (step.inputs, step.model_inputs):
        output = placed(*inputs)
        assert not output.requires_grad
        assert_close(output, expected, 1e-6)
    assert placed.train() is placed
    assert all(module.training for module in placed.modules())
    assert_trains_alike(step, placed)


@pytest.mark.parametrize("executor", [EXECUTORS[0]])
def test_dropout_of_workers_is_the_same_again_from_the_same_state(place: Place) -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 64), nn.Dropout(0.5))
    step = Workload.of(model, (torch.randn(4, 8), torch.randn(4, 64)), tiny_models.squared)
    placed = place(step, 3)
    assert isinstance(placed, PlacedModel)
    state = placed.random_state()
    losses = [placed.step(*step.inputs).item() for _ in range(3)]
    assert len(set(losses)) == 3
    placed.load_random_state(state)
    assert [placed.step(*step.inputs).item() for _ in range(3)] == losses
    with pytest.raises(ValueError, match="1 states are not for 2 workers"):
        placed.load_random_state(state[:1])
