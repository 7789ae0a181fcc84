"""The workers of some devices, on the parent's side: starts them, runs steps, detects failures."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from types import FrameType
from typing import Any, Final

import torch

from envs.executors.cores.custom_ops import Registrations
from envs.executors.cores.errors import WorkerError, WorkerMemoryError
from envs.executors.cores.fork_server import last_line
from envs.executors.cores.pool import spread_seed
from envs.executors.cores.processes import Holdings, WorkerProcess
from envs.executors.device_workers.sharing import Sharing
from envs.executors.device_workers.sources import StepSources
from envs.executors.device_workers.transport import HostMemory
from envs.executors.device_workers.worker import DeviceFailed, Peaks, Setup, Start, packed
from envs.hardware.cluster import Device
from graphs.optimizer import Optimizer

MODULE: Final = "envs.executors.device_workers.worker"
START_TIMEOUT_S: Final = 120.0
ENDING_S: Final = 30.0


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Let Ctrl-C have an effect after a block; a second one has it at once.

    Outside the main thread, where Python handles no signals, this does nothing.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    is_pending = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal is_pending
        again, is_pending = is_pending, not is_pending
        if again:
            before(number, frame)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if is_pending:
            signal.raise_signal(signal.SIGINT)


class DeviceMemoryError(WorkerMemoryError):
    """A device ran out of memory; ``peaks`` are those of the GPU, if its worker had begun."""

    def __init__(self, message: str, peaks: Mapping[torch.device, Peaks]) -> None:
        super().__init__(message)
        self.peaks = peaks


class DevicePool:
    """One worker per device for one step. Any WorkerError closes the pool."""

    def __init__(
        self,
        sources: StepSources,
        devices: Sequence[torch.device],
        *,
        constants: Mapping[int, torch.Tensor],
        dtype: str,
        optimizer: Optimizer | None,
        custom_ops: Registrations,
        limits: Mapping[torch.device, int],
        sharing: Sharing,
        step_timeout_s: float,
    ) -> None:
        """Start the workers and wait until they are ready.

        Raises:
            WorkerError: a worker cannot use its device, or did not start.
            OSError: there is too little memory, or too many processes or open files.
        """
        self.devices = tuple(devices)
        self.step_timeout_s = step_timeout_s
        self.steps = 0
        self._open = True
        self._holdings = Holdings()
        self._workers = self._holdings.workers
        weakref.finalize(self, self._holdings.release)
        self.memory = HostMemory(sources.edges, self.devices)
        file = os.memfd_create("placer-devices", os.MFD_CLOEXEC)
        self._holdings.files.append(os.fdopen(file, "rb", buffering=0))
        seed, threads = torch.initial_seed(), torch.get_num_threads()
        try:
            os.posix_fallocate(file, 0, self.memory.size_bytes)
            self.memory.map(file)
            setups = [
                Setup(
                    number=number,
                    devices=self.devices,
                    threads=threads if device.type == "cpu" else 1,
                    seed=spread_seed(seed, number),
                    edges=sources.edges,
                    source=sources.devices[number],
                    constants=constants,
                    dtype=dtype,
                    default_dtype=torch.get_default_dtype(),
                    optimizer=optimizer,
                )
                for number, device in enumerate(self.devices)
            ]
            cores = sorted(os.sched_getaffinity(0))
            for device in self.devices:
                of_worker = Device(name=str(device), kind=str(device), memory_bytes=0)
                self._workers.append(
                    WorkerProcess(of_worker, cores, [file], START_TIMEOUT_S, MODULE)
                )
            self.ask(
                [
                    Start(custom_ops, sharing, device, limits.get(device), packed(setup))
                    for device, setup in zip(self.devices, setups, strict=True)
                ],
                START_TIMEOUT_S,
            )
            self._connect(sources)
        except BaseException:
            self.close()
            raise
        for worker in self._workers:
            worker.bound(step_timeout_s)

    @property
    def closed(self) -> bool:
        """Return whether the workers have ended."""
        return not self._open

    def run(self, learning_rate: float) -> None:
        """Run one step on all devices; its results are then in the memory."""
        self.steps += 1
        self.ask(
            [("run", {"step": self.steps, "learning_rate": learning_rate})] * len(self.devices)
        )

    def ask(self, messages: Sequence[object], timeout_s: float | None = None) -> list[Any]:
        """Let every worker run a method, given as (name, arguments); return what they return.

        Ctrl-C has an effect when all have answered, and the workers go on; a second one ends them.
        """
        self.check_open()
        timeout_s = timeout_s or self.step_timeout_s
        answers: dict[int, Any] = {}
        with deferred_interrupt():
            try:
                for number, message in enumerate(messages):
                    self._send(number, message)
                self._collect(answers, timeout_s)
            except BaseException:
                self.close()  # an old answer would be taken for the next one
                raise
        return [answers[number] for number in range(len(self._workers))]

    def ask_one(self, number: int, method: str, **arguments: Any) -> Any:
        """Let one worker run a method; Ctrl-C ends the workers, unless the caller defers it."""
        self.check_open()
        try:
            self._send(number, (method, arguments))
            return self._answer(number)
        except BaseException:
            self.close()
            raise

    def check_open(self) -> None:
        """Raise WorkerError if the workers have ended."""
        if self.closed:
            raise WorkerError("the workers of this placed step have ended; place it again")

    def close(self) -> None:
        """End the workers at once; safe to call twice."""
        self._open = False
        self._holdings.release()

    def _connect(self, sources: StepSources) -> None:
        """Let GPUs open the memory of those to which they send."""
        shared = self.ask([("shared", {})] * len(self.devices), START_TIMEOUT_S)
        handles: list[dict[int, Any]] = [{} for _ in self.devices]
        for of_device in shared:
            for edge, handle in of_device.items():
                handles[sources.edges[edge].source][edge] = handle
        self.ask([("open", {"handles": own}) for own in handles], START_TIMEOUT_S)

    def _collect(self, answers: dict[int, Any], timeout_s: float) -> None:
        """Add the answers of all workers that have not answered yet, by number."""
        deadline_s = time.monotonic() + timeout_s
        numbers = {id(w.connection): n for n, w in enumerate(self._workers)}
        while len(answers) < len(self._workers):
            waiting = [w.connection for n, w in enumerate(self._workers) if n not in answers]
            ready = wait(waiting, max(0.0, deadline_s - time.monotonic()))
            if not ready:
                late = numbers[id(waiting[0])]
                raise self._failure(late, f"did not answer within {timeout_s:g} s")
            for number in (numbers[id(connection)] for connection in ready):
                answers[number] = self._answer(number)

    def _send(self, number: int, message: object) -> None:
        try:
            self._workers[number].connection.send_bytes(packed(message))
        except BlockingIOError:
            raise self._failure(number, "does not read its messages") from None
        except OSError:
            raise self._failure(number, "died") from None

    def _answer(self, number: int) -> Any:
        try:
            answer = pickle.loads(self._workers[number].connection.recv_bytes())
        except BlockingIOError:
            raise self._failure(number, "stopped in the middle of an answer") from None
        except (EOFError, OSError):
            raise self._failure(number, "died") from None
        if isinstance(answer, DeviceFailed):
            failure = self._failure(number, f"failed: {answer.reason}")
            if not answer.no_memory:
                raise failure
            peaks = {} if answer.peaks is None else {self.devices[number]: answer.peaks}
            raise DeviceMemoryError(str(failure), peaks)
        return answer

    def _failure(self, number: int, what: str) -> WorkerError:
        """Close the pool and return an error that says what happened where."""
        worker = self._workers[number]
        text = f"the worker of {worker.device.name} {what}"
        if what == "died":
            worker.process.wait(ENDING_S)
            status = worker.process.poll()
            if status is not None and status < 0:
                text += f" (signal {-status})"
            if stderr := last_line(worker.errors):
                text += f"; it wrote: {stderr[:300]}"
        self.close()
        return WorkerError(text)
