"""Messages of the command line for failures of the system."""

from __future__ import annotations

import errno
import os
import resource

import pytest

from placer.cli.failures import StandardOutput, fail, why_no_memory
from placer.cli.main import main

FREE = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
LIMITED = (7 * 10**8, resource.RLIM_INFINITY)


@pytest.mark.parametrize(
    ("limits", "error", "told"),
    [
        (FREE, MemoryError(), "there is too little memory"),
        (FREE, OSError(errno.ENOMEM, "Cannot allocate memory"), "there is too little memory"),
        (FREE, ImportError("no module"), None),
        (FREE, OSError(errno.ENOENT, "No such file"), None),
        (LIMITED, MemoryError(), "may have 0.7 GB of addresses (ulimit -v)"),
        (LIMITED, SystemError("error return without exception set"), "0.7 GB"),
        (LIMITED, ImportError("failed to map segment from shared object"), "0.7 GB"),
        (LIMITED, OSError(errno.ENOENT, "No such file"), None),
    ],
)
def test_too_little_memory_is_told_with_its_limit(
    limits: tuple[int, int],
    error: Exception,
    told: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: limits)
    why = why_no_memory(error)
    if told is None:
        assert why is None
        return
    assert told in (why or "")

    def run(_: object) -> int:
        raise error

    monkeypatch.setattr("placer.cli.placers.run", run)
    assert main(["placers"]) == 1
    assert capsys.readouterr().err.endswith(f"{why}\n")


def test_an_error_of_no_memory_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_: object) -> int:
        raise ImportError("no module")

    monkeypatch.setattr("placer.cli.placers.run", run)
    monkeypatch.setattr("resource.getrlimit", lambda _: FREE)
    with pytest.raises(ImportError, match="no module"):
        main(["placers"])


def test_a_message_is_one_line_of_readable_length(capsys: pytest.CaptureFixture[str]) -> None:
    assert fail(1, f"op {'n' * 70_000} is there\nalready") == 1
    told = capsys.readouterr().err
    assert len(told) < 300
    assert told.count("\n") == 1


def test_standard_output_names_itself_and_fails_once() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, writer)
    with StandardOutput(os.fdopen(writer, "wb"), "utf-8") as output:
        print("something", file=output)
        with pytest.raises(OSError, match=r"No space left.*'standard output'"):
            output.flush()
        print("more", file=output, flush=True)
    os.close(full)
