"""Pinned workers: placed models compute the same as unplaced ones; failures are handled."""

from __future__ import annotations

import copy
import errno
import gc
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from envs.executors.cores import pool as pool_module
from envs.executors.cores.arena import Arena, load_batch, load_state
from envs.executors.cores.errors import WorkerError
from envs.executors.cores.instruction_lists import device_lists, priority_order
from envs.executors.cores.placed_model import PlacedModel
from envs.executors.cores.pool import WorkerPool
from envs.executors.cores.processes import WorkerProcess
from envs.hardware.cluster import Cluster, Device
from envs.hardware.discover import discover
from graphs.extract import Extraction, Workload, extract
from placer.sources.target import load_step
from tests.helpers import processes, tiny_models
from tests.helpers.folders import ROOT
from tests.helpers.in_turn import LARGE, in_turn
from tests.helpers.processes import all_end, becomes_true, is_alive
from tests.helpers.tiny_models import assert_same, eager, forward, gradients_of, state_of

MODELS = ROOT / "graphs" / "models"

torch.set_num_threads(1)

CORES = sorted(os.sched_getaffinity(0))
pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


def two_cores() -> Cluster:
    return discover(f"core:{CORES[0]},core:{CORES[1]}")


def placed_at_random(step: Workload, seed: int = 0) -> PlacedModel:
    return placed_on(step, two_cores(), seed)


def placed_on(step: Workload, cluster: Cluster, seed: int) -> PlacedModel:
    """Return the step with every op on a random device."""
    extraction = extract(step)
    randomly = random.Random(seed)
    devices = [randomly.randrange(len(cluster)) for _ in range(extraction.program.op_count)]
    order = priority_order(extraction.program, [randomly.random() for _ in devices])
    return PlacedModel(extraction, cluster, devices, order)


def worker_ids(placed: PlacedModel | WorkerPool) -> list[int]:
    pool = placed._pool if isinstance(placed, PlacedModel) else placed
    return [worker.process.pid for worker in pool._workers]


# --- placed steps


@pytest.mark.parametrize(
    "name",
    in_turn(
        [
            "conv_net",
            "views",
            "tied_weights",
            "norm_twice",
            "structured_output",
            "nmt",
            "inception",
        ],
        slow=LARGE | {"tied_weights", "norm_twice"},
    ),
)
def test_a_random_placement_is_bit_for_bit_the_unplaced_step(name: str) -> None:
    step = tiny_models.STEPS[name]()
    expected = eager(step)
    with placed_at_random(step, seed=len(name)) as placed:
        output = placed.step(*step.inputs, **step.keywords)
        assert_same(output, expected.output)
        assert_same(gradients_of(step), expected.gradients)
        assert_same(state_of(step), expected.state)
    assert_same(gradients_of(step), expected.gradients)
    assert_same(state_of(step), expected.state)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["inception", "nmt", "two_towers", "nasnet", "moe"])
def test_reference_models_in_full_size_are_bit_for_bit_the_unplaced_step(target: str) -> None:
    step = load_step(str(MODELS / f"{target}.py:build"), training=True)
    expected = eager(step)
    with placed_at_random(step, seed=1) as placed:
        output = placed.step(*step.inputs)
        assert_same(output, expected.output)
        assert_same(gradients_of(step), expected.gradients)
        assert_same(state_of(step), expected.state)


@pytest.fixture(scope="module")
def conv() -> Iterator[PlacedModel]:
    """Yield a placed convolutional network; tests leave it able to run."""
    with placed_at_random(tiny_models.conv_net()) as placed:
        yield placed


@pytest.fixture
def twins(conv: PlacedModel) -> tuple[PlacedModel, nn.Module, Workload]:
    """Return the placed model without gradients, an unplaced copy of its model, and that step."""
    conv.model.zero_grad()
    step = copy.deepcopy(conv._step)
    return conv, step.model, step


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [
        (
            torch.randn(4, 3, 16, 16, generator=generator),
            torch.randint(5, (4,), generator=generator),
        )
        for _ in range(count)
    ]


def unplaced_step(step: Workload, batch: tuple[Tensor, Tensor]) -> Tensor:
    loss = forward(Workload.of(step.model, batch, step.loss))
    loss.backward()
    detached: Tensor = loss.detach()
    return detached


