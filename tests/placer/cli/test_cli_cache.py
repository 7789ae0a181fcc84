from __future__ import annotations

import json
import sqlite3
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from envs.costs.cache import Conditions, CostCache, Session
from placer.cli.main import main
from placer.cli.talk import plain_warnings


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLACER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def filled(folder: Path) -> Path:
    """Store op times of two device kinds and one calibration."""
    for kind, cost_s in (("core", {"a": 1.0, "b": 2.0}), ("core*2", {"a": 1.0})):
        CostCache().store(
            Conditions(kind=kind, hardware="some host", torch="2.13.0"),
            Session(cost_s=cost_s, runs=5, spread=0.0, measured="2026-01-31"),
        )
    (folder / "cores-0123.toml").write_text("x" * 10)
    (folder / "of-somebody-else.txt").touch()
    return folder


def listed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["cache", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_an_empty_cache_is_no_failure(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache"]) == 0
    told = capsys.readouterr()
    assert str(folder) in told.out.replace("\n", "")
    assert "nothing is kept" in told.err
    assert main(["cache", "--clear"]) == 0
    assert not folder.exists()


def test_without_a_home_one_sentence_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_home() -> Path:
        raise RuntimeError

    monkeypatch.delenv("PLACER_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    for arguments in (["cache"], ["cache", "--clear"]):
        with plain_warnings(), warnings.catch_warnings():
            warnings.simplefilter("once")
            assert main(arguments) == 0
        told = capsys.readouterr()
        assert told.out == ""
        assert told.err.count("\n") == 1
        assert "set PLACER_CACHE" in told.err
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert listed(capsys)["folder"] is None


def test_what_is_kept_is_listed(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = listed(capsys)
    assert found["folder"] == str(filled)
    kinds = found["op_times"]["kinds"]
    assert [(kind["kind"], kind["entries"]) for kind in kinds] == [("core", 2), ("core*2", 1)]
    assert kinds[0] | {"entries": 2} == {
        "kind": "core",
        "hardware": "some host",
        "torch": "2.13.0",
        "entries": 2,
        "sessions": 1,
        "first": "2026-01-31",
        "last": "2026-01-31",
    }
    (file,) = found["op_times"]["files"]
    assert file["size_bytes"] == (filled / file["file"]).stat().st_size
    assert [(file["file"], file["size_bytes"]) for file in found["speeds"]] == [
        ("cores-0123.toml", 10)
    ]
    assert main(["cache"]) == 0
    assert "core*2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("what", "kinds", "speeds"),
    [
        ([], [], 0),
        (["core"], ["core*2"], 1),
        (["core*2"], ["core"], 1),
        (["speeds"], ["core", "core*2"], 0),
    ],
)
def test_what_is_named_is_cleared_and_nothing_else(
    what: list[str],
    kinds: list[str],
    speeds: int,
    filled: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["cache", "--clear", *what]) == 0
    found = listed(capsys)
    assert [kind["kind"] for kind in found["op_times"]["kinds"]] == kinds
    assert len(found["speeds"]) == speeds
    assert (filled / "of-somebody-else.txt").exists()


def test_a_kind_that_is_not_there_is_bad_usage(
    filled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", "--clear", "cuda"]) == 2
    assert "'cuda'" in capsys.readouterr().err
    assert (filled / "cores-0123.toml").exists()


def test_a_damaged_file_is_told_and_cleared(
    filled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = CostCache().path
    path.write_bytes(b"nothing that could be read" * 99)
    assert main(["cache"]) == 1
    assert "--clear" in capsys.readouterr().err
    assert main(["cache", "--clear"]) == 0
    assert [file.name for file in filled.iterdir()] == ["of-somebody-else.txt"]


def link_to_nowhere(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.parent / "nowhere" / "costs")


def locked(path: Path) -> None:
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    OPEN.append(other)


OPEN: list[sqlite3.Connection] = []


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (link_to_nowhere, "nowhere/costs"),
        (locked, "locked"),
    ],
)
def test_a_cache_that_cannot_be_read_is_told(
    state: Callable[[Path], None],
    told: str,
    filled: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("envs.costs.cache.WAIT_S", 0.01)
    state(CostCache().path)
    try:
        assert main(["cache"]) == 1
    finally:
        while OPEN:
            OPEN.pop().close()
    error = capsys.readouterr().err
    assert told in error
    assert str(CostCache().path) in error


def test_a_file_without_a_byte_holds_nothing(
    filled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    CostCache().path.write_bytes(b"")
    assert listed(capsys)["op_times"]["kinds"] == []
    assert CostCache().path.stat().st_size == 0


def test_warnings_about_the_cache_are_printed_as_remarks(
    filled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    CostCache().path.write_bytes(b"nothing that could be read" * 99)
    with warnings.catch_warnings(), plain_warnings():
        warnings.simplefilter("always")
        CostCache().known(Conditions(kind="core", hardware="x", torch="y"), ["a"])
    error = capsys.readouterr().err
    assert error.startswith("placer: ")
    assert error.count("\n") == 1
    assert ".py" not in error
