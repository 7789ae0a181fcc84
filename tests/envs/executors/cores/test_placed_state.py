"""Placed models whose state is moved: a step always uses the model's current state."""

from __future__ import annotations

import copy
import gc
import os
import random
import signal
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from envs.executors.cores.errors import WorkerError
from envs.executors.cores.instruction_lists import Run, priority_order
from envs.executors.cores.placed_model import PlacedModel
from envs.executors.cores.pool import WorkerPool
from envs.executors.cores.processes import WorkerProcess
from envs.hardware.discover import discover
from graphs.extract import Extraction, Workload, extract
from tests.helpers import tiny_models
from tests.helpers.processes import is_alive
from tests.helpers.tiny_models import assert_same, forward, state_of

torch.set_num_threads(1)

CORES = sorted(os.sched_getaffinity(0))
pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


def placed(extraction: Extraction, seed: int = 0) -> PlacedModel:
    randomly = random.Random(seed)
    count = extraction.program.op_count
    devices = [randomly.randrange(2) for _ in range(count)]
    order = priority_order(extraction.program, [randomly.random() for _ in range(count)])
    return PlacedModel(extraction, discover(f"core:{CORES[0]},core:{CORES[1]}"), devices, order)


def inference(step: Workload) -> Workload:
    return Workload(step.model, step.inputs, step.keywords, step.loss, training=False)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def worker_ids(model: PlacedModel) -> list[int]:
    return [worker.process.pid for worker in model._pool._workers]


# --- memory of the state


def test_a_saved_model_holds_its_parameters_and_nothing_else_of_the_shared_memory(
    tmp_path: Path,
) -> None:
    step = tiny_models.STEPS["conv_net"]()
    torch.save(step.model.state_dict(), tmp_path / "before.pt")
    with placed(extract(step)) as model:
        model.step(*step.inputs)
        for parameter in step.model.parameters():
            assert parameter.untyped_storage().nbytes() == parameter.nbytes
            assert parameter.grad is not None
            assert parameter.grad.untyped_storage().nbytes() == parameter.grad.nbytes
        torch.save(step.model.state_dict(), tmp_path / "placed.pt")
    before, placed_bytes = ((tmp_path / n).stat().st_size for n in ("before.pt", "placed.pt"))
    assert placed_bytes <= 1.1 * before


def test_two_placed_models_take_turns_on_one_model() -> None:
    step = tiny_models.conv_net()
    asking = inference(step)
    optimizer = torch.optim.SGD(step.model.parameters(), lr=0.5)
    with placed(extract(step)) as training, placed(extract(asking), 1) as answering:
        for _ in range(3):
            optimizer.zero_grad()
            expected = forward(copy.deepcopy(step)).detach()
            assert_same(training.step(*step.inputs), expected)
            optimizer.step()
            with torch.no_grad():
                answer = step.model.eval()(*step.model_inputs)
            step.model.train()
            assert_same(answering.step(*step.model_inputs), answer)


def test_closing_a_placed_model_leaves_the_other_one_right() -> None:
    step = tiny_models.tied_weights()
    extraction = extract(step)
    first, second = placed(extraction), placed(extraction, 1)
    optimizer = torch.optim.SGD(step.model.parameters(), lr=0.1)
    second.step(*step.inputs)
    first.close()
    optimizer.step()
    expected = forward(step).detach()
    with second:
        assert_same(second.step(*step.inputs), expected)
    before = state_of(step)
    gc.collect()
    assert_same(state_of(step), before)


def test_state_that_moved_is_seen() -> None:
    step = inference(tiny_models.conv_net())
    with placed(extract(step)) as model:
        step.model.double().float()
        with torch.no_grad():
            for tensor in step.named_state().values():
                tensor.zero_()
            step.model.get_buffer("1.running_var").fill_(1.0)
            step.model.get_parameter("7.bias").fill_(3.0)
        answer = model.step(*step.model_inputs)
        assert_same(answer, torch.full((4, 5), 3.0))
        fresh = {name: torch.zeros_like(own) for name, own in step.model.state_dict().items()}
        step.model.load_state_dict(fresh, assign=True)
        assert_same(model.step(*step.model_inputs), torch.zeros(4, 5))


def test_a_weight_that_was_transposed_in_place_is_seen() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(3, 3)
    step = Workload.of(linear, torch.randn(2, 3), training=False)
    with placed(extract(step)) as model:
        linear.weight.data = linear.weight.data.t()
        with torch.no_grad():
            expected = step.model(*step.inputs)
        torch.testing.assert_close(model.step(*step.inputs), expected)


