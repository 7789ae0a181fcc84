"""Ranks on this machine for measurements: processes that this one starts, in one process group.

Ranks on cores are forked. A fork has the model, whatever it is made of, and its extraction: nothing
is imported, pickled or extracted again. It is made from a thread of its own, since OpenMP's threads
belong to the thread that used them, and would be missing in the copy. A fork cannot use CUDA if
this process does, so ranks on GPUs are new processes of Python.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

import torch
import torch.distributed as dist

from envs.executors.process_settings import end_idle_threads
from graphs.strict_json import brief
from graphs.text import first_line
from placer.parallel.processes import batch_threads

Handler: TypeAlias = Callable[[Any], Any]
"""Answers a request on one rank; what it takes and returns can be pickled."""
START_TIMEOUT_S: Final = 300.0
"""Limit on the time until all ranks are ready, on a loaded machine."""


class RankError(RuntimeError):
    """A rank failed, or does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Names what one rank alone uses.

    Attributes:
        cores: the cores that it is pinned to, with as many of torch's threads; if there are none,
            it has those of this process.
        gpus: the only GPUs that it sees, as ``CUDA_VISIBLE_DEVICES`` names them; if there are none,
            it sees those of this process.
    """

    cores: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Rank:
    """One rank, identified by a pidfd, its pipe, and what waits until it has ended."""

    descriptor: int
    pipe: Connection
    reap: Callable[[], object]

    @classmethod
    def watched(cls, pid: int, pipe: Connection, reap: Callable[[], object]) -> _Rank:
        """Return the rank of a process that was just started; without a pidfd it ends at once."""
        try:
            return cls(os.pidfd_open(pid), pipe, reap)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            reap()
            raise

    def end(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)
        self.reap()
        os.close(self.descriptor)
        self.pipe.close()


class LocalRanks:
    """Ranks on cores or GPUs of this machine that answer requests. Use as a context manager.

    They end with this object, or with this process. After a RankError they are of no use.
    """

    def __init__(
        self,
        seats: Sequence[Seat],
        work: Callable[[], Handler],
        *,
        backend: str = "gloo",
        forked: bool = True,
        timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Start a rank per seat.

        Args:
            seats: what each rank has to itself.
            work: called on every rank, when all have joined; returns what answers requests. Without
                forks it is a function of a module.
            backend: that of the process group.
            forked: whether ranks are copies of this process, which must not use CUDA.
            timeout_s: limit on collectives, and on the time until all ranks are ready.

        Raises:
            RankError: a rank did not start.
            OSError: there are too many processes or open files.
        """
        if dist.is_initialized():
            raise RankError("this process is itself a rank of a process group")
        self._ranks: list[_Rank] = []
        self._folder = tempfile.TemporaryDirectory()
        place = _Place(
            seats=tuple(seats),
            store=str(Path(self._folder.name, "store")),
            backend=backend,
            timeout_s=timeout_s,
        )
        # OpenMP counts this process's threads in the copies, too; with more of them than cores the
        # threads of a rank would sleep after every op.
        end_idle_threads()
        try:
            start = self._forked if forked else self._new
            for number in range(len(seats)):
                self._start(start, _Task(os.getpid(), place, number, work))
            self._answers(timeout_s)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, request: Any, timeout_s: float = START_TIMEOUT_S) -> list[Any]:
        """Return the answers of all ranks to one request.

        Raises:
            RankError: a rank failed, or did not answer in time.
        """
        for rank in self._ranks:
            try:
                rank.pipe.send(request)
            except OSError as error:
                raise RankError("a rank has ended") from error
        return self._answers(timeout_s)

    def close(self) -> None:
        """End the ranks; a Ctrl-C in between is raised when all have ended."""
        interrupt: KeyboardInterrupt | None = None
        while self._ranks:
            try:
                self._ranks[-1].end()
                self._ranks.pop()
            except KeyboardInterrupt as error:
                interrupt = error
            except (ChildProcessError, OSError):  # it has ended before, as when interrupted here
                self._ranks.pop()
        self._folder.cleanup()
        if interrupt is not None:
            raise interrupt

    def _start(self, start: _Start, task: _Task) -> None:
        ours, theirs = Pipe()
        failures: list[BaseException] = []

        def run() -> None:
            try:
                self._ranks.append(start(task, ours, theirs))
            except BaseException as error:  # noqa: BLE001  # raised below
                failures.append(error)

        thread = threading.Thread(target=run, name="start of a rank")
        thread.start()
        try:
            thread.join()
        finally:
            thread.join()  # a Ctrl-C does not lose the rank that just starts
            theirs.close()
        if failures:
            ours.close()
            raise failures[0]

    def _forked(self, task: _Task, ours: Connection, theirs: Connection) -> _Rank:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads
            pid = os.fork()
        if not pid:
            for rank in self._ranks:
                rank.pipe.close()
            ours.close()
            _serve(task, theirs)
        return _Rank.watched(pid, ours, lambda: os.waitpid(pid, 0))

    @staticmethod
    def _new(task: _Task, ours: Connection, theirs: Connection) -> _Rank:
        # The rank must find this package, whatever is in its working directory (hence -P); last on
        # the path, so that files beside the package hide no other module.
        root = str(Path(__file__).resolve().parents[2])
        start = (
            f"import sys; sys.path.append({root!r}); "
            "import placer.parallel.local_ranks as ranks; ranks.serve_from(int(sys.argv[1]))"
        )
        gpus = ",".join(task.place.seats[task.number].gpus)
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", start, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | ({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}),
            process_group=0,  # Ctrl-C is for this process
        )
        theirs.close()  # or a task that nobody reads would wait for room in the pipe
        rank = _Rank.watched(process.pid, ours, process.wait)
        try:
            ours.send(task)
        except OSError:  # it has ended: seen when it should answer
            pass
        except Exception as error:
            rank.end()
            raise RankError(f"its task cannot be sent: {first_line(error)}") from error
        return rank

    def _answers(self, timeout_s: float) -> list[Any]:
        """Return one answer of each rank; the first failure ends the wait."""
        deadline, answers = time.monotonic() + timeout_s, dict[Any, Any]()
        pipes = [rank.pipe for rank in self._ranks]
        while waiting := [pipe for pipe in pipes if pipe not in answers]:
            ready = wait(waiting, max(deadline - time.monotonic(), 0.0))
            if not ready:
                raise RankError(f"a rank did not answer for {timeout_s:g} s")
            for pipe in ready:
                answers[pipe] = _answer(pipe)
        return [answers[pipe] for pipe in pipes]