@pytest.mark.parametrize("zero_grad", [{"set_to_none": True}, {"set_to_none": False}, None])
def test_training_is_bit_for_bit_the_unplaced_training(
    twins: tuple[PlacedModel, nn.Module, Workload], zero_grad: dict[str, bool] | None
) -> None:
    placed, model, step = twins
    optimizers = [
        torch.optim.SGD(own.parameters(), lr=0.05, momentum=0.9) for own in (placed.model, model)
    ]
    for batch in batches(5):
        for optimizer in optimizers:
            if zero_grad is not None:
                optimizer.zero_grad(**zero_grad)
        assert_same(placed.step(*batch), unplaced_step(step, batch))
        for optimizer in optimizers:
            optimizer.step()
        assert_same(gradients_of(placed._step), gradients_of(step))
    assert_same(state_of(placed._step), state_of(step))


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


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop])
def test_four_devices_train_for_many_steps_bit_for_bit_as_none(
    optimizer: type[torch.optim.Optimizer], four_devices: Cluster
) -> None:
    step = tiny_models.attention()
    twin = copy.deepcopy(step)
    optimizers = [optimizer(own.model.parameters(), lr=0.01) for own in (step, twin)]  # type: ignore[call-arg]  # all of them take it
    with placed_on(step, four_devices, seed=3) as placed:
        for number in range(20):
            batch = [x + number / 10 if x.is_floating_point() else x for x in step.inputs]
            for own in optimizers:
                own.zero_grad()
            loss = forward(Workload.of(twin.model, batch, twin.loss))
            loss.backward()
            assert_same(placed.step(*batch), loss.detach())
            for own in optimizers:
                own.step()
        assert_same(state_of(step), state_of(twin))
        assert len(set(worker_ids(placed))) == 4


