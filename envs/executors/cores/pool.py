"""The pool of pinned workers, on the parent's side: starts them, runs steps, detects failures.

Each worker has a random seed of its own, derived from a shared one (:func:`spread_seed`).
"""

from __future__ import annotations

import mmap
import os
import pickle
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from envs.executors.cores.arena import Arena
from envs.executors.cores.custom_ops import registrations
from envs.executors.cores.errors import WorkerError, WorkerMemoryError
from envs.executors.cores.fork_server import last_line
from envs.executors.cores.instruction_lists import (
    Give,
    Instruction,
    Receive,
    Run,
    Send,
    stretches,
)
from envs.executors.cores.processes import Holdings, WorkerProcess
from envs.executors.cores.worker import Failed, Setup, Stamps
from envs.hardware.cluster import Device
from envs.hardware.discover import cores_of, current_core
from graphs.extract.program import StepProgram


def spread_seed(seed: int, number: int) -> int:
    """Return the 64-bit seed of process ``number`` among those that share a seed.

    Neighboring seeds or numbers give unrelated seeds, so the seeds of a rank's workers can be
    spread from the spread seed of the rank.
    """
    [spread] = np.random.SeedSequence([seed % 2**64, number]).generate_state(1, np.uint64)
    return int(spread)


START_TIMEOUT_S: Final = 120.0
ENDING_S: Final = 30.0
"""Time that a worker which closed its pipe has to end, on a loaded machine."""
NOT_STARTED: Final = -1


@dataclass(frozen=True, slots=True)
class StepRun:
    """One run: wall seconds from the first start to the last end, and CPU seconds.

    ``read_cpu_s`` works the latter out, which takes too long for a step that nobody times.
    """

    wall_s: float
    read_cpu_s: Callable[[], tuple[NDArray[np.float64], ...]]

    @property
    def cpu_s(self) -> tuple[NDArray[np.float64], ...]:
        """The CPU seconds of every instruction of each device, (instructions,).

        They are without what reading the clock takes. Where only stretches were timed, the last
        instruction of each has all of them.
        """
        return self.read_cpu_s()


class _ListClock:
    """Converts the clock readings of a worker to the CPU seconds of its list."""

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self._last = np.array([part.stop - 1 for part in stretches(instructions)], np.intp)
        self._waits = np.array([isinstance(i, Receive) for i in instructions], np.bool_)

    def cpu_s(self, answer: Stamps) -> NDArray[np.float64]:
        """Return the CPU seconds of the list, see :attr:`StepRun.cpu_s`; waiting counts nothing."""
        times_ns = np.diff(np.frombuffer(answer.clock_ns, np.int64)) - answer.read_ns
        found = np.zeros(len(self._waits))
        found[self._last if len(times_ns) < len(found) else slice(None)] = times_ns.clip(1) * 1e-9
        found[self._waits] = 0.0
        return found


