"""One pinned worker process: maps the arena, compiles instruction lists, runs them on demand.

It is forked for a :class:`envs.executors.cores.pool.WorkerPool` by
:mod:`envs.executors.cores.fork_server`. The first message on its pipe is a :class:`Setup`, every
other one the name of a method of :class:`Worker` and its arguments; each is answered with what the
method returns, or with :class:`Failed`. A worker never outlives its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import pickle
import select
import statistics
import threading
import time
import traceback
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, NamedTuple

import torch

from envs.executors.cores.arena import Arena
from envs.executors.cores.compiled_list import CompiledList, Signals
from envs.executors.cores.custom_ops import Registrations
from envs.executors.cores.instruction_lists import Instruction
from envs.hardware.torch_devices import is_out_of_memory
from graphs.extract.program import StepProgram

STATUS: Final = Path("/proc/self/status")
ROLLUP: Final = Path("/proc/self/smaps_rollup")
CLEAR_REFS: Final = Path("/proc/self/clear_refs")
RESET_PEAK: Final = "5"
"""Makes the kernel reset the peak of resident memory, see proc(5)."""

READINGS: Final = 101


@dataclass(frozen=True, slots=True)
class Setup:
    """The program of the step, and the worker's part in it."""

    device: int
    device_count: int
    threads: int
    seed: int
    default_dtype: torch.dtype
    program: StepProgram
    custom_ops: Registrations


class Stamps(NamedTuple):
    """Start and end of a step, and the clock before the first and after every stretch.

    The clock is the thread's CPU time, on several cores the wall clock; reading it takes
    ``read_ns``.
    """

    start_ns: int
    end_ns: int
    clock_ns: bytes  # int64
    read_ns: int


@dataclass(frozen=True, slots=True)
class Failed:
    """An instruction raised: the last line of the traceback, and whether memory ran out."""

    reason: str
    no_memory: bool


class MemoryCount:
    """Peak of what this process adds to the memory in use.

    Counted is what it has alone (tensors, workspaces of kernels, what libraries and Python keep),
    and the pages of shared memory that it touches. Not counted are files, as libraries are, and
    pages that it still shares with the process that forked it.
    """

    def __init__(self) -> None:
        """Count from here on."""
        self._uncounted_bytes: int | None = None
        self.begin()

    def begin(self, others_bytes: int = 0) -> None:
        """Count from here on, without ``others_bytes`` of what it has alone."""
        try:
            CLEAR_REFS.write_text(RESET_PEAK, encoding="ascii")
            alone_bytes = _sizes_bytes(ROLLUP)["Private_Dirty"]
        except (OSError, KeyError):  # a kernel without page monitor
            self._uncounted_bytes = None
        else:
            self._uncounted_bytes = resident_bytes() - alone_bytes + others_bytes

    def peak_bytes(self) -> int | None:
        """Return the peak since it began; None if the kernel does not tell."""
        if self._uncounted_bytes is None:
            return None
        sizes_bytes = _sizes_bytes(STATUS)
        return max(sizes_bytes["VmHWM"] - sizes_bytes["RssFile"] - self._uncounted_bytes, 0)


def resident_bytes() -> int:
    """Return the resident memory of this process that is neither files nor shared memory."""
    return _sizes_bytes(STATUS).get("RssAnon", 0)


def _sizes_bytes(path: Path) -> dict[str, int]:
    """Return the sizes in a file of proc(5) with lines such as "VmRSS:  123 kB"."""
    lines = (line.split() for line in path.read_text(encoding="ascii").splitlines())
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if line[-1:] == ["kB"]}


