"""A process that has imported what workers need, and forks each worker within milliseconds.

Importing torch takes more than a second of CPU time, and a search starts workers many times. The
first worker of a process starts the server, which ends with that process. It runs no op and no
thread, so its forks are safe.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import gc
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Final, NoReturn

MALLOC: Final = {
    "MALLOC_MMAP_MAX_": "0",  # page faults are a fifth of a step when tensors come from mmap
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
    "MALLOC_ARENA_MAX": "1",
    # Freed blocks merge at once: small ones that malloc sets aside lie in the way of tensors, and
    # the heap grows from step to step.
    "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0",
}
CORE_WORKER: Final = "envs.executors.cores.worker"
MOST_FDS: Final = 253
"""Descriptors that one message may carry, SCM_MAX_FD of Linux."""
MESSAGE_BYTES: Final = 1 << 16
REPORT_S: Final = 30.0
"""Time that the server has to report the exit status of a worker that ended."""
LOST: Final = 255
"""Exit status of a worker whose server ended first."""


class ServerEndedError(OSError):
    """The server is gone."""


class ForkedProcess:
    """One forked worker, identified by a pidfd, which never refers to another process."""

    def __init__(self, server: ForkServer, pid: int, descriptor: int) -> None:
        """Take a process id and its pidfd, which is closed with :meth:`close`."""
        self.pid = pid
        self._server = server
        self._descriptor = descriptor
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return the exit status (if killed, minus the signal), or None while it runs."""
        if self._status is None and self.wait(0.0):
            self._status = self._server.status_of(self.pid)
        return self._status

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait up to the timeout, by default forever; return whether the process has ended."""
        if self._descriptor < 0:
            return True
        ended = select.poll()
        ended.register(self._descriptor, select.POLLIN)
        return bool(ended.poll(None if timeout_s is None else 1000 * timeout_s))

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended or is closed."""
        if self._descriptor < 0:
            return
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def close(self) -> None:
        """Close the pidfd; safe to call again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class ForkServer:
    """The parent's side of the server; one per process, see :func:`fork_worker`."""

    def __init__(self) -> None:
        """Start the server's process; it imports while this process goes on."""
        self.owner = os.getpid()
        self._statuses: dict[int, int] = {}
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the server
        try:
            self._process = _started(theirs, self._errors)
        except BaseException:
            self._socket.close()
            self._errors.close()
            raise
        finally:
            theirs.close()

    @property
    def runs(self) -> bool:
        """Return whether this process started the server and it has not ended."""
        return self.owner == os.getpid() and self._process.poll() is None

    def fork(
        self,
        cores: Sequence[int],
        pipe: int,
        errors: int,
        shared: Sequence[int],
        timeout_s: float,
        module: str,
    ) -> ForkedProcess:
        """Fork a worker; see :func:`fork_worker`."""
        with self._lock:
            try:
                self._socket.settimeout(timeout_s)
                _send(self._socket, (module, *cores), [pipe, errors, *shared])
                while True:
                    message, received = _receive(self._socket)
                    if received:
                        return ForkedProcess(self, message[0], received[0])
                    self._note(message)
            except BaseException as error:
                reason = last_line(self._errors)
                self.end()  # a late answer would be taken for the next one
                if isinstance(error, EOFError | ConnectionError):
                    ended = reason or "the process that starts workers ended"
                    raise ServerEndedError(ended) from None
                raise

    def status_of(self, pid: int) -> int:
        """Return the exit status of a worker that has ended."""
        deadline = time.monotonic() + REPORT_S
        with self._lock:
            while pid not in self._statuses:
                try:
                    self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
                    message, _ = _receive(self._socket)
                except (EOFError, OSError):
                    return LOST
                self._note(message)
            return self._statuses.pop(pid)

    def end(self) -> None:
        """Kill the server; its workers continue."""
        self._socket.close()
        self._process.kill()
        self._process.wait()
        self._errors.close()

    def _note(self, message: tuple[int, ...]) -> None:
        pid, status = message
        self._statuses[pid] = status


def last_line(stderr: IO[bytes]) -> str:
    """Return the last line that a process wrote to its stderr, or ""."""
    stderr.seek(0)
    lines = stderr.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


_server: ForkServer | None = None
_starting = threading.Lock()


def fork_worker(
    cores: Sequence[int],
    pipe: int,
    errors: int,
    shared: Sequence[int],
    timeout_s: float,
    module: str = CORE_WORKER,
) -> ForkedProcess:
    """Fork a worker that runs the function ``work`` of a module.

    Args:
        cores: cores to pin the worker to.
        pipe: file descriptor of its end of the pipe.
        errors: file descriptor that becomes its stderr.
        shared: file descriptors that it inherits, in this order.
        timeout_s: how long the server may take, imports included.
        module: its ``work`` takes the pipe, the cores and the shared descriptors.
    """
    request = (cores, pipe, errors, shared, timeout_s, module)
    try:
        return running_server().fork(*request)
    except ServerEndedError:  # it may just have been killed: try another one
        return running_server().fork(*request)


