"""Placed models on pinned cores: their shared memory, their state, and what is left behind."""

from __future__ import annotations

import copy
import gc
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from envs.executors.cores.errors import WorkerError
from envs.executors.cores.hand_over import HandOver
from envs.executors.cores.placed_model import PlacedModel
from envs.executors.cores.pool import WorkerPool
from envs.executors.cores.processes import WorkerProcess
from envs.hardware.cluster import Cluster, Device
from envs.hardware.discover import discover
from graphs.extract import Workload, extract
from tests.helpers import tiny_models
from tests.helpers.placed_steps import CORES, on_cores, open_descriptors, two_cores, worker_ids
from tests.helpers.processes import is_alive
from tests.helpers.tiny_models import assert_same, eager, forward, gradients_of, state_of
from tests.helpers.trained_alike import assert_trains_alike, with_optimizer

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


def inference(step: Workload) -> Workload:
    return Workload(step.model, step.inputs, step.keywords, step.loss, training=False)


@dataclass
class Nodes:
    x: torch.Tensor


def test_new_tensors_in_the_same_object_are_read_by_the_next_step() -> None:
    linear = nn.Linear(3, 3)
    model = tiny_models.Plain(lambda m, nodes: m.linear(nodes.x).relu(), linear=linear)
    nodes = Nodes(torch.randn(5, 3))
    with on_cores(extract(Workload.of(model, nodes, training=False))) as placed:
        for _ in range(2):
            assert_same(placed.step(nodes), linear(nodes.x).relu().detach())
            nodes.x = nodes.x + 1
        nodes.x = torch.randn(1, 3)
        with pytest.raises(ValueError, match=r"input \[0\]\.x of the batch is .*\(1, 3\)"):
            placed.step(nodes)


def test_workers_compute_with_the_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        linear = nn.Linear(3, 3)
        model = tiny_models.Plain(lambda m, x: m.linear(x) * (torch.arange(3) / 3), linear=linear)
        x = torch.randn(5, 3)
        with on_cores(extract(Workload.of(model, x, training=False))) as placed:
            assert_same(placed.step(x), model(x).detach())
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_model_that_was_placed_in_inference_mode_can_be_trained() -> None:
    step = tiny_models.conv_net()
    extraction = extract(inference(step))
    with torch.inference_mode(), on_cores(extraction) as placed:
        placed.step(*extraction.step.inputs)
    assert not any(tensor.is_inference() for tensor in state_of(step).values())
    forward(step).backward()


# --- training


@pytest.mark.slow_repeats
@pytest.mark.parametrize("zero_grad", [{"set_to_none": True}, {"set_to_none": False}, None])
def test_gradients_in_shared_memory_are_cleared_and_added_up_as_torch_does(
    zero_grad: dict[str, bool] | None,
) -> None:
    step = tiny_models.conv_net()
    twin = copy.deepcopy(step)
    models = step.model, twin.model
    optimizers = [torch.optim.SGD(own.parameters(), lr=0.05, momentum=0.9) for own in models]
    with on_cores(extract(step)) as placed:
        for _ in range(3):
            for optimizer in optimizers if zero_grad is not None else ():
                optimizer.zero_grad(**zero_grad or {})
            loss = forward(twin)
            loss.backward()
            assert_same(placed.step(*step.inputs), loss.detach())
            for optimizer in optimizers:
                optimizer.step()
            assert_same(gradients_of(step), gradients_of(twin))
    assert_same(state_of(step), state_of(twin))


def test_gradients_whose_data_is_replaced_do_not_detach_those_of_later_steps() -> None:
    step = tiny_models.conv_net()
    with on_cores(extract(step)) as placed:
        placed.step(*step.inputs)
        expected = gradients_of(step)
        for _ in range(2):
            for parameter in step.model.parameters():
                assert parameter.grad is not None
                parameter.grad.data = torch.zeros_like(parameter)
                parameter.grad = None
            placed.step(*step.inputs)
            assert_same(gradients_of(step), expected)