def test_state_of_another_form_is_refused_and_may_come_back() -> None:
    step = inference(tiny_models.conv_net())
    with placed(extract(step)) as model:
        expected = model.step(*step.model_inputs)
        step.model.double()
        with pytest.raises(ValueError, match=r"0\.weight .*float64 .*float32"):
            model.step(*step.model_inputs)
        step.model.float()
        step.model.get_parameter("7.bias").data = torch.zeros(6)
        with pytest.raises(ValueError, match=r"7\.bias is now .* shape \(6,\) .* shape \(5,\)"):
            model.step(*step.model_inputs)
        step.model.get_parameter("7.bias").data = torch.zeros(5)
        assert model.step(*step.model_inputs).shape == expected.shape


@pytest.mark.parametrize("name", ["head", "embedding"])
def test_weights_that_are_tied_no_longer_are_refused(name: str) -> None:
    step = tiny_models.tied_weights()
    with placed(extract(step)) as model:
        module = step.model.get_submodule(name)
        module.weight = nn.Parameter(module.get_parameter("weight").detach().clone())
        with pytest.raises(ValueError, match="are no longer one tensor: place it again"):
            model.step(*step.inputs)


# --- released resources


@pytest.mark.slow
def test_placed_models_that_are_dropped_leave_no_worker_and_no_descriptor() -> None:
    step = tiny_models.structured_output()
    extraction = extract(step)
    gc.collect()
    before = open_descriptors()
    ids = []
    for seed in range(3):
        model = placed(extraction, seed)
        ids += worker_ids(model)
        model.step(*step.inputs)
        del model
        gc.collect()
        assert not any(map(is_alive, ids))
        # The state is still in the last mapping, which keeps its file open.
        assert open_descriptors() <= before + 1
    expected = state_of(step)
    for tensor in step.named_state().values():
        tensor.data = tensor.detach().clone()
        tensor.grad = None
    gc.collect()
    assert open_descriptors() == before
    assert_same(state_of(step), expected)


def test_workers_end_when_placing_fails_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    step = tiny_models.conv_net()
    extraction = extract(step)
    started: list[PlacedModel] = []

    def interrupted(self: PlacedModel) -> dict[str, torch.Tensor]:
        started.append(self)
        next(iter(self._slots.values())).zero_()
        raise KeyboardInterrupt

    monkeypatch.setattr(PlacedModel, "_share", interrupted)
    before = state_of(step)
    with pytest.raises(KeyboardInterrupt):
        placed(extraction)
    assert started[0]._pool.closed
    assert_same(state_of(step), before)


def test_an_order_that_cannot_be_run_starts_nothing() -> None:
    extraction = extract(tiny_models.conv_net())
    before = open_descriptors()
    count = extraction.program.op_count
    cluster = discover(f"core:{CORES[0]},core:{CORES[1]}")
    with pytest.raises(ValueError, match="runs a reader of op"):
        PlacedModel(extraction, cluster, [i % 2 for i in range(count)], range(count)[::-1])
    assert open_descriptors() == before


def small_pool(step_timeout_s: float = 60.0) -> WorkerPool:
    program = extract(tiny_models.structured_output()).program
    cluster = discover(f"core:{CORES[0]},core:{CORES[1]}")
    return WorkerPool(program, cluster.devices, step_timeout_s=step_timeout_s)


def test_ctrl_c_while_closing_still_ends_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    before = open_descriptors()
    pool = small_pool()
    ids = [worker.process.pid for worker in pool._workers]
    ended_before, calls = WorkerProcess.end, 0

    def interrupted(self: WorkerProcess) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        ended_before(self)

    monkeypatch.setattr(WorkerProcess, "end", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.close()
    assert not any(map(is_alive, ids))
    pool.close()
    del pool
    gc.collect()
    assert open_descriptors() == before


@pytest.mark.parametrize("device", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_worker_that_hangs_with_a_full_pipe_is_named(device: int) -> None:
    with small_pool(step_timeout_s=1.5) as pool:
        os.kill(pool._workers[device].process.pid, signal.SIGSTOP)
        lists: list[list[Run]] = [[], []]
        lists[device] = [Run(i) for i in range(200_000)]
        guard = threading.Timer(60, os.kill, (pool._workers[device].process.pid, signal.SIGKILL))
        guard.start()
        try:
            with pytest.raises(WorkerError) as failure:
                pool.load(lists)
        finally:
            guard.cancel()
        assert f"core:{CORES[device]}" in str(failure.value)
        assert pool.closed
