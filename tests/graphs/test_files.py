"""Atomic writes: a file is complete or not there."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from graphs.files import CHUNK_BYTES, read_limited, write_whole
from tests.helpers.processes import largest_file


def test_reading_takes_the_memory_of_the_file_not_of_the_largest_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    tracemalloc.start()
    try:
        assert read_limited(path, 1 << 30) == b"content"
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("size", [0, CHUNK_BYTES, 3 * CHUNK_BYTES + 1])
def test_a_pipe_is_read_to_its_end_or_to_the_limit(size: int) -> None:
    with subprocess.Popen(["head", "-c", str(size), "/dev/zero"], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        path = Path(f"/dev/fd/{writer.stdout.fileno()}")
        if size > CHUNK_BYTES:
            with pytest.raises(ValueError, match="more than such a file may have"):
                read_limited(path, CHUNK_BYTES + 1)
        else:
            assert read_limited(path, CHUNK_BYTES + 1) == bytes(size)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


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


def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="regular file"):
        write_whole(pipe, "new")
    assert pipe.is_fifo()
    assert names(tmp_path) == ["pipe"]


def test_a_link_of_another_user_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, middle, link = tmp_path / "target", tmp_path / "middle", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(middle.name)
    middle.symlink_to(target)
    if os.geteuid() == 0:
        os.lchown(middle, 65534, 65534)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError, match="another user") as refusal:
        write_whole(link, "new")
    assert refusal.value.filename == str(link)
    assert target.read_text() == "old"
    assert middle.is_symlink()
    assert names(tmp_path) == ["link", "middle", "target"]


def test_links_in_a_circle_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    with pytest.raises(OSError, match="links"):
        write_whole(tmp_path / "one", "new")


def test_a_link_to_nothing_yet_is_written_where_it_points(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder/../folder/file")
    write_whole(tmp_path / "link", "new")
    assert (tmp_path / "folder" / "file").read_text() == "new"


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o755])
def test_a_file_that_is_replaced_keeps_its_mode(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(mode)
    write_whole(path, "new", private=mode == 0o755)
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.parametrize(("private", "mode"), [(True, 0o600), (False, 0o644)])
def test_a_new_private_file_is_the_users_alone(tmp_path: Path, private: bool, mode: int) -> None:
    before = os.umask(0o022)
    try:
        write_whole(tmp_path / "file", "new", private=private)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


KILLED = """
import os, signal, sys
from pathlib import Path
from graphs.files import write_whole

os.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)
write_whole(Path(sys.argv[1]), "never whole")
"""


def test_what_a_killed_writer_leaves_is_gone_after_the_next(tmp_path: Path) -> None:
    path = tmp_path / "placement.json"
    write_whole(path, "old")
    write_whole(tmp_path / "other.json", "")
    for target in (path, tmp_path / "other.json"):
        subprocess.run([sys.executable, "-c", KILLED, target], check=False)
    left = [name for name in names(tmp_path) if name.endswith(".partial")]
    assert path.read_text() == "old"
    assert sorted(name.rpartition(".json.")[0] for name in left) == [".other", ".placement"]
    write_whole(path, "new")
    left = [name for name in names(tmp_path) if name.endswith(".partial")]
    assert [name.rpartition(".json.")[0] for name in left] == [".other"]
    assert path.read_text() == "new"


def test_writers_at_the_same_time_leave_each_other_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced = tmp_path / "file", os.fsync
    written: list[str] = []

    def write_another(file: int) -> None:
        synced(file)
        if not written:
            written.append("inner")
            write_whole(path, "inner")
            assert path.read_text() == "inner"

    monkeypatch.setattr(os, "fsync", write_another)
    write_whole(path, "outer")
    assert path.read_text() == "outer"
    assert names(tmp_path) == ["file"]
