"""Steps whose devices have a process each compute what the model computes."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import wait
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from envs.executors.cores.errors import WorkerError, WorkerMemoryError
from envs.executors.device_workers import pool
from envs.executors.device_workers.placed_step import PlacedStep
from envs.executors.device_workers.sharing import SHARING
from envs.hardware.torch_devices import is_out_of_memory
from graphs.extract import Extraction, Workload, extract
from graphs.optimizer import STATE
from tests.fake_cuda.sharing import FakeSharing
from tests.helpers import tiny_models
from tests.helpers.extracted_steps import extracted, made
from tests.helpers.placed_steps import random_devices, random_order
from tests.helpers.processes import all_end
from tests.helpers.tiny_models import Plain, forward, squared
from tests.helpers.trained_alike import (
    assert_close,
    on_cpu,
    torch_optimizer,
    with_optimizer,
)

CPU = torch.device("cpu")
GPUS = [torch.device("cuda", index) for index in range(3)]
MACHINES = {
    "one GPU, CPU": [CPU, GPUS[0]],
    "two GPUs": GPUS[:2],
    "three GPUs, CPU": [*GPUS, CPU],
}
TRAINED = ("conv_net", "tied_weights", "norm_twice", "attention", "dlrm", "stacked_moe")
INFERENCE = sorted(tiny_models.INFERENCE.keys() - {"decaying_weight_inference"})
TIMEOUT_S = 60.0


def placed(
    extraction: Extraction,
    devices: list[torch.device],
    seed: int = 0,
    places: Mapping[str, torch.device] | None = None,
) -> PlacedStep:
    """Place calls at random on fake GPUs, whose streams run in the order of the seed."""
    chosen = places or {
        key: torch.device(device)
        for key, device in random_devices(extraction, devices, seed).items()
    }
    order = random_order(extraction, seed) if seed % 2 else ()
    sharing = FakeSharing(len(GPUS), seed)
    return PlacedStep(extraction, chosen, order, sharing=sharing, step_timeout_s=TIMEOUT_S)


def assert_trains_alike(step: Workload, placed: PlacedStep, tolerance: float = 1e-6) -> None:
    """Assert that losses of some steps, and the state after them, equal those of torch."""
    plain = copy.deepcopy(step)
    assert plain.optimizer is not None
    optimizer = torch_optimizer(plain.model, plain.optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        expected = forward(plain)
        expected.backward()
        optimizer.step()
        loss = placed.step(*step.inputs, **step.keywords)
        assert_close(loss, expected.detach(), tolerance)
    placed.read_back()
    found, state = placed._step.model.state_dict(), plain.model.state_dict()
    assert_close(on_cpu(found), on_cpu(state), tolerance)


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    "machine",
    [
        pytest.param("one GPU, CPU", marks=pytest.mark.slow),
        pytest.param("two GPUs", marks=pytest.mark.slow),
        "three GPUs, CPU",
    ],
)
@pytest.mark.parametrize(("seed", "name"), list(enumerate(TRAINED)))
def test_random_placements_train_as_torch_does(seed: int, name: str, machine: str) -> None:
    step = with_optimizer(made(name), "sgd", learning_rate=0.01)
    extraction = extract(copy.deepcopy(step))
    with placed(extraction, MACHINES[machine], seed) as workers:
        assert_trains_alike(step, workers)


@pytest.mark.slow_repeats
@pytest.mark.parametrize(("seed", "name"), list(enumerate(INFERENCE)))
def test_random_placements_infer_as_torch_does(seed: int, name: str) -> None:
    extraction = extract(made(name))
    step = copy.deepcopy(extraction.step)
    with placed(extraction, MACHINES["one GPU, CPU"], seed) as workers, torch.no_grad():
        for _ in range(2):
            found = workers.step(*step.inputs, **step.keywords)
            assert_close(found, forward(step), 1e-6)


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.slow] * (kind in ("sgd", "adam")))
        for kind in sorted(STATE)
    ],
)
def test_the_state_of_optimizers_is_that_of_torch(kind: str) -> None:
    step = with_optimizer(made("conv_net"), kind, learning_rate=0.01)
    with placed(extract(copy.deepcopy(step)), MACHINES["two GPUs"]) as workers:
        assert_trains_alike(step, workers)
        state = workers.optimizer_state()
        expected = copy.deepcopy(workers.step(*step.inputs))
        workers.load_optimizer_state(state)
        assert_equal_state(workers.optimizer_state(), state)
        assert torch.isfinite(expected)


def assert_equal_state(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


def there_and_back() -> Workload:
    """Return a step that crosses devices in every call, also with what it branches from."""

    def compute(m: nn.Module, x: Tensor) -> Tensor:
        early: Tensor = m.get_submodule("first")(x)
        late: Tensor = m.get_submodule("second")(early).sin() + early
        out: Tensor = m.get_submodule("first")(late) * early.exp()
        return out

    torch.manual_seed(0)
    model = Plain(compute, first=nn.Linear(4, 4), second=nn.Linear(4, 4))
    return Workload.of(model, (torch.randn(3, 4), torch.randn(3, 4)), squared)


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))]
)
def test_values_that_go_there_and_back_have_whole_gradients(seed: int) -> None:
    """Every call is on another device than the one before; streams run in six orders."""
    step = with_optimizer(there_and_back(), "adamw", learning_rate=0.1)
    extraction = extract(copy.deepcopy(step))
    keys = [call.key for call in extraction.forward.placed_calls]
    devices = [*GPUS[:2], CPU]
    places = {key: devices[(i + seed) % 3] for i, key in enumerate(keys)}
    with placed(extraction, devices, seed, places) as workers:
        assert_trains_alike(step, workers)


def test_complex_values_that_cross_devices_have_gradients() -> None:
    def compute(m: nn.Module, x: Tensor) -> Tensor:
        waves = torch.fft.rfft(m.get_submodule("first")(x))
        again: Tensor = m.get_submodule("first")(x)[:, :1]
        return torch.view_as_real(waves * waves).flatten(1) + again

    torch.manual_seed(0)
    model = Plain(compute, first=nn.Linear(4, 4))
    plain = Workload.of(model, (torch.randn(3, 4), torch.randn(3, 6)), squared)
    step = with_optimizer(plain, "sgd", learning_rate=0.001)
    extraction = extract(copy.deepcopy(step))
    keys = [call.key for call in extraction.forward.placed_calls]
    # Fake GPUs do not conjugate, as the backward of a complex product does.
    places = {key: CPU if ":mul" in key else GPUS[i % 2] for i, key in enumerate(keys)}
    with placed(extraction, [*GPUS[:2], CPU], places=places) as workers:
        assert_trains_alike(step, workers)


def test_a_buffer_that_only_the_caller_reads_is_returned() -> None:
    layers = {"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)}
    model = Plain(lambda m, x: (m.second(m.first(x)), m.anchors, m.anchors[1:]), **layers)
    model.register_buffer("anchors", torch.arange(3.0))
    extraction = extract(Workload.of(model, (torch.randn(3, 4),), training=False))
    with placed(extraction, MACHINES["two GPUs"]) as workers:
        _, anchors, rest = workers.step(*extraction.step.inputs)
    assert anchors.tolist() == [0.0, 1.0, 2.0]
    assert rest.tolist() == [1.0, 2.0]


def test_what_is_written_in_place_after_it_was_sent_is_refused() -> None:
    def compute(m: nn.Module, x: Tensor) -> Tensor:
        held: Tensor = m.get_submodule("first")(x) * 2
        before = held.exp().mean()
        held[0].fill_(0.5)
        return before + held.sin().mean()

    model = Plain(compute, first=nn.Linear(4, 4))
    extraction = extract(Workload.of(model, (torch.randn(3, 4),), training=False))
    calls = extraction.forward.placed_calls
    places = {call.key: GPUS[0] if "exp" in call.key else CPU for call in calls}
    with pytest.raises(ValueError, match=r"fill_ writes in place to a tensor that was handed on"):
        placed(extraction, [], places=places)


def test_a_training_step_needs_an_optimizer() -> None:
    with pytest.raises(ValueError, match="give it an optimizer"):
        placed(extracted("conv_net"), MACHINES["two GPUs"])


def test_a_worker_that_dies_ends_the_step_with_its_device() -> None:
    extraction = extract(with_optimizer(made("conv_net"), "sgd"))
    workers = placed(extraction, MACHINES["two GPUs"])
    processes = [worker.process for worker in workers._pool._workers]
    os.kill(processes[1].pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"the worker of cuda:[01] died \(signal 9\)"):
        workers.step(*extraction.step.inputs)
    for call in (lambda: workers.step(*extraction.step.inputs), workers.read_back, workers.write):
        with pytest.raises(WorkerError, match="have ended; place it again"):
            call()
    assert all_end([process.pid for process in processes])
    workers.close()


def test_ctrl_c_lets_the_step_end_and_what_it_learned_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = with_optimizer(made("conv_net"), "sgd", learning_rate=0.01)
    extraction = extract(copy.deepcopy(step))
    interrupts = [signal.SIGINT]

    def interrupted(*arguments: Any) -> Any:
        if interrupts:
            signal.raise_signal(interrupts.pop())
        return wait(*arguments)

    with placed(extraction, MACHINES["two GPUs"]) as workers:
        monkeypatch.setattr(pool, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            workers.step(*step.inputs)
        monkeypatch.undo()
        workers.read_back()
        changed = extraction.step.model.state_dict()
        assert any(not torch.equal(changed[n], t) for n, t in step.model.state_dict().items())
        assert torch.isfinite(workers.step(*step.inputs))


def interrupting(monkeypatch: pytest.MonkeyPatch, counts: list[int]) -> None:
    """Press Ctrl-C so many times at each of the next answers of single workers."""
    answer = pool.DevicePool._answer

    def interrupted(self: pool.DevicePool, number: int) -> Any:
        for _ in range(counts.pop(0) if counts else 0):
            signal.raise_signal(signal.SIGINT)
        return answer(self, number)

    monkeypatch.setattr(pool.DevicePool, "_answer", interrupted)


@pytest.mark.slow_repeats
@pytest.mark.parametrize("counts", [[0, 0, 1], [0, 0, 2]])
def test_ctrl_c_while_states_are_read_back_leaves_no_mixed_model(
    monkeypatch: pytest.MonkeyPatch, counts: list[int]
) -> None:
    is_read = sum(counts) == 1  # a second Ctrl-C ends the workers
    step = with_optimizer(made("conv_net"), "sgd", learning_rate=0.01)
    extraction = extract(copy.deepcopy(step))
    workers = placed(extraction, MACHINES["two GPUs"])
    workers.step(*step.inputs)
    interrupting(monkeypatch, list(counts))
    with pytest.raises(KeyboardInterrupt):
        workers.close()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(WorkerError, match="have ended"):
        workers.step(*step.inputs)
    initial = dict(step.model.named_parameters())
    for name, parameter in extraction.step.model.named_parameters():
        assert torch.equal(parameter, initial[name]) != is_read


@pytest.mark.slow
def test_ctrl_c_while_states_are_written_has_an_effect_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = with_optimizer(made("conv_net"), "sgd", learning_rate=0.01)
    extraction = extract(copy.deepcopy(step))
    with placed(extraction, MACHINES["two GPUs"]) as workers:
        with torch.no_grad():
            for parameter in extraction.step.model.parameters():
                parameter.zero_()
        interrupting(monkeypatch, [0, 1])
        with pytest.raises(KeyboardInterrupt):
            workers.write()
        workers.read_back()
        assert not any(parameter.any() for parameter in extraction.step.model.parameters())


def test_a_full_gpu_is_named() -> None:
    extraction = extract(with_optimizer(made("conv_net"), "sgd"))
    calls = extraction.forward.placed_calls
    places = dict.fromkeys((call.key for call in calls), GPUS[1])
    with pytest.raises(WorkerMemoryError, match=r"the worker of cuda:1 failed: OutOfMemoryError"):
        PlacedStep(extraction, places, limits={GPUS[1]: 1000}, sharing=FakeSharing(2))


@pytest.mark.parametrize(("code", "is_full"), [(2, True), (1, False)])
def test_host_memory_that_runs_out_is_told_from_other_errors_of_page_locking(
    code: int, is_full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: code)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    with pytest.raises(
        RuntimeError, match=r"cannot page-lock 8\.0 MB of host memory: CUDA"
    ) as error:
        SHARING.lock_pages(torch.zeros(2_000_000))
    assert is_out_of_memory(error.value) == is_full


def test_a_failed_assertion_on_a_gpu_ends_the_step_with_its_device() -> None:
    model = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 2))
    step = Workload.of(model, (torch.tensor([0, 1]),), training=False)
    extraction = extract(step)
    keys = [call.key for call in extraction.forward.placed_calls]
    workers = placed(extraction, [], places=dict(zip(keys, [GPUS[0], CPU], strict=True)))
    with pytest.raises(WorkerError, match=r"worker of cuda:0 failed: .*device-side assert"):
        workers.step(torch.tensor([0, 7]))


@pytest.mark.slow
def test_a_gpu_that_is_not_there_is_named() -> None:
    extraction = extract(replace(made("conv_net"), training=False))
    calls = extraction.forward.placed_calls
    places = dict.fromkeys((call.key for call in calls), torch.device("cuda", 7))
    with pytest.raises(WorkerError, match=r"the worker of cuda:7 failed: .*invalid device"):
        placed(extraction, [], places=places)
