"""``placer machine``: the cache; what it says of devices and noise is in tests/envs/hardware."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from envs.costs.cache import Conditions, CostCache, Session
from placer.cli.main import main
from placer.cli.output import plain_warnings

DAMAGED = b"nothing that could be read" * 99


@pytest.fixture
def filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Store op times of two device kinds and one calibration."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("PLACER_CACHE", str(folder))
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


def test_measurements_are_listed_and_an_empty_cache_is_no_failure(
    filled: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listing = listed(capsys)
    assert listing["folder"] == str(filled)
    kinds = [(one["conditions"]["kind"], one["signatures"]) for one in listing["op_times"]]
    assert kinds == [("core", 2), ("core*2", 1)]
    assert listing["op_times"][0]["first"] == "2026-01-31"
    assert len(listing["files"]) == 2
    assert listing["files"]["cores-0123.toml"] == 10
    assert main(["machine", "--cache"]) == 0
    assert "core*2" in capsys.readouterr().out

    monkeypatch.setenv("PLACER_CACHE", str(filled / "empty"))
    assert main(["machine", "--cache"]) == main(["machine", "--clear-cache"]) == 0
    assert not (filled / "empty").exists()


@pytest.mark.parametrize("option", ["--cache", "--clear-cache"])
def test_a_cache_that_is_no_folder_is_not_called_empty(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("of somebody")
    monkeypatch.setenv("PLACER_CACHE", str(file))
    assert main(["machine", option]) == 2
    assert capsys.readouterr().err == f"placer: {file} is not a folder: set PLACER_CACHE to one\n"
    assert file.read_text() == "of somebody"


@pytest.mark.parametrize(
    ("what", "kinds", "speeds"),
    [
        ([], [], False),
        (["core"], ["core*2"], True),
        (["core*2"], ["core"], True),
        (["speeds"], ["core", "core*2"], False),
    ],
)
def test_one_part_of_the_cache_is_cleared_and_nothing_else(
    what: list[str], kinds: list[str], speeds: int, filled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["machine", "--clear-cache", *what]) == 0
    listing = listed(capsys)
    assert [one["conditions"]["kind"] for one in listing["op_times"]] == kinds
    assert ("cores-0123.toml" in listing["files"]) is speeds
    assert (filled / "of-somebody-else.txt").exists()


def test_a_damaged_file_is_reported_and_cleared(
    filled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["machine", "--clear-cache", "cuda"]) == 2  # no such kind
    assert (filled / "cores-0123.toml").exists()
    CostCache().path.write_bytes(DAMAGED)
    assert main(["machine", "--cache"]) == 1
    assert "--clear-cache" in capsys.readouterr().err
    assert main(["machine", "--clear-cache"]) == 0
    assert [file.name for file in filled.iterdir()] == ["of-somebody-else.txt"]


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
