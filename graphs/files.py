"""Files: reads up to a size limit, atomic writes, and messages for files that cannot be read."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import stat
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Final

from graphs.text import suggestion

MOST_LINKS: Final = 40
SUFFIX: Final = ".partial"
CHUNK_BYTES: Final = 1 << 16
"""Bytes per read from a pipe, whose size is not known."""
SIMILAR_FILE: Final = 0.8
"""Similarity of a file that may have been meant: endings alone make names alike."""
LONGEST_LABEL: Final = 100
"""Bytes of the file's own name in that of its partial file, since names have a limit."""


def read_limited(path: Path, largest_bytes: int) -> bytes:
    """Return the content of a file or pipe of at most ``largest_bytes``."""
    with path.open("rb") as file:
        size = path.stat().st_size
        if size <= largest_bytes:  # 0 for a pipe
            # read() allocates as much as is asked for, so never ask for the whole limit.
            content = file.read(size + CHUNK_BYTES)
            while len(content) <= largest_bytes and (more := file.read(CHUNK_BYTES)):
                content += more
            size = max(size, len(content))
    if size > largest_bytes:
        raise ValueError(
            f"{_readable(size)} is more than such a file may have ({_readable(largest_bytes)})"
        )
    return content


def write_whole(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Write a file such that readers, also after a crash, find the old or the new content.

    A symbolic link is kept, and its target is written. Text is written as UTF-8. A file that is
    replaced keeps its mode; a new ``private`` one can be read by the user alone.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        target = written_file(path)
        folder = os.open(target.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _remove_stale(target.parent, folder, target.name)
            _replace(folder, target.name, data, 0o600 if private else 0o666)
        finally:
            os.close(folder)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def written_file(path: Path) -> Path:
    """Return the file that is replaced when ``path`` is written: ``path`` with links followed.

    Links among its folders are left to the kernel, which does not follow those of other users in
    folders that everyone may write to.
    """
    for _ in range(MOST_LINKS):
        try:
            about = path.lstat()
        except FileNotFoundError:
            return path
        if not stat.S_ISLNK(about.st_mode):
            return path
        if about.st_uid not in (os.geteuid(), 0):
            raise PermissionError(errno.EACCES, "A symbolic link of another user")
        path = path.parent / path.readlink()
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def partial_name(name: str) -> str:
    """Return a new name for a partial file, which the next writer removes if this one is killed."""
    return f"{_partial_prefix(name)}{os.urandom(8).hex()}{SUFFIX}"


def _replace(folder: int, name: str, data: bytes, mode: int) -> None:
    """Write a partial file and rename it when it is complete."""
    old = _existing(folder, name)
    partial = partial_name(name)
    file = _created(folder, partial, mode)
    try:
        with os.fdopen(file, "wb") as writer:
            writer.write(data)
            writer.flush()
            if old is not None:
                _take_mode(file, old)
            os.fsync(file)
            os.rename(partial, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(partial, dir_fd=folder)
        raise


def _existing(folder: int, name: str) -> os.stat_result | None:
    try:
        old = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(old.st_mode):
        raise OSError(errno.EINVAL, "Not a regular file")  # replacing it would remove a device
    return old


def _created(folder: int, partial: str, mode: int) -> int:
    """Return a new file, locked to show other writers that this one is alive."""
    flags = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY | os.O_CLOEXEC
    while True:
        file = os.open(partial, flags, mode, dir_fd=folder)
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:  # otherwise another writer removed it before it was locked
            return file
        os.close(file)


def _remove_stale(parent: Path, folder: int, name: str) -> None:
    """Remove partial files of the same target whose writers were killed on this host."""
    prefix = _partial_prefix(name)
    with suppress(OSError):
        for other in parent.iterdir():
            if other.name.startswith(prefix) and other.suffix == SUFFIX:
                with suppress(OSError):
                    _remove_unlocked(folder, other.name)


def _remove_unlocked(folder: int, name: str) -> None:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.open(name, flags, dir_fd=folder)
    try:
        about = os.fstat(file)
        if stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid():
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(name, dir_fd=folder)
    finally:
        os.close(file)


def _partial_prefix(name: str) -> str:
    """Return how partial names begin: the file's name, and the host where its locks are known."""
    label = os.fsencode(name)[:LONGEST_LABEL].decode(errors="ignore")
    return f".{label}.{zlib.crc32(platform.node().encode()):08x}"


def _take_mode(file: int, old: os.stat_result) -> None:
    """Give a new file the mode of the user's old one, and its group if that is allowed."""
    if old.st_uid != os.geteuid():
        return
    mode = stat.S_IMODE(old.st_mode) & 0o777
    if os.fstat(file).st_gid != old.st_gid:
        try:
            os.fchown(file, -1, old.st_gid)
        except OSError:
            mode &= ~0o070
    os.fchmod(file, mode)


def _readable(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e8 else f"{size_bytes / 1e6:.1f} MB"


def missing_file(path: Path) -> str:
    """Return a message that names the file and, if there is one, a similar file in its folder."""
    folder = path.parent
    if not folder.is_dir():
        return f"there is no file {path}: there is no folder {folder}"
    if path.is_dir():
        return f"there is no file {path}: it is a folder"
    neighbours = sorted(near.name for near in folder.glob(f"*{path.suffix}") if near.is_file())
    return f"there is no file {path}" + suggestion(path.name, neighbours, cutoff=SIMILAR_FILE)


def file_error_message(error: OSError) -> str:
    """Return a message for an OSError, with the file if the error names one."""
    if error.strerror is None:
        return str(error)
    if error.filename is None:
        return error.strerror.lower()
    path = Path(os.fsdecode(error.filename))
    if isinstance(error, FileNotFoundError):
        return missing_file(path)
    return f"{path}: {error.strerror.lower()}"
