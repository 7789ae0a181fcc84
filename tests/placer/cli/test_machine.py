"""``placer machine``: the cache; what it says of devices and noise is in tests/envs/hardware."""

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
from placer.cli.output import plain_warnings

DAMAGED = b"nothing that could be read" * 99


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
    assert main(["machine", "--cache", "--json"]) == 0
    listing: dict[str, Any] = json.loads(capsys.readouterr().out)
    return listing


def test_an_empty_cache_is_no_failure(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["machine", "--cache"]) == 0
    printed = capsys.readouterr()
    assert str(folder) in printed.out.replace("\n", "")
    assert "the cache is empty" in printed.err
    assert main(["machine", "--clear-cache"]) == 0
    assert not folder.exists()


def test_without_a_home_one_sentence_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_home() -> Path:
        raise RuntimeError

    monkeypatch.delenv("PLACER_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    for option in ("--cache", "--clear-cache"):
        with plain_warnings(), warnings.catch_warnings():
            warnings.simplefilter("once")
            assert main(["machine", option]) == 0
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.count("\n") == 1
        assert "set PLACER_CACHE" in printed.err
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert listed(capsys)["folder"] is None


def test_measurements_are_listed(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listing = listed(capsys)
    assert listing["folder"] == str(filled)
    kinds = listing["op_times"]["kinds"]
    assert [(k["conditions"]["kind"], k["signatures"]) for k in kinds] == [
        ("core", 2),
        ("core*2", 1),
    ]
    assert kinds[0]["first"] == kinds[0]["last"] == "2026-01-31"
    (file,) = listing["op_times"]["files"]
    assert file["size_bytes"] == (filled / file["file"]).stat().st_size
    assert [(file["file"], file["size_bytes"]) for file in listing["speeds"]] == [
        ("cores-0123.toml", 10)
    ]
    assert main(["machine", "--cache"]) == 0
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
def test_one_part_of_the_cache_is_cleared_and_nothing_else(
    what: list[str], kinds: list[str], speeds: int, filled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["machine", "--clear-cache", *what]) == 0
    listing = listed(capsys)
    assert [kind["conditions"]["kind"] for kind in listing["op_times"]["kinds"]] == kinds
    assert len(listing["speeds"]) == speeds
    assert (filled / "of-somebody-else.txt").exists()


def test_a_kind_that_is_not_in_the_cache_is_bad_usage(
    filled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["machine", "--clear-cache", "cuda"]) == 2
    assert "'cuda'" in capsys.readouterr().err
    assert (filled / "cores-0123.toml").exists()


def test_a_damaged_file_is_reported_and_cleared(
    filled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    CostCache().path.write_bytes(DAMAGED)
    assert main(["machine", "--cache"]) == 1
    assert "--clear-cache" in capsys.readouterr().err
    assert main(["machine", "--clear-cache"]) == 0
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
    ("state", "words"), [(link_to_nowhere, "nowhere/costs"), (locked, "locked")]
)
def test_a_cache_that_cannot_be_read_is_reported(
    state: Callable[[Path], None],
    words: str,
    filled: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("envs.costs.cache.WAIT_S", 0.01)
    state(CostCache().path)
    try:
        assert main(["machine", "--cache"]) == 1
    finally:
        while OPEN:
            OPEN.pop().close()
    error = capsys.readouterr().err
    assert words in error
    assert str(CostCache().path) in error


def test_warnings_about_the_cache_are_printed_as_remarks(
    filled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    CostCache().path.write_bytes(DAMAGED)
    with warnings.catch_warnings(), plain_warnings():
        warnings.simplefilter("always")
        CostCache().known(Conditions(kind="core", hardware="x", torch="y"), ["a"])
    error = capsys.readouterr().err
    assert error.startswith("placer: ")
    assert error.count("\n") == 1
    assert ".py" not in error
