"""Compilation of the search functions in a parallel process."""

from __future__ import annotations

import gc

import pytest

from placer.search import compilation


def test_one_process_helps_until_the_outermost_block_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "is_cached", lambda _: False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(compilation, "HELPER", "import sys; sys.stdin.read()")  # never done
    with compilation.compiled_beside() as compiles:
        helper = compilation._helper
        assert compiles
        assert helper is not None
        with compilation.compiled_beside() as still:
            assert still
            assert compilation._helper is helper
        assert helper.poll() is None
    assert helper.returncode is not None
    assert compilation._helper is None


def test_nobody_helps_where_everything_is_on_disk_or_one_core_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compilation, "is_cached", lambda _: True)
    with compilation.compiled_beside() as compiles:
        assert not compiles
        assert compilation._helper is None
    monkeypatch.setattr(compilation, "is_cached", lambda _: False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    with compilation.compiled_beside() as compiles:
        assert compiles
        assert compilation._helper is None


def test_garbage_is_collected_more_rarely_while_code_is_compiled() -> None:
    before = gc.get_threshold()
    with compilation._rare_collections(), compilation._rare_collections():
        assert gc.get_threshold()[0] == compilation.COLLECTION_THRESHOLD > before[0]
    assert gc.get_threshold() == before
    gc.set_threshold(0)
    try:
        with compilation._rare_collections():
            assert gc.get_threshold()[0] == 0  # never, as its caller wants it
    finally:
        gc.set_threshold(*before)