class WorkerPool:
    """One worker per device for one program. Use as a context manager.

    Any WorkerError closes the pool: other workers may be waiting for a signal that never comes. A
    pool that is dropped without being closed ends its workers, too.
    """

    def __init__(
        self,
        program: StepProgram,
        devices: Sequence[Device],
        *,
        step_timeout_s: float = 60.0,
        op_names: Sequence[str] = (),
    ) -> None:
        """Start the workers and wait until they are ready."""
        self._check_apart(devices)
        self._cores = [cores_of(device.name) for device in devices]
        self.program = program
        self.devices = tuple(devices)
        self.step_timeout_s = step_timeout_s
        self.op_names = op_names
        self._lists: dict[int, tuple[tuple[Instruction, ...], ...]] = {}
        self._clocked: dict[int, list[_ListClock]] = {}
        self._number = 0
        self._holdings = Holdings()
        self._workers = self._holdings.workers
        weakref.finalize(self, self._holdings.release)
        self._open = True
        self.arena = Arena(program)
        self._holdings.files.append(self.arena.file)
        try:
            self._load_constants()
            self._start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Return whether the workers have ended."""
        return not self._open

    def load(self, lists: Sequence[Sequence[Instruction]]) -> int:
        """Give every worker its list; return the number that runs them."""
        self._number += 1
        self._lists[self._number] = tuple(tuple(instructions) for instructions in lists)
        of_all = self._lists[self._number]
        self._clocked[self._number] = [_ListClock(instructions) for instructions in of_all]
        self._ask_all([("load", {"number": self._number, "instructions": own}) for own in of_all])
        return self._number

    def unload(self, number: int) -> None:
        """Let every worker drop the list with this number."""
        del self._lists[number], self._clocked[number]
        self._call("unload", number=number)

    def run(self, number: int, *, each: bool = False) -> StepRun:
        """Run one step on the devices that have instructions; its results are then in the arena.

        Times stretches of instructions; with ``each``, every instruction, which costs a
        microsecond each.
        """
        for d in range(len(self.devices)):
            self._board[d] = NOT_STARTED
        lists, clocks = self._lists[number], self._clocked[number]
        message = ("run", {"number": number, "each": each})
        answers = self._ask({d: message for d in self._by_start() if lists[d]}, number)
        ends_ns, starts_ns = zip(*((a.end_ns, a.start_ns) for a in answers.values()), strict=True)

        def read_cpu_s() -> tuple[NDArray[np.float64], ...]:
            return tuple(
                clock.cpu_s(answers[d]) if d in answers else np.zeros(0)
                for d, clock in enumerate(clocks)
            )

        return StepRun((max(ends_ns) - min(starts_ns)) * 1e-9, read_cpu_s)

    def count_memory(self, number: int) -> None:
        """Release unused memory in all workers, and count their peaks from here on.

        Of the instruction lists that they hold, only those with this number count.
        """
        self._call("count_memory", number=number)

    def peak_memory_bytes(self) -> dict[str, int]:
        """Return the peak of each worker's memory since its start or :meth:`count_memory`.

        It is what the worker has alone: tensors, workspaces of kernels, what libraries and Python
        keep, from before the first step on. Shared memory counts in every worker that touches it:
        parameters that it reads, values that it sends or receives. By device name; {} where the
        kernel does not tell.
        """
        names = [device.name for device in self.devices]
        peaks: list[int | None] = self._call("peak_memory_bytes")
        return {name: peak for name, peak in zip(names, peaks, strict=True) if peak is not None}

    def random_state(self) -> list[torch.Tensor]:
        """Return the state of each worker's random number generator, uint8, by device."""
        states: list[bytes] = self._call("random_state")
        return [torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in states]

    def load_random_state(self, states: Sequence[torch.Tensor]) -> None:
        """Load the states from :meth:`random_state`."""
        if len(states) != len(self._workers):
            raise ValueError(f"{len(states)} states are not for {len(self._workers)} workers")
        self._ask_all([("load_random_state", {"state": s.numpy().tobytes()}) for s in states])

    def close(self) -> None:
        """End the workers at once; safe to call twice."""
        self._open = False
        self._holdings.release()
        self.arena.close()

    def _check_apart(self, devices: Sequence[Device]) -> None:
        """Raise a ValueError if devices overlap, whose ops the workers would run at once."""
        cores = [core for device in devices for core in cores_of(device.name)]
        if len(set(cores)) < len(cores):
            names = ", ".join(device.name for device in devices)
            raise ValueError(f"devices {names} overlap: every core can belong to one device only")

    def _load_constants(self) -> None:
        for source in self.program.sources:
            if source.role == "constant" and source.tensor is not None:
                self.arena.value(source.value).copy_(source.tensor)
            elif source.role == "tangent":
                self.arena.value(source.value).fill_(1.0)

    def _start(self) -> None:
        count = len(self.devices)
        board = self._kept(os.memfd_create("placer-board", os.MFD_CLOEXEC))
        os.ftruncate(board, 8 * count)
        self._board = memoryview(mmap.mmap(board, 8 * count)).cast("q")
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
        counters = [self._kept(os.eventfd(0, flags)) for _ in range(count * (count - 1))]
        shared = [self.arena.file.fileno(), board, *counters]
        for device, its_cores in zip(self.devices, self._cores, strict=True):
            self._workers.append(WorkerProcess(device, its_cores, shared, START_TIMEOUT_S))
        without_constants = replace(  # the arena holds them
            self.program,
            sources=tuple(replace(source, tensor=None) for source in self.program.sources),
        )
        custom_ops = registrations(self.program)
        seed = torch.initial_seed()
        setups = [
            Setup(
                *(d, count, len(its_cores), spread_seed(seed, d), torch.get_default_dtype()),
                *(without_constants, custom_ops),
            )
            for d, its_cores in enumerate(self._cores)
        ]
        self._ask(dict(enumerate(setups)), timeout_s=START_TIMEOUT_S)
        for worker in self._workers:
            worker.bound(self.step_timeout_s)

    def _kept(self, descriptor: int) -> int:
        """Return the descriptor, which will be closed with the pool."""
        self._holdings.files.append(os.fdopen(descriptor, "rb", buffering=0))
        return descriptor

    def _by_start(self) -> list[int]:
        """Return the devices in the order in which their workers start a step.

        The worker of the core that this process runs on comes last: it may take the core at once.
        """
        here = current_core()
        return sorted(range(len(self.devices)), key=lambda d: here in self._cores[d])

    def _call(self, method: str, **arguments: Any) -> list[Any]:
        """Call a method of every worker; return the results by device."""
        return self._ask_all([(method, arguments)] * len(self._workers))

    def _ask_all(self, messages: Sequence[object]) -> list[Any]:
        """Send every worker its message; return the answers by device."""
        answers = self._ask(dict(enumerate(messages)))
        return [answers[d] for d in range(len(self._workers))]

    def _ask(
        self,
        messages: Mapping[int, object],
        number: int | None = None,
        timeout_s: float | None = None,
    ) -> dict[int, Any]:
        """Send workers a message each, in this order, and return the answers by device.

        ``number`` is that of the list that runs.
        """
        self.check_open()
        try:
            return self._exchange(messages, number, timeout_s or self.step_timeout_s)
        except BaseException:
            self.close()  # after an interruption an old answer would be taken for the next one
            raise

    def check_open(self) -> None:
        """Raise WorkerError if the workers have ended, with which the arena is gone."""
        if self.closed:
            raise WorkerError("the workers of this pool have ended")

    def _exchange(
        self, messages: Mapping[int, object], number: int | None, timeout_s: float
    ) -> dict[int, Any]:
        for d, message in messages.items():
            try:
                self._workers[d].connection.send_bytes(pickle.dumps(message))  # faster than send
            except BlockingIOError:
                raise self._hung([d], number, timeout_s) from None
            except OSError:
                raise self._failure(self._workers[d], "died", number) from None
        deadline = time.monotonic() + timeout_s
        answers: dict[int, Any] = {}
        open_ends = {id(self._workers[d].connection): d for d in messages}
        while len(answers) < len(messages):
            waiting = [self._workers[d].connection for d in messages if d not in answers]
            # A single worker is waited for by its pipe, which has the same limit.
            alone = len(messages) == 1
            ready = waiting if alone else wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._hung([open_ends[id(c)] for c in waiting], number, timeout_s)
            for d in (open_ends[id(connection)] for connection in ready):
                answers[d] = self._answer(d, number, timeout_s)
        return answers

    def _answer(self, device: int, number: int | None, timeout_s: float) -> Any:
        worker = self._workers[device]
        try:
            answer = worker.connection.recv()
        except BlockingIOError:  # it stopped in the middle
            raise self._hung([device], number, timeout_s) from None
        except (EOFError, OSError):
            raise self._failure(worker, "died", number) from None
        if isinstance(answer, Failed):
            failure = self._failure(worker, f"failed: {answer.reason}", number)
            raise WorkerMemoryError(str(failure)) if answer.no_memory else failure
        return answer

    def _hung(self, late: Sequence[int], number: int | None, timeout_s: float) -> WorkerError:
        """Blame one of the late workers that does not wait for a value that was never sent."""
        guilty = next((d for d in late if number is None or not self._waits(number, d)), late[0])
        text = f"did not answer within {timeout_s:g} s"
        return self._failure(self._workers[guilty], text, number)

    def _waits(self, number: int, device: int) -> bool:
        """Return whether a worker rightly waits: its sender has not come to the send."""
        instruction = self._instruction_at(number, device)
        if not isinstance(instruction, Receive):
            return False
        sender = self._lists[number][instruction.source]
        sent = {s.value: i for i, s in enumerate(sender) if isinstance(s, Send)}
        return self._board[instruction.source] <= sent[instruction.value]

    def _failure(self, worker: WorkerProcess, what: str, number: int | None) -> WorkerError:
        """Close the pool and return an error that says what happened where."""
        d = self._workers.index(worker)
        text = f"the worker of {worker.device.name} {what}"
        if number is not None:
            text += f"; its last op was {self._op_at(number, d)}"
        if what == "died":
            worker.process.wait(ENDING_S)
        status = worker.process.poll()
        if status is not None and status < 0:
            text += f" (signal {-status})"
        if stderr := last_line(worker.errors):
            text += f"; it wrote: {stderr[:300]}"
        self.close()
        return WorkerError(text)

    def _instruction_at(self, number: int, device: int) -> Instruction | None:
        """Return the instruction that a worker runs, or was the last to run."""
        instructions, position = self._lists[number][device], self._board[device]
        return instructions[position] if 0 <= position < len(instructions) else None

    def _op_at(self, number: int, device: int) -> str:
        match self._instruction_at(number, device):
            case None:
                return "none"
            case Run(call):
                return self._op_name(call)
            case Give(result):
                returned = self.program.results[result]
                return f"handing back the {returned.role} {returned.name}"
            case instruction:
                producer = self.program.producers()[instruction.value]
                return f"moving the output of {self._op_name(producer)}"

    def _op_name(self, call: int) -> str:
        op, target = self.program.calls[call].op, self.program.calls[call].target
        return self.op_names[op] if op < len(self.op_names) else target
