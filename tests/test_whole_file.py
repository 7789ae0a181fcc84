"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from graphs.whole_file import write_whole


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """A disk on which files longer than this cannot be written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("content", "written"), [("é\n", "é\n".encode()), (b"\xff", b"\xff")])
def test_text_and_bytes_are_written(content: str | bytes, written: bytes, tmp_path: Path) -> None:
    write_whole(tmp_path / "file", content)
    assert (tmp_path / "file").read_bytes() == written
    assert names(tmp_path) == ["file"]


def test_a_name_may_be_as_long_as_any(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 255)
    write_whole(path, "new")
    assert path.read_text() == "new"


def test_what_cannot_be_written_to_its_end_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with largest_file(1000), pytest.raises(OSError, match="too large") as refusal:
        write_whole(path, "x" * 100_000)
    assert refusal.value.filename == str(path)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_a_link_stays_one_and_what_it_points_to_is_written(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_whole(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="regular file"):
        write_whole(pipe, "new")
    assert pipe.is_fifo()
    assert names(tmp_path) == ["pipe"]


def test_a_folder_that_is_missing_is_an_error_with_the_name(tmp_path: Path) -> None:
    path = tmp_path / "none" / "file"
    with pytest.raises(FileNotFoundError) as refusal:
        write_whole(path, "new")
    assert refusal.value.filename == str(path)