@pytest.fixture
def four_devices(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Return four devices; with fewer cores, their workers share the cores."""
    if len(CORES) >= 4:
        return discover(",".join(f"core:{core}" for core in CORES[:4]))

    def on_own_cores(device: Device, cores: Sequence[int], *rest: Any) -> WorkerProcess:
        return WorkerProcess(device, [CORES[core % len(CORES)] for core in cores], *rest)

    monkeypatch.setattr("envs.executors.cores.pool.cores_of", lambda name: (int(name[5:]),))
    monkeypatch.setattr("envs.executors.cores.pool.WorkerProcess", on_own_cores)
    devices = (Device(name=f"core:{i}", kind="core", memory_bytes=1 << 30) for i in range(4))
    return Cluster(name="four", devices=tuple(devices))


def test_four_devices_train_bit_for_bit_as_none(four_devices: Cluster) -> None:
    step = tiny_models.attention()
    twin = copy.deepcopy(step)
    with on_cores(extract(step), 3, four_devices) as placed:
        assert_trains_alike(twin, placed, steps=10, tolerance=0.0)
        assert len(set(worker_ids(placed))) == 4


def test_a_placed_model_tells_the_memory_that_its_workers_held() -> None:
    size = 1000
    model = nn.Sequential(nn.Linear(size, size), nn.Linear(size, size, bias=False))
    step = Workload.of(model, (torch.randn(4, size), torch.randn(4, size)), tiny_models.squared)
    with on_cores(extract(step), 2) as placed:
        placed.step(*step.inputs)
        held = placed.peak_memory_bytes()
    assert list(held) == [device.name for device in two_cores().devices]
    parameters_and_gradients = 4 * size * size * 4
    assert sum(held.values()) >= parameters_and_gradients
    with pytest.raises(WorkerError, match="have ended"):
        placed.peak_memory_bytes()


@pytest.mark.slow
def test_workers_outlive_the_thread_that_started_them() -> None:
    step = tiny_models.views()
    made: list[PlacedModel] = []
    thread = threading.Thread(target=lambda: made.append(on_cores(extract(step))))
    thread.start()
    thread.join()
    with made[0] as placed:
        time.sleep(0.1)
        assert_same(placed.step(*step.inputs), eager(step).output.detach())


# --- memory of the state


def test_a_saved_model_holds_its_parameters_and_nothing_else_of_the_shared_memory(
    tmp_path: Path,
) -> None:
    step = tiny_models.STEPS["conv_net"]()
    torch.save(step.model.state_dict(), tmp_path / "before.pt")
    with on_cores(extract(step)) as model:
        model.step(*step.inputs)
        for parameter in step.model.parameters():
            assert parameter.untyped_storage().nbytes() == parameter.nbytes
            assert parameter.grad is not None
            assert parameter.grad.untyped_storage().nbytes() == parameter.grad.nbytes
        torch.save(step.model.state_dict(), tmp_path / "placed.pt")
    before, placed_bytes = ((tmp_path / n).stat().st_size for n in ("before.pt", "placed.pt"))
    assert placed_bytes <= 1.1 * before


@pytest.mark.slow
def test_two_placed_models_take_turns_on_one_model_until_one_is_closed() -> None:
    step = tiny_models.conv_net()
    asking = inference(step)
    optimizer = torch.optim.SGD(step.model.parameters(), lr=0.5)
    training, answering = on_cores(extract(step)), on_cores(extract(asking), 1)
    for _ in range(3):
        optimizer.zero_grad()
        expected = forward(copy.deepcopy(step)).detach()
        assert_same(training.step(*step.inputs), expected)
        optimizer.step()
        with torch.no_grad():
            answer = step.model.eval()(*step.model_inputs)
        step.model.train()
        assert_same(answering.step(*step.model_inputs), answer)
    training.close()
    with answering:
        assert_same(answering.step(*step.model_inputs), answer)
    before = state_of(step)
    gc.collect()
    assert_same(state_of(step), before)


def test_state_that_moved_or_was_transposed_is_used() -> None:
    linear = nn.Linear(3, 3)
    step = Workload.of(linear, torch.randn(2, 3), training=False)
    with on_cores(extract(step)) as model:
        linear.double().float()
        linear.weight.data = linear.weight.data.t()
        with torch.no_grad():
            linear.bias.fill_(3.0)
            expected = linear(*step.inputs)
        torch.testing.assert_close(model.step(*step.inputs), expected)


@pytest.mark.slow
def test_state_of_another_form_is_refused_and_may_come_back() -> None:
    step = inference(tiny_models.conv_net())
    with on_cores(extract(step)) as model:
        step.model.double()
        with pytest.raises(ValueError, match=r"0\.weight .*float64 .*float32"):
            model.step(*step.model_inputs)
        step.model.float()
        step.model.get_parameter("7.bias").data = torch.zeros(6)
        with pytest.raises(ValueError, match=r"7\.bias is now .* shape \(6,\) .* shape \(5,\)"):
            model.step(*step.model_inputs)
        step.model.get_parameter("7.bias").data = torch.zeros(5)
        assert model.step(*step.model_inputs).shape == (4, 5)


def test_a_training_step_in_eval_mode_or_with_other_trained_parameters_is_refused() -> None:
    step = tiny_models.conv_net()
    model, parameter = step.model, step.model.get_parameter("7.bias")
    with on_cores(extract(step)) as placed:
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.eval()
        with pytest.raises(ValueError, match=r"the model is in eval mode now.*model\(x\)"):
            placed.step(*step.inputs)
        model.train()
        parameter.requires_grad_(False)
        with pytest.raises(ValueError, match=r"7\.bias has no gradient now"):
            placed.step(*step.inputs)
        parameter.requires_grad_(True)
        assert_same(dict(model.state_dict()), before)
        assert all(each.grad is None for each in model.parameters())
        placed.step(*step.inputs)
        with pytest.raises(TypeError, match=r"placed\.step\(batch\)"):
            placed(*step.inputs)


def test_a_model_that_would_compute_something_else_now_is_refused() -> None:
    step = tiny_models.conv_net()
    model, norm = step.model, step.model.get_submodule("1")
    assert isinstance(norm, nn.BatchNorm2d)
    norm.eval()
    with on_cores(extract(step)) as placed:

        def refused(message: str) -> None:
            with pytest.raises(ValueError, match=message):
                placed.step(*step.inputs)

        placed.step(*step.inputs)
        with torch.autocast("cpu", torch.bfloat16):
            refused("autocast is on")
        model.eval()
        model.train()
        refused("1 is in train mode now")
        norm.eval()
        relu = model.get_submodule("2")
        model.add_module("2", nn.GELU())
        refused("the model has other submodules, forwards or hooks")
        model.add_module("2", relu)
        hook = model.get_submodule("0").register_forward_hook(lambda module, inputs, output: output)
        refused("0 has other submodules, forwards or hooks")
        hook.remove()
        model.eval()
        refused("the model is in eval mode now")
        model.train()
        norm.eval()
        weight = model.get_parameter("0.weight")
        hook = weight.register_hook(torch.abs)  # type: ignore[no-untyped-call]  # untyped in torch
        refused("0.weight has a hook on its gradient")
        hook.remove()
        placed.step(*step.inputs)


class FrozenNorm(nn.Sequential):
    """Keeps its norm in eval mode whenever it is trained."""

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.get_submodule("1").eval()
        return self


def test_modules_that_the_model_itself_keeps_in_eval_mode_may_stay_so() -> None:
    model = FrozenNorm(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    inputs = (torch.randn(3, 4), torch.randn(3, 4))
    with on_cores(extract(Workload.of(model, inputs, nn.functional.mse_loss))) as placed:
        placed.step(inputs)
        model.train()
        placed.step(inputs)


@pytest.mark.slow
def test_a_frozen_parameter_that_is_to_be_trained_is_refused_and_inference_has_no_modes() -> None:
    step = tiny_models.conv_net()
    step.model.get_parameter("7.bias").requires_grad_(False)
    with on_cores(extract(step)) as placed:
        step.model.get_parameter("7.bias").requires_grad_(True)
        with pytest.raises(ValueError, match=r"7\.bias has a gradient now"):
            placed.step(*step.inputs)
    with on_cores(extract(inference(step))) as placed:
        outputs = [placed.step(*step.model_inputs) for _ in (step.model.train(), step.model.eval())]
        assert_same(*outputs)


# --- what is left behind


@pytest.mark.slow
def test_placed_models_that_are_dropped_leave_no_worker_and_no_descriptor() -> None:
    step = tiny_models.structured_output()
    extraction = extract(step)
    gc.collect()
    before = open_descriptors()
    ids = []
    for seed in range(3):
        model = on_cores(extraction, seed)
        ids += worker_ids(model)
        model.step(*step.inputs)
        del model
        gc.collect()
        assert not any(map(is_alive, ids))
        # The state is still in the last mapping, which keeps its file open.
        assert len(open_descriptors() - before) <= 1
    expected = state_of(step)
    for tensor in step.named_state().values():
        tensor.data = tensor.detach().clone()
        tensor.grad = None
    gc.collect()
    assert open_descriptors() <= before
    assert_same(state_of(step), expected)


def test_workers_end_when_placing_fails_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    step = tiny_models.conv_net()
    extraction = extract(step)
    started: list[WorkerPool] = []
    start = WorkerPool.__init__

    def recorded(self: WorkerPool, *args: Any, **keywords: Any) -> None:
        started.append(self)
        start(self, *args, **keywords)

    def interrupted(self: HandOver) -> None:
        next(iter(self._slots.values())).zero_()
        raise KeyboardInterrupt

    before = state_of(step)
    monkeypatch.setattr(HandOver, "share", interrupted)
    monkeypatch.setattr(WorkerPool, "__init__", recorded)
    with pytest.raises(KeyboardInterrupt):
        on_cores(extraction)
    assert started[0].closed
    assert_same(state_of(step), before)


def test_the_state_of_an_optimizer_ends_with_the_workers() -> None:
    step = with_optimizer(tiny_models.conv_net(), "adam")
    with on_cores(extract(step)) as placed:
        state = placed.optimizer_state()
    with pytest.raises(WorkerError, match="have ended"):
        placed.optimizer_state()
    with pytest.raises(WorkerError, match="have ended"):
        placed.load_optimizer_state(state)
    with pytest.raises(WorkerError, match="have ended"):
        placed.learning_rate = 0.1


def test_an_order_that_cannot_be_run_starts_nothing() -> None:
    extraction = extract(tiny_models.conv_net())
    gc.collect()
    before = open_descriptors()
    count = extraction.program.op_count
    cluster = two_cores()
    with pytest.raises(ValueError, match="runs a reader of op"):
        PlacedModel(extraction, cluster, [i % 2 for i in range(count)], range(count)[::-1])
    assert open_descriptors() <= before