def _answer(pipe: Any) -> Any:
    try:
        ok, answer = pipe.recv()
    except (EOFError, OSError):
        raise RankError("a rank died") from None
    if not ok:
        raise RankError(answer)
    return answer


# --- the side of a rank


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    seats: tuple[Seat, ...]
    store: str
    backend: str
    timeout_s: float

    def enter(self, number: int) -> None:
        """Take the seat of this rank, and join the group."""
        seat = self.seats[number]
        if seat.cores:
            os.sched_setaffinity(0, seat.cores)
            torch.set_num_threads(len(seat.cores))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with batch_threads():
            dist.init_process_group(
                self.backend,
                store=dist.FileStore(self.store, len(self.seats)),  # type: ignore[attr-defined]  # torch hides it
                rank=number,
                world_size=len(self.seats),
                timeout=timedelta(seconds=self.timeout_s),
            )


@dataclass(frozen=True, slots=True)
class _Task:
    """Tells a rank at its start what it is; a new process reads it from its pipe."""

    parent: int
    place: _Place
    number: int
    work: Callable[[], Handler]


_Start: TypeAlias = Callable[[_Task, Connection, Connection], _Rank]


def serve_from(descriptor: int) -> NoReturn:
    """Be the rank that the first message of a pipe describes; in a new process."""
    pipe: Connection = Connection(descriptor)
    _serve(pipe.recv(), pipe)


def _serve(task: _Task, pipe: Connection) -> NoReturn:
    """Answer requests until the pipe is closed; nothing of the parent's is cleaned up here."""
    gc.freeze()
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nothing, stream)
        threading.Thread(target=_end_with, args=(task.parent,), daemon=True).start()
        task.place.enter(task.number)
        handler = task.work()
        pipe.send((True, None))
        while True:
            pipe.send((True, handler(pipe.recv())))
    except (EOFError, BrokenPipeError):
        pass
    except BaseException as error:  # noqa: BLE001  # the parent reports it
        with suppress(OSError):
            pipe.send((False, brief(first_line(error))))
    finally:
        os._exit(0)


def _end_with(parent: int) -> None:
    """End this process when its parent ends."""
    with suppress(ProcessLookupError):
        ended = select.poll()
        ended.register(os.pidfd_open(parent), select.POLLIN)
        if os.getppid() == parent:
            ended.poll()
    os._exit(0)
