"""One pinned worker process: maps the arena, compiles instruction lists, runs them on demand.

It is forked for a :class:`envs.executors.cores.pool.WorkerPool` by
:mod:`envs.executors.cores.fork_server`; :mod:`envs.executors.cores.messages` defines the messages
on its pipe. It never outlives its parent. :class:`Resident` is its resident memory, as the kernel
counts it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import threading
import time
import traceback
from array import array
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import torch

from envs.executors.cores.arena import Arena
from envs.executors.cores.compiled_list import CompiledList
from envs.executors.cores.messages import (
    CountMemory,
    Done,
    Failed,
    Load,
    RunStep,
    SetRandom,
    Setup,
    TellMemory,
    TellRandom,
)
from envs.executors.cores.signals import Signals
from envs.hardware.torch_devices import is_out_of_memory

STATUS: Final = Path("/proc/self/status")
CLEAR_REFS: Final = Path("/proc/self/clear_refs")
RESET_PEAK: Final = "5"
"""Makes the kernel reset the peak of resident memory, see proc(5)."""


class Resident:
    """Peak memory of this process beyond its start, including shared memory that it touches.

    Besides tensors that includes workspaces of kernels and what libraries keep.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._start_bytes = _bytes("VmRSS")
        self._is_known = True

    def restart(self) -> None:
        """Release unused memory, and count from here on."""
        self._arena.let_go()
        with contextlib.suppress(AttributeError):  # only glibc has it
            ctypes.CDLL(None).malloc_trim(0)
        try:
            CLEAR_REFS.write_text(RESET_PEAK, encoding="ascii")
        except OSError:  # a kernel without page monitor
            self._is_known = False
        self._start_bytes = _bytes("VmRSS")

    def peak_bytes(self) -> int | None:
        """Return the peak since the last restart or the start; None if it could not be reset."""
        return max(_bytes("VmHWM") - self._start_bytes, 0) if self._is_known else None


def _bytes(name: str) -> int:
    lines = STATUS.read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields[name].split()[0]) * 1024


class Worker:
    """State of a worker process: its arena, its signals and its compiled lists."""

    def __init__(self, setup: Setup, progress: memoryview) -> None:
        torch.set_num_threads(setup.threads)
        torch.manual_seed(setup.seed)
        self.program = setup.program
        self.arena = Arena(setup.program, setup.arena)
        self.signals = Signals(setup.device, setup.counters)
        self.resident = Resident(self.arena)
        self.lists: dict[int, CompiledList] = {}
        self.progress = progress
        # The thread's clock does not see the other threads of a core set.
        self.clock = time.thread_time_ns if setup.threads == 1 else time.perf_counter_ns

    def load(self, message: Load) -> None:
        """Compile an instruction list under a number."""
        self.lists[message.number] = CompiledList(
            message.instructions, self.program, self.arena, self.signals
        )

    def run(self, message: RunStep) -> Done:
        """Run one step; the clock is read before the first and after every instruction."""
        compiled = self.lists[message.number]
        table, progress = compiled.table, self.progress
        clock = self.clock
        stamps = array("q", bytes(8 * (len(compiled.steps) + 1)))
        self.signals.reset()
        while time.perf_counter_ns() < message.start_ns:
            pass
        stamps[0] = clock()
        start_ns = time.perf_counter_ns()
        for position, step in enumerate(compiled.steps):
            progress[0] = position
            step(table)
            stamps[position + 1] = clock()
        end_ns = time.perf_counter_ns()
        if message.give:
            compiled.give()
        compiled.forget()
        return Done(start_ns, end_ns, stamps.tobytes())


def serve(connection: Connection) -> None:
    """Answer messages until the parent closes the pipe."""
    setup = connection.recv()
    assert isinstance(setup, Setup)
    with torch.inference_mode():
        worker = Worker(setup, _progress(setup))
        connection.send(Done())
        while True:
            try:
                message = connection.recv()
            except EOFError:
                return
            try:
                connection.send(_answer(worker, message))
            except Exception as error:  # noqa: BLE001 - whatever an op raises goes to the parent
                last = traceback.format_exception_only(error)[-1].strip()
                connection.send(Failed(last, no_memory=is_out_of_memory(error)))


def _answer(worker: Worker, message: object) -> Done:
    match message:
        case Load():
            worker.load(message)
        case RunStep():
            return worker.run(message)
        case CountMemory():
            worker.resident.restart()
        case TellMemory():
            return Done(peak_bytes=worker.resident.peak_bytes())
        case TellRandom():
            return Done(random=torch.get_rng_state().numpy().tobytes())
        case SetRandom():
            torch.set_rng_state(torch.frombuffer(bytearray(message.state), dtype=torch.uint8))
        case _:
            raise ValueError(f"a worker got {type(message).__name__}")
    return Done()


def _progress(setup: Setup) -> memoryview:
    """Return this worker's cell of the shared progress board: its current position in the list."""
    import mmap

    board = memoryview(mmap.mmap(setup.board, setup.board_bytes)).cast("q")
    return board[setup.device : setup.device + 1]


def _end_with_parent(descriptor: int) -> None:
    """End this process, whatever it waits for, when the parent's end of the pipe is closed.

    (A death signal would come too early: when the thread that started the worker ends.)
    """
    hang_up = select.poll()
    hang_up.register(descriptor, 0)
    hang_up.poll()
    os._exit(0)


def work(descriptor: int, cores: Sequence[int]) -> None:
    """Serve the pipe with this file descriptor, pinned to cores, in a process forked for it."""
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_parent, args=(descriptor,), daemon=True).start()
    os.sched_setaffinity(0, set(cores))
    serve(Connection(descriptor))
