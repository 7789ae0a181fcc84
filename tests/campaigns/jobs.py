"""Commands of placer in their own sessions: start, signal, wait and clean up.

Most are *warm*: forked from this process, which has everything imported, so that they work at once.
The others start as users start them.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

from tests.helpers.processes import becomes_true, is_alive

from .lanes import forked

TOKEN: Final = "PLACER_CAMPAIGN"
PATIENCE_S: Final = 180.0
"""Wall seconds after which a job counts as hung: a hundred times the usual on a quiet machine."""
FAREWELL_S: Final = 30.0
"""Wall seconds for processes to end after the one that was killed; long for busy machines."""
SHARED_MEMORY: Final = Path("/dev/shm")
CLONE_NEWNS: Final = 0x20000
_HANDLED: Final = (signal.SIGINT, signal.SIGTERM)
_numbers: Final = count()
_started: Final[list[Job]] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Arguments of a module's command line, and the environment to run it in."""

    arguments: Sequence[str]
    folder: Path
    module: str = "placer.cli.main"
    warm: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)
    largest_file_bytes: int | None = None
    slow_disk_s: float = 0.0  # delay of each fsync of a warm job
    stdout: Path | None = None


class Job:
    """A started command; all its processes are in its session or have its token."""

    def __init__(self, command: Command) -> None:
        self.token = f"{os.getpid()}.{next(_numbers)}"
        self.command = command
        self.began_s = time.monotonic()
        self.errors_path = command.folder / f"stderr.{self.token}"
        self.temporary = command.folder / f"tmp.{self.token}"
        self.temporary.mkdir()
        self.code: int | None = None
        self.interrupted = False  # by SIGINT
        self._syncing = mmap.mmap(-1, 1)  # a byte shared with a warm job
        sys.stdout.flush()
        # Signals are blocked until the first line of the command.
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
        self.pid = forked(partial(self._become, command))
        _started.append(self)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)

    def _become(self, command: Command) -> None:
        os.setsid()
        os.chdir(command.folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        out = command.stdout or command.folder / f"stdout.{self.token}"
        for number, path in ((1, out), (2, self.errors_path)):
            os.dup2(os.open(path, flags, 0o600), number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ |= {TOKEN: self.token, "TMPDIR": str(self.temporary), **command.environment}
        if command.largest_file_bytes is not None:
            size = command.largest_file_bytes
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        if not command.warm:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
            os.execv(sys.executable, [sys.executable, "-m", command.module, *command.arguments])
        if command.slow_disk_s:
            vars(os)["fsync"] = partial(self._slow_fsync, command.slow_disk_s, os.fsync)
        sys.argv = [command.module, *command.arguments]
        script = importlib.import_module(command.module).script
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)  # a blocked signal ends the job here
        with suppress(KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.default_int_handler)
        script()

    def _slow_fsync(self, seconds: float, fsync: Callable[[int], None], file: int) -> None:
        self._syncing[0] = 1
        time.sleep(seconds)
        fsync(file)

    def is_writing(self) -> bool:
        """Return whether a job with a slow disk has begun to write a result."""
        return bool(self._syncing[0])

    def is_running(self) -> bool:
        """Return whether the main process is running; set ``code`` when it has ended."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is None

    def when(self, happens: Callable[[], object]) -> bool:
        """Wait until a condition holds; return False if the job ends first."""
        while self.is_running() and time.monotonic() - self.began_s < PATIENCE_S:
            if happens():
                return True
            time.sleep(0.005)
        return False

    def send(self, number: signal.Signals, pid: int | None = None) -> None:
        """Send a signal to the main process while it runs, or to another process."""
        if pid is None and self.code is not None:
            return  # the process id may have been reused
        self.interrupted |= number == signal.SIGINT
        with suppress(ProcessLookupError):
            os.kill(pid or self.pid, number)

    def family(self) -> list[int]:
        """Return the ids of this job's live processes, without zombies."""
        names = os.listdir("/proc")  # noqa: PTH208 - hot
        return [int(name) for name in names if name.isdecimal() and self._owns(int(name))]

    def workers(self) -> list[int]:
        """Return the ids of all but the main process and Python's resource tracker."""
        others = (pid for pid in self.family() if pid != self.pid)
        return [pid for pid in others if "resource_tracker" not in _command_line(pid)]

    def _owns(self, pid: int) -> bool:
        token = f"{TOKEN}={self.token}\0".encode()
        with suppress(OSError):
            is_own = os.getsid(pid) == self.pid or token in _kernel_says(pid, "environ")
            return is_own and is_alive(pid)
        return False

    def finish(self) -> Ended:
        """Wait for the end of all processes, kill the remaining ones, and report what was left."""
        self.when(lambda: False)
        if hung := self.is_running():
            self.send(signal.SIGKILL)
            becomes_true(lambda: not self.is_running())
        end_s = time.monotonic() + FAREWELL_S
        while (orphans := self.family()) and time.monotonic() < end_s:
            time.sleep(0.02)
        named = [f"{pid} {_command_line(pid)}" for pid in orphans]
        for pid in orphans:
            self.send(signal.SIGKILL, pid)
        if self in _started:
            _started.remove(self)  # its process ids may be reused from now on
        left = [str(path) for path in self.temporary.rglob("*")]
        assert self.code is not None
        errors = self.errors_path.read_text(errors="replace")
        return Ended(code=self.code, hung=hung, errors=errors, orphans=named, left=left)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of a job; ``code`` is negative for a signal."""

    code: int
    hung: bool
    errors: str
    orphans: Sequence[str]
    left: Sequence[str]  # files in its TMPDIR


def own_mounts() -> bool:
    """Give this process its own mounts and an empty /dev/shm; return False if not permitted."""
    if ctypes.CDLL(None).unshare(CLONE_NEWNS) != 0:
        return False
    apart = ["mount", "--make-rprivate", "/"]
    empty = ["mount", "-t", "tmpfs", "tmpfs", str(SHARED_MEMORY)]
    return all(
        subprocess.run(command, capture_output=True, check=False).returncode == 0
        for command in (apart, empty)
    )


def end_all() -> None:
    """Kill all processes of all jobs of this process."""
    for job in _started:
        for pid in job.family():
            job.send(signal.SIGKILL, pid)
    _started.clear()


def _kernel_says(pid: int, what: str) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/{what}").read_bytes()
    return b""


def _command_line(pid: int) -> str:
    return _kernel_says(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace")[:200]
