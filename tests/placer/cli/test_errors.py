"""Sentences and exit codes of exceptions."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest

from envs.hardware.errors import UnavailableError
from envs.measured import DevicesLostError
from envs.replication import ReplicationError
from graphs.selection import ConstraintError
from placer.choose import PlacementError
from placer.cli.errors import (
    EXPECTED,
    JobError,
    UsageError,
    exit_code_of,
    memory_shortage,
    usage_errors,
)
from placer.cli.main import main
from placer.cli.output import check_outputs
from placer.ray_cluster.address import ClusterError
from placer.sources.names import TargetError
from placer.warm_start import WarmStartError

FREE = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
LIMITED = (7 * 10**8, resource.RLIM_INFINITY)


@pytest.mark.parametrize(
    ("limits", "error", "text"),
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
def test_too_little_memory_is_reported_with_its_limit(
    limits: tuple[int, int], error: Exception, text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: limits)
    shortage = memory_shortage(error)
    assert shortage is None if text is None else text in str(shortage)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("x"), 2),
        (TargetError("x"), 2),
        (ConstraintError("x"), 2),
        (WarmStartError("x"), 2),
        (ReplicationError("x"), 2),
        (ClusterError("x"), 2),
        (UnavailableError("x"), 1),
        (JobError("x"), 1),
        (PlacementError("x"), 1),
        (ValueError("x"), 1),
        (OSError(errno.EIO, "x"), 1),
        (MemoryError("x"), 1),
        (KeyboardInterrupt(), 1),
    ],
)
def test_every_expected_exception_has_an_exit_code_and_a_line(
    error: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(_: object) -> int:
        raise error

    monkeypatch.setattr("placer.cli.machine.run", run)
    assert main(["machine"]) == code
    assert capsys.readouterr().err.count("\n") == 1


def test_errors_in_arguments_are_bad_usage_unless_they_are_of_the_job() -> None:
    with pytest.raises(UsageError, match="no file"), usage_errors():
        raise FileNotFoundError(errno.ENOENT, "", "no file")
    with pytest.raises(UnicodeError), usage_errors(UnicodeError):
        raise UnicodeError


def test_lost_devices_are_a_failed_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(lost := DevicesLostError("no GPU is left"), EXPECTED)
    assert exit_code_of(lost) == 1
    assert capsys.readouterr().err == "placer: no GPU is left\n"


def test_a_message_is_one_line_of_readable_length(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(JobError(f"op {'n' * 70_000} is there\nalready")) == 1
    text = capsys.readouterr().err
    assert len(text) < 300
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ({"--out": "x.json", "--report": "./x.json"}, "--report and --out are the same file"),
        ({"--out": "link.json"}, "--out and target are the same file"),
        ({"--out": "/dev/null"}, "no regular file"),
        ({"--out": "/no/such/folder/p.json"}, "there is no folder /no/such/folder"),
        ({"--out": "/proc/p.json"}, "/proc/p.json cannot be written"),
        ({"--out": "."}, "it is a folder"),
        ({"--out": "pipe"}, "no regular file"),
    ],
)
def test_results_never_replace_each_other_or_an_input(
    outputs: dict[str, str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("graph.json").touch()
    Path("link.json").symlink_to("graph.json")
    before = sorted(tmp_path.iterdir())
    paths = {name: Path(path) for name, path in outputs.items()}
    with pytest.raises(UsageError, match=words):
        check_outputs(paths, {"target": Path("graph.json"), "--cluster": None})
    assert sorted(tmp_path.iterdir()) == before


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: FREE)
    assert exit_code_of(ImportError("no module")) is None


def test_bad_usage_names_the_option_that_helps(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError) as refused, usage_errors():
        raise TargetError("m.onnx is not for training", remedy="inference")
    assert exit_code_of(refused.value) == 2
    assert capsys.readouterr().err == "placer: m.onnx is not for training. Try --inference.\n"
