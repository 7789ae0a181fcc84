"""Ranks on this machine for measurements: forked copies of this process in one process group.

A fork has the model, whatever it is made of, and its extraction: nothing is imported, pickled or
extracted again. It is made from a thread of its own, since OpenMP's threads belong to the thread
that used them, and would be missing in the copy.
"""

from __future__ import annotations

import gc
import os
import select
import signal
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
from placer.parallel.processes import batch_threads

Handler: TypeAlias = Callable[[Any], Any]
"""Answers a request on one rank; what it takes and returns can be pickled."""
START_TIMEOUT_S: Final = 300.0
"""Limit on the time until all ranks are ready, on a loaded machine."""


class RankError(RuntimeError):
    """A rank failed, or does not answer."""


@dataclass(frozen=True, slots=True)
class _Rank:
    """One forked rank, identified by a pidfd, and its pipe."""

    pid: int
    descriptor: int
    pipe: Connection

    def end(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.descriptor)
        self.pipe.close()


class LocalRanks:
    """Ranks pinned to cores of this machine that answer requests. Use as a context manager.

    They end with this object, or with this process. After a RankError they are of no use.
    """

    def __init__(
        self,
        cores: Sequence[Sequence[int]],
        work: Callable[[], Handler],
        *,
        backend: str = "gloo",
        timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Start a rank per set of cores, each with as many of torch's threads.

        Args:
            cores: the cores of each rank.
            work: called on every rank, when all have joined; returns what answers requests.
            backend: that of the process group.
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
            cores=tuple(map(tuple, cores)),
            store=str(Path(self._folder.name, "store")),
            backend=backend,
            timeout_s=timeout_s,
        )
        # OpenMP counts this process's threads in the copies, too; with more of them than cores the
        # threads of a rank would sleep after every op.
        end_idle_threads()
        try:
            for number in range(len(cores)):
                self._start(place, number, work)
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

    def _start(self, place: _Place, number: int, work: Callable[[], Handler]) -> None:
        ours, theirs = Pipe()
        parent = os.getpid()

        def fork() -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads
                pid = os.fork()
            if not pid:
                for rank in self._ranks:
                    rank.pipe.close()
                ours.close()
                _serve(parent, place, number, theirs, work)
            self._ranks.append(_Rank(pid, os.pidfd_open(pid), ours))

        thread = threading.Thread(target=fork, name="fork")
        thread.start()
        try:
            thread.join()
        finally:
            thread.join()  # a Ctrl-C does not lose the rank that just starts
            theirs.close()
        if len(self._ranks) <= number:
            ours.close()
            raise RankError("the system does not start another process")

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
    cores: tuple[tuple[int, ...], ...]
    store: str
    backend: str
    timeout_s: float

    def enter(self, number: int) -> None:
        """Pin this process, and join the group."""
        cores = self.cores[number]
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with batch_threads():
            dist.init_process_group(
                self.backend,
                store=dist.FileStore(self.store, len(self.cores)),  # type: ignore[attr-defined]  # torch hides it
                rank=number,
                world_size=len(self.cores),
                timeout=timedelta(seconds=self.timeout_s),
            )


def _serve(
    parent: int, place: _Place, number: int, pipe: Connection, work: Callable[[], Handler]
) -> NoReturn:
    """Answer requests until the pipe is closed; nothing of the parent's is cleaned up here."""
    gc.freeze()
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nothing, stream)
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
        place.enter(number)
        handler = work()
        pipe.send((True, None))
        while True:
            pipe.send((True, handler(pipe.recv())))
    except (EOFError, BrokenPipeError):
        pass
    except BaseException as error:  # noqa: BLE001  # the parent reports it
        with suppress(OSError):
            pipe.send((False, brief(str(error).strip().partition("\n")[0] or type(error).__name__)))
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