def test_a_batch_may_come_as_one_tuple_or_list(
    twins: tuple[PlacedModel, nn.Module, Workload],
) -> None:
    placed, _, step = twins
    (batch,) = batches(1)
    expected = eager(Workload.of(step.model, batch, step.loss)).output
    for given in (batch, list(batch)):
        state = state_of(placed._step)
        assert_same(placed.step(given), expected.detach())
        placed.model.load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: (x[:2], y[:2]), r"input \[0\] .* \(2, 3, .* \(4, 3, "),
        (lambda x, y: (x.double(), y), r"input \[0\] .* torch.float64"),
        (lambda x, y: (x,), r"lacks input \[1\]"),
        (lambda x, y: (x, y, y), r"holds input \[2\]"),
        (lambda x, y: (x, 3), r"input \[1\] .* int, not a tensor"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(
    twins: tuple[PlacedModel, nn.Module, Workload],
    change: Callable[[Tensor, Tensor], tuple[object, ...]],
    message: str,
) -> None:
    placed, _, step = twins
    before = state_of(step)
    with pytest.raises(ValueError, match=message):
        placed.step(*change(*batches(1)[0]))
    assert_same(state_of(placed._step), before)


def test_keywords_come_in_any_order_and_numbers_must_stay() -> None:
    step = tiny_models.own_loss()
    expected = eager(step)
    mirrored = dict(reversed(list(step.keywords.items())))
    with placed_at_random(step) as placed:
        with pytest.raises(ValueError, match=r"\['times'\] .* 4, .* 3"):
            placed.step(**{**mirrored, "times": 4})
        assert_same(placed.step(mirrored), expected.output.detach())
    assert_same(gradients_of(step), expected.gradients)


def test_close_gives_the_model_back() -> None:
    step = tiny_models.tied_weights()
    names, parameters = list(step.model.state_dict()), list(step.model.parameters())
    placed = placed_at_random(step)
    ids = worker_ids(placed)
    descriptors = open_descriptors()
    placed.step(*step.inputs)
    assert list(step.model.state_dict()) == names
    assert [id(p) for p in step.model.parameters()] == [id(p) for p in parameters]
    expected = state_of(step)
    placed.close()
    placed.close()
    assert placed._pool.closed
    assert all_end(ids)
    gc.collect()
    assert open_descriptors() < descriptors
    assert_same(state_of(step), expected)
    assert step.model.get_parameter("head.weight") is step.model.get_parameter("embedding.weight")
    for tensor in step.named_state().values():
        assert not any(tensor.data_ptr() in area for area in shared_areas())
    before = gradients_of(step)
    forward(step).backward()
    assert_same(gradients_of(step)["middle.bias"], before["middle.bias"] * 2)
    with pytest.raises(WorkerError, match="have ended"):
        placed.step(*step.inputs)


def test_shared_memory_that_cannot_be_made_is_told_with_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def limited(_: int, __: int) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr("os.ftruncate", limited)
    program = extract(Workload.of(nn.Linear(2, 2), torch.ones(1, 2), training=False)).program
    with pytest.raises(OSError, match=r"shared memory of 0\.0 MB .*: File too large \(ulimit -f"):
        Arena(program)


def test_a_placed_model_tells_the_memory_that_its_workers_held() -> None:
    size = 1000
    model = nn.Sequential(nn.Linear(size, size), nn.Linear(size, size, bias=False))
    step = Workload.of(model, (torch.randn(4, size), torch.randn(4, size)), tiny_models.squared)
    with placed_on(step, two_cores(), seed=2) as placed:
        placed.step(*step.inputs)
        held = placed.peak_memory_bytes()
    assert list(held) == [device.name for device in two_cores().devices]
    parameters_and_gradients = 4 * size * size * 4
    assert sum(held.values()) >= parameters_and_gradients
    with pytest.raises(WorkerError, match="have ended"):
        placed.peak_memory_bytes()


def shared_areas() -> list[range]:
    """Return the address ranges of arenas that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    bounds = [line.split()[0].split("-") for line in lines if "placer-arena" in line]
    return [range(int(low, 16), int(high, 16)) for low, high in bounds]


def test_workers_outlive_the_thread_that_started_them() -> None:
    step = tiny_models.views()
    made: list[PlacedModel] = []
    thread = threading.Thread(target=lambda: made.append(placed_at_random(step)))
    thread.start()
    thread.join()
    with made[0] as placed:
        time.sleep(0.1)
        assert_same(placed.step(*step.inputs), eager(step).output.detach())


# --- failures


class Pool(WorkerPool):
    """Workers of a step of many products; the last op, or every other one, is on device 1."""

    def __init__(self, *, alternating: bool = False) -> None:
        def forward(model: nn.Module, x: Tensor) -> Tensor:
            for _ in range(30):
                x = x @ x / 300.0
            return x.relu()

        model = tiny_models.Plain(forward)
        step = Workload.of(model, torch.ones(300, 300), training=False)
        self.extraction: Extraction = extract(step)
        count = self.extraction.program.op_count
        super().__init__(
            self.extraction.program,
            two_cores().devices,
            op_names=tuple(self.extraction.graph),
        )
        load_state(self.arena, step)
        load_batch(self.arena, step, step.inputs, {})
        devices = [op % 2 for op in range(count)] if alternating else [0] * (count - 1) + [1]
        self.number = self.load(device_lists(self.program, devices, range(count), 2))


def run_for_ever(pool: Pool) -> None:
    while True:
        pool.run(pool.number)


def kill_within_a_step(pool: Pool, device: int) -> None:
    """Kill the worker while it is between the first and the last op of its list."""
    process_id, length = worker_ids(pool)[device], len(pool._lists[pool.number][device])
    while True:
        os.kill(process_id, signal.SIGSTOP)
        assert becomes_true(lambda: processes.state_of(process_id) == "T")
        if 0 < pool._board[device] < length - 1:
            os.kill(process_id, signal.SIGKILL)
            return
        os.kill(process_id, signal.SIGCONT)
        time.sleep(0.002)


def test_a_worker_that_dies_is_named_with_its_last_op() -> None:
    pool = Pool()
    ids, descriptors = worker_ids(pool), open_descriptors()
    killer = threading.Thread(target=kill_within_a_step, args=(pool, 0))
    killer.start()
    with pytest.raises(WorkerError) as failure:
        run_for_ever(pool)
    killer.join()
    text = str(failure.value)
    assert re.search(rf"worker of core:{CORES[0]} died; its last op was :(matmul|div)", text)
    assert "(signal 9)" in text
    assert pool.closed
    assert all_end(ids)
    with pytest.raises(WorkerError, match="have ended"):
        pool.run(pool.number)
    del pool
    gc.collect()
    assert open_descriptors() < descriptors


@pytest.mark.parametrize("device", [0, 1])
def test_a_worker_that_hangs_is_named_not_the_one_that_waits_for_it(
    device: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(alternating=True)
    pool.run(pool.number)
    ids = worker_ids(pool)
    os.kill(ids[device], signal.SIGSTOP)

    def over(_: object, seconds: float) -> list[object]:
        assert 59 < seconds <= 60
        assert becomes_true(lambda: pool._waits(pool.number, 1 - device))
        return []

    monkeypatch.setattr(pool_module, "wait", over)
    with pytest.raises(WorkerError, match=rf"core:{CORES[device]} did not answer within 60 s"):
        pool.run(pool.number)
    assert pool.closed
    assert all_end(ids)


def test_a_hang_is_noticed_after_the_timeout() -> None:
    pool = Pool()
    os.kill(worker_ids(pool)[0], signal.SIGSTOP)
    pool.step_timeout_s = 0.1
    with pytest.raises(WorkerError, match=r"did not answer within 0\.1 s"):
        pool.run(pool.number)
    assert pool.closed


def test_an_interrupted_step_ends_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the pending answer would be taken for that of the next step."""

    def interrupted(*_: object) -> list[object]:
        raise KeyboardInterrupt

    pool = Pool()
    with pool:
        ids = worker_ids(pool)
        monkeypatch.setattr(pool_module, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.run(pool.number)
        assert pool.closed
        assert all_end(ids)


def test_an_op_that_fails_is_told_with_torchs_reason() -> None:
    step = tiny_models.tied_weights()
    placed = placed_at_random(step)
    ids = worker_ids(placed)
    tokens, target = step.inputs
    expected = state_of(step)
    with pytest.raises(WorkerError, match=r"last op was embedding:embedding") as failure:
        placed.step(tokens + 100, target)
    assert "index out of range" in str(failure.value)
    assert all_end(ids)
    placed.close()
    assert_same(state_of(step), expected)
    assert forward(step).isfinite()


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        *(
            pytest.param(number, marks=pytest.mark.slow)
            for number in (signal.SIGINT, signal.SIGTERM)
        ),
    ],
)
def test_workers_end_with_their_parent(number: signal.Signals) -> None:
    script = """
import sys, time, torch
sys.path.insert(0, {tests!r})
from tests.envs.executors.cores.test_executor import Pool, worker_ids
if __name__ == "__main__":
    pool = Pool()
    print(*worker_ids(pool), flush=True)
    while True:
        pool.run(pool.number)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", script.format(tests=str(ROOT))],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert parent.stdout is not None
    with parent.stdout:
        ids = [int(word) for word in parent.stdout.readline().split()]
        assert len(ids) == 2
        assert all(map(is_alive, ids))
        parent.send_signal(number)
        assert parent.wait(timeout=60) != 0
    assert all_end(ids)


@pytest.mark.slow
def test_pools_leave_no_descriptor_and_no_process_behind() -> None:
    extraction = extract(tiny_models.structured_output())
    gc.collect()
    before = open_descriptors()
    ids = []
    for _ in range(3):
        with WorkerPool(extraction.program, two_cores().devices) as pool:
            ids += worker_ids(pool)
    del pool
    gc.collect()
    assert open_descriptors() == before
    assert not any(map(is_alive, ids))


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("core:0", "core:0"), "overlap"),
        (("core:99999",), "there is no device core:99999"),
    ],
)
def test_devices_that_cannot_be_had_are_refused_before_anything_starts(
    names: tuple[str, ...], message: str
) -> None:
    program = extract(tiny_models.structured_output()).program
    devices = [Device(name=name, kind="core", memory_bytes=1) for name in names]
    before = open_descriptors()
    with pytest.raises(ValueError, match=message):
        WorkerPool(program, devices)
    assert open_descriptors() == before
