"""The pool of workers: failures are named, and nothing is left behind."""

from __future__ import annotations

import errno
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from envs.executors.cores import pool as pool_module
from envs.executors.cores.arena import Arena, load_batch, load_state
from envs.executors.cores.errors import WorkerError
from envs.executors.cores.instruction_lists import Receive, Run, device_lists, stretches
from envs.executors.cores.pool import WorkerPool, spread_seed
from envs.executors.cores.processes import WorkerProcess
from envs.hardware.cluster import Device
from graphs.extract import Extraction, Workload, extract
from tests.helpers import processes, tiny_models
from tests.helpers.folders import ROOT
from tests.helpers.placed_steps import CORES, open_descriptors, two_cores, worker_ids
from tests.helpers.processes import all_end, becomes_true, is_alive

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


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
        load_batch(self.arena, step.inputs)
        devices = [op % 2 for op in range(count)] if alternating else [0] * (count - 1) + [1]
        self.number = self.load(device_lists(self.program, devices, range(count), 2))


@pytest.mark.slow
def test_instructions_and_stretches_of_them_are_timed_without_waits() -> None:
    pool = Pool(alternating=True)
    with pool:
        lists = pool._lists[pool.number]
        each, of_stretches = pool.run(pool.number, each=True), pool.run(pool.number)
    for own, each_s, stretches_s in zip(lists, each.cpu_s, of_stretches.cpu_s, strict=True):
        worked = [isinstance(instruction, Run) for instruction in own]
        waited = [isinstance(instruction, Receive) for instruction in own]
        assert (each_s[worked] > 0).all()
        assert (each_s[waited] == 0).all()
        parts = stretches(own)
        with_work = {part.stop - 1 for part in parts if any(worked[part.start : part.stop])}
        last = {part.stop - 1 for part in parts if not waited[part.start]}
        assert with_work <= set(np.flatnonzero(stretches_s)) <= last


@pytest.mark.slow
def test_a_worker_without_instructions_takes_no_part_in_a_step() -> None:
    pool = Pool()
    with pool:
        count = pool.extraction.program.op_count
        number = pool.load(device_lists(pool.program, [0] * count, range(count), 2))
        os.kill(worker_ids(pool)[1], signal.SIGSTOP)
        step = pool.run(number)
    assert [len(times_s) > 0 for times_s in step.cpu_s] == [True, False]
    assert step.wall_s > 0


@pytest.mark.slow_repeats
@pytest.mark.parametrize("here", [0, 1])
def test_the_worker_on_the_core_of_the_caller_starts_last(
    here: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "current_core", lambda: CORES[here])
    receivers: list[int] = []
    pool = Pool()
    with pool:
        for d, worker in enumerate(pool._workers):
            send = worker.connection.send_bytes

            def noted(message: bytes, d: int = d, send: Any = send) -> None:
                receivers.append(d)
                send(message)

            monkeypatch.setattr(worker.connection, "send_bytes", noted)
        pool.run(pool.number)
    assert receivers == [1 - here, here]


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


@pytest.mark.slow
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
    assert len(open_descriptors()) < len(descriptors)


@pytest.mark.slow_repeats
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_workers_end_with_their_parent() -> None:
    script = """
import sys, time, torch
sys.path.insert(0, {tests!r})
from tests.envs.executors.cores.test_pool import Pool, worker_ids
if __name__ == "__main__":
    torch.set_num_threads(1)
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
        parent.kill()
        parent.wait(timeout=60)
    assert all_end(ids)


def small_pool(step_timeout_s: float = 60.0) -> WorkerPool:
    program = extract(tiny_models.structured_output()).program
    return WorkerPool(program, two_cores().devices, step_timeout_s=step_timeout_s)


@pytest.mark.slow
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
    assert open_descriptors() <= before


@pytest.mark.slow
def test_a_worker_that_hangs_with_a_full_pipe_is_named() -> None:
    with small_pool(step_timeout_s=0.25) as pool:
        process_id = worker_ids(pool)[1]
        os.kill(process_id, signal.SIGSTOP)
        guard = threading.Timer(60, os.kill, (process_id, signal.SIGKILL))
        guard.start()
        try:
            with pytest.raises(WorkerError, match=f"core:{CORES[1]} did not answer within 0.25 s"):
                pool.load([[], [Run(i) for i in range(200_000)]])
        finally:
            guard.cancel()
        assert pool.closed


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("core:0", "core:0"), "overlap"),
        (("core:9999",), "there is no device core:9999"),
    ],
)
def test_devices_that_cannot_be_had_are_refused_before_anything_starts(
    names: tuple[str, ...], message: str
) -> None:
    program = extract(tiny_models.structured_output()).program
    devices = [Device(name=name, kind="core", memory_bytes=1) for name in names]
    gc.collect()
    before = open_descriptors()
    with pytest.raises(ValueError, match=message):
        WorkerPool(program, devices)
    assert open_descriptors() <= before


def test_shared_memory_that_cannot_be_made_is_reported_with_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def limited(_: int, __: int) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr("os.ftruncate", limited)
    program = extract(Workload.of(nn.Linear(2, 2), torch.ones(1, 2), training=False)).program
    with pytest.raises(OSError, match=r"shared memory of 0\.0 MB .*: File too large \(ulimit -f"):
        Arena(program)


def test_no_two_workers_of_any_rank_share_a_seed() -> None:
    seeds = [
        spread_seed(spread_seed(seed, rank), device)
        for seed, rank, device in product(range(4), range(16), range(8))
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert spread_seed(-1, 0) == spread_seed(2**64 - 1, 0)
