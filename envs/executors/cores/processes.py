"""Worker processes of a pool and the files they share, released whatever happens."""

from __future__ import annotations

import os
import socket
import struct
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Pipe
from typing import IO

from envs.executors.cores.fork_server import CORE_WORKER, fork_worker
from envs.hardware.cluster import Device


class WorkerProcess:
    """One started worker: its device, its process, the pipe to it and its stderr."""

    def __init__(
        self,
        device: Device,
        cores: Sequence[int],
        shared: Sequence[int],
        timeout_s: float,
        module: str = CORE_WORKER,
    ) -> None:
        """Start the worker.

        Args:
            device: device that it drives.
            cores: cores to pin it to.
            shared: file descriptors that it inherits.
            timeout_s: see :meth:`bound`.
            module: see :func:`fork_worker`.
        """
        self.device = device
        self.connection, theirs = Pipe()
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the worker
        try:
            self.bound(timeout_s)
            self.process = fork_worker(
                cores, theirs.fileno(), self.errors.fileno(), shared, timeout_s, module
            )
        except BaseException:
            self.connection.close()  # a worker that did start ends with its pipe
            self.errors.close()
            raise
        finally:
            theirs.close()

    def bound(self, timeout_s: float) -> None:
        """Limit how long a send or receive may block: it then raises BlockingIOError.

        A worker that stands still while the pipe is full would block the parent forever.
        """
        microseconds = max(round(timeout_s * 1e6), 1)  # 0 would mean for ever
        limit = struct.pack("ll", *divmod(microseconds, 1_000_000))
        with socket.socket(fileno=os.dup(self.connection.fileno())) as pipe:
            pipe.setblocking(True)  # whatever socket.setdefaulttimeout says
            pipe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            pipe.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def end(self) -> None:
        """Kill the worker and release it; safe to call again, also when interrupted."""
        self.process.kill()
        self.process.wait()
        self.process.close()
        self.connection.close()
        self.errors.close()


class Holdings:
    """Resources that a pool must release: processes, and files (which may be closed repeatedly)."""

    def __init__(self) -> None:
        self.workers: list[WorkerProcess] = []
        self.files: list[IO[bytes]] = []
        self._owner = os.getpid()

    def release(self) -> None:
        """End the workers and close the files; a Ctrl-C in between is raised when all is done."""
        if os.getpid() != self._owner:  # a forked copy
            return
        interrupt: KeyboardInterrupt | None = None
        while self.workers or self.files:
            try:
                self._release()
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _release(self) -> None:
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.end()
        for file in self.files:
            file.close()
        self.workers.clear()
        self.files.clear()
