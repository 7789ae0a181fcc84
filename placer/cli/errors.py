"""Exceptions of the command line, and the sentence and exit code of every exception."""

from __future__ import annotations

import errno
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from envs.hardware.errors import UnavailableError
from graphs.files import file_error_message
from graphs.strict_json import brief
from placer.interrupt import NOTHING_KEPT

JOB_FAILED: Final = 1
"""The command is right, but the job failed, or the devices of this machine cannot do it."""
BAD_USAGE: Final = 2
"""The command or a file is wrong."""
REMEDIES: Final = {
    "modules": "--extractor modules",
    "fp32": "--dtype fp32",
    "no costs": "placer extract --costs none",
    "inference": "--inference",
}
"""{remedy of an ExtractionError or TargetError: the option that applies it}."""


class UsageError(Exception):
    """An argument is invalid, contradicts another one, or names a file that cannot be used."""


class JobError(Exception):
    """The job failed; the message is for the user."""


EXPECTED: Final = (
    *(UsageError, JobError, ValueError, OSError, RuntimeError),
    *(MemoryError, SystemError, ImportError, KeyboardInterrupt),
)
"""Exceptions that :func:`exit_code_of` may turn into a sentence; any other one is a bug."""


@contextmanager
def usage_errors(*others: type[Exception]) -> Iterator[None]:
    """Report errors in values and files of the block as bad usage, except for ``others``.

    What this machine lacks is not the fault of the command.
    """
    passed: tuple[type[Exception], ...] = (UnavailableError, *others)
    try:
        yield
    except passed:
        raise
    except (ValueError, OSError) as error:
        raise UsageError(sentence(error)) from error


def exit_code_of(error: BaseException) -> int | None:
    """Print one line about an exception to stderr and return the exit code; None if it is a bug."""
    if isinstance(error, KeyboardInterrupt):
        print(NOTHING_KEPT, file=sys.stderr)
        return JOB_FAILED
    if isinstance(error, BrokenPipeError):
        return JOB_FAILED
    if isinstance(error, SystemError | ImportError) and memory_shortage(error) is None:
        return None
    text = brief(sentence(error))
    remedies = (getattr(one, "remedy", None) for one in (error, error.__cause__))
    if remedy := next(filter(None, remedies), None):
        text = f"{text.rstrip('.')}. Try {REMEDIES[remedy]}."
    print(f"placer: {text}", file=sys.stderr)
    return BAD_USAGE if _is_bad_usage(error) else JOB_FAILED


def sentence(error: BaseException) -> str:
    """Return what a user reads about an exception."""
    if (shortage := memory_shortage(error)) is not None:
        return shortage
    return file_error_message(error) if isinstance(error, OSError) else str(error)


def _is_bad_usage(error: BaseException) -> bool:
    if not isinstance(error, ValueError):
        return isinstance(error, UsageError)
    from envs.replication import ReplicationError
    from graphs.selection import ConstraintError
    from placer.exports.renaming import RenamingError
    from placer.ray_cluster.address import ClusterError
    from placer.sources.names import TargetError
    from placer.warm_start import WarmStartError

    kinds: tuple[type[ValueError], ...] = (
        ClusterError,
        ConstraintError,
        ReplicationError,
        WarmStartError,
        RenamingError,
    )
    if (workload := sys.modules.get("graphs.workload")) is not None:  # it imports torch
        kinds += (workload.ExtractionError,)
    return isinstance(error, (*kinds, TargetError))


def memory_shortage(error: BaseException) -> str | None:
    """Return the message for too little memory, None if an error has another cause.

    If the address space is limited, imports fail in many ways.
    """
    is_certain = isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno == errno.ENOMEM
    )
    if not is_certain and not isinstance(error, SystemError | ImportError):
        return None
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit_bytes != resource.RLIM_INFINITY:
        return (
            f"there is too little memory: this process may have {limit_bytes / 1e9:.1f} GB of "
            "addresses (ulimit -v), and the libraries alone need more than 1 GB"
        )
    return "there is too little memory" if is_certain else None
