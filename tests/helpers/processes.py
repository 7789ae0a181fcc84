"""State of the processes that a test started, and a limit on the files of this one."""

from __future__ import annotations

import os
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


def state_of(process_id: int) -> str:
    """Return the state letter in /proc, "T" for stopped; "" if there is no such process."""
    return next(iter(_stat(process_id)), "")


def is_alive(process_id: int) -> bool:
    return state_of(process_id) not in ("", "Z")


def becomes_true(condition: Callable[[], bool]) -> bool:
    """Wait up to a minute, which only failures take, and return whether the condition holds."""
    end_s = time.monotonic() + 60
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.002)
    return True


def all_end(process_ids: Iterable[int]) -> bool:
    return becomes_true(lambda: not any(map(is_alive, process_ids)))


def descendants() -> set[int]:
    """Return the ids of all direct and indirect child processes.

    The kernel lists children by thread, and leaves some out when a thread ends meanwhile: each
    process is asked for its parent instead.
    """
    children = defaultdict[int, list[int]](list)
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and (words := _stat(int(folder.name))):
            children[int(words[1])].append(int(folder.name))
    found, unread = set[int](), [os.getpid()]
    while unread:
        started = children[unread.pop()]
        found.update(started)
        unread += started
    return found


def _stat(process_id: int) -> list[str]:
    """Return the words of /proc/PID/stat from the state on; [] if there is no such process."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """Make writes beyond this file size fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