def running_server() -> ForkServer:
    """Return the server of this process; start it if it does not run."""
    global _server  # noqa: PLW0603 - one server serves all pools of a process
    with _starting:
        if _server is None or not _server.runs:
            _server = ForkServer()
            atexit.register(_server.end)
        return _server


def _started(theirs: socket.socket, errors: IO[bytes]) -> subprocess.Popen[bytes]:
    # The server must find this package, whatever is in its working directory (hence -P); last on
    # the path, so that files beside the package hide no other module.
    root = str(Path(__file__).resolve().parents[3])
    start = (
        f"import sys; sys.path.append({root!r}); "
        "import envs.executors.cores.fork_server as server; server.serve(int(sys.argv[1]))"
    )
    return subprocess.Popen(
        [sys.executable, "-P", "-c", start, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        env=os.environ | MALLOC | {"OMP_NUM_THREADS": "1"},
        process_group=0,  # Ctrl-C is for the parent, which may want to finish its step
    )


# --- the server's own side


def serve(socket_descriptor: int) -> None:
    """Fork a worker per request and report each exit status, until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=socket_descriptor) as parent:
        with _ending_with(parent):
            import envs.executors.cores.worker  # noqa: F401 - what every worker needs
        gc.freeze()  # pages that a collection marks would be copied in every worker
        workers: dict[int, int] = {}  # process ids by pidfd
        events = select.poll()
        events.register(parent, select.POLLIN)
        while True:
            for source, _ in events.poll():
                if source in workers:
                    events.unregister(source)
                    os.close(source)
                    pid = workers.pop(source)
                    _send(parent, (pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
                    continue
                try:
                    (module, *cores), received = _receive(parent)
                except (EOFError, ConnectionError):
                    return
                if module not in sys.modules:  # once for all workers of this kind
                    import_module(module)
                    gc.freeze()
                pid = os.fork()
                if not pid:
                    _work(module, cores, received, [parent.fileno(), *workers])
                for descriptor in received:
                    os.close(descriptor)
                worker = os.pidfd_open(pid)
                workers[worker] = pid
                events.register(worker, select.POLLIN)
                _send(parent, (pid,), [worker])


@contextmanager
def _ending_with(parent: socket.socket) -> Iterator[None]:
    """End this process if the parent ends meanwhile; without a thread, so that forks are safe."""

    def look(*_: object) -> None:
        events = select.poll()
        events.register(parent, 0)
        if events.poll(0):
            os._exit(0)

    signal.signal(signal.SIGIO, look)
    fcntl.fcntl(parent, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(parent, fcntl.F_GETFL)
    fcntl.fcntl(parent, fcntl.F_SETFL, flags | os.O_ASYNC)
    look()
    yield
    fcntl.fcntl(parent, fcntl.F_SETFL, flags)
    signal.signal(signal.SIGIO, signal.SIG_IGN)


def _work(
    module: str, cores: Sequence[int], received: Sequence[int], servers: Iterable[int]
) -> NoReturn:
    """Run a worker in a forked process; ``received`` begins with its pipe and stderr."""
    status = 1
    try:
        for descriptor in servers:
            os.close(descriptor)
        pipe, errors, *shared = received
        os.dup2(errors, 2)
        os.close(errors)
        import_module(module).work(pipe, cores, shared)
        status = 0
    except BaseException:  # noqa: BLE001 - the last line of stderr is what the parent reports
        traceback.print_exc()
    finally:
        os._exit(status)


# --- messages of both sides: one pickled tuple, and any number of descriptors


def _send(to: socket.socket, message: tuple[Any, ...], descriptors: Sequence[int] = ()) -> None:
    socket.send_fds(to, [pickle.dumps((message, len(descriptors)))], descriptors[:MOST_FDS])
    for start in range(MOST_FDS, len(descriptors), MOST_FDS):
        socket.send_fds(to, [b"more"], descriptors[start : start + MOST_FDS])


def _receive(source: socket.socket) -> tuple[tuple[Any, ...], list[int]]:
    data, received, _, _ = socket.recv_fds(source, MESSAGE_BYTES, MOST_FDS)
    if not data:
        raise EOFError
    message, count = pickle.loads(data)
    for start in range(MOST_FDS, count, MOST_FDS):
        received += socket.recv_fds(source, MESSAGE_BYTES, count - start)[1]
    if len(received) < count:  # the kernel drops what goes beyond the limit of open files
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return message, received