class Worker:
    """State of a worker process; its methods answer the messages of the pool.

    ``shared`` are the file descriptors of the arena, the board of positions, and the counters of
    all ordered pairs of devices.
    """

    def __init__(self, setup: Setup, shared: Sequence[int]) -> None:
        with torch.inference_mode(mode=False):
            setup.custom_ops.load()
        torch.set_num_threads(setup.threads)
        torch.manual_seed(setup.seed)
        torch.set_default_dtype(setup.default_dtype)
        arena, board, *counters = shared
        devices = range(setup.device_count)
        self.program = setup.program
        self.arena = Arena(setup.program, arena)
        self.signals = Signals(
            setup.device, dict(zip(permutations(devices, 2), counters, strict=True))
        )
        self.lists: dict[int, CompiledList] = {}
        positions = memoryview(mmap.mmap(board, 8 * len(devices))).cast("q")
        self.position = positions[setup.device : setup.device + 1]  # in the running list, shared
        # The thread's clock does not see the other threads of a core set.
        self.clock = time.thread_time_ns if setup.threads == 1 else time.perf_counter_ns
        self.read_ns = time_of_reading(self.clock)
        self.memory = MemoryCount()
        self.list_bytes: dict[int, int] = {}

    def load(self, number: int, instructions: Sequence[Instruction]) -> None:
        """Compile an instruction list under a number."""
        before_bytes = resident_bytes()
        self.lists[number] = CompiledList(instructions, self.program, self.arena, self.signals)
        self.list_bytes[number] = max(resident_bytes() - before_bytes, 0)

    def unload(self, number: int) -> None:
        """Drop a compiled list."""
        del self.lists[number], self.list_bytes[number]

    def run(self, number: int, *, each: bool) -> Stamps:
        """Run a list; read the clock after each instruction, or after each stretch of them."""
        compiled = self.lists[number]
        table, board, clock = compiled.table, self.position, self.clock
        parts = [[step] for step in compiled.steps] if each else compiled.stretches
        stamps = array("q", bytes(8 * (len(parts) + 1)))
        self.signals.reset()
        stamps[0] = clock()
        start_ns = time.perf_counter_ns()
        position = 0
        for part, steps in enumerate(parts, 1):
            for step in steps:
                board[0] = position
                step(table)
                position += 1
            stamps[part] = clock()
        end_ns = time.perf_counter_ns()
        return Stamps(start_ns, end_ns, stamps.tobytes(), self.read_ns)

    def count_memory(self, number: int) -> None:
        """Release unused memory, and count the peak of this list alone from here on."""
        self.arena.let_go()
        with contextlib.suppress(AttributeError):  # only glibc has it
            ctypes.CDLL(None).malloc_trim(0)
        others = (size for other, size in self.list_bytes.items() if other != number)
        self.memory.begin(sum(others))

    def peak_memory_bytes(self) -> int | None:
        """Return the peak since the start or :meth:`count_memory`; None if it is not known."""
        return self.memory.peak_bytes()

    def random_state(self) -> bytes:
        """Return the state of the random number generator."""
        return torch.get_rng_state().numpy().tobytes()

    def load_random_state(self, state: bytes) -> None:
        """Set the state of the random number generator."""
        torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def time_of_reading(clock: Callable[[], int]) -> int:
    """Return the nanoseconds that reading a clock takes: the median over many readings."""
    times = [clock() for _ in range(READINGS)]
    return int(statistics.median(after - before for before, after in pairwise(times)))


def serve(connection: Connection, shared: Sequence[int]) -> None:
    """Answer messages until the parent closes the pipe."""
    with torch.inference_mode():
        worker = Worker(connection.recv(), shared)
        connection.send(None)
        while True:
            try:
                method, arguments = connection.recv()
            except EOFError:
                return
            try:
                connection.send_bytes(pickle.dumps(getattr(worker, method)(**arguments)))
            except Exception as error:  # noqa: BLE001 - whatever an op raises goes to the parent
                last = traceback.format_exception_only(error)[-1].strip()
                connection.send(Failed(last, is_out_of_memory(error)))


def end_with_parent(descriptor: int) -> None:
    """End this process, whatever it waits for, when the parent's end of the pipe is closed.

    (A death signal would come too early: when the thread that started the worker ends.)
    """
    hang_up = select.poll()
    hang_up.register(descriptor, 0)
    hang_up.poll()
    os._exit(0)


def work(descriptor: int, cores: Sequence[int], shared: Sequence[int]) -> None:
    """Serve the pipe with this file descriptor, pinned to cores, in a process forked for it."""
    os.setpgid(0, 0)
    threading.Thread(target=end_with_parent, args=(descriptor,), daemon=True).start()
    os.sched_setaffinity(0, set(cores))
    serve(Connection(descriptor), shared)
