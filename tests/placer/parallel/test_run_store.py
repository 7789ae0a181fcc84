"""Attacks on a training run through its store, which anyone who reaches its port can write to."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from placer.cli.failures import fail
from placer.parallel.liveness import Liveness, RunStore, shared_secret
from placer.parallel.processes import joined
from tests.helpers.ranks import on_ranks

EVIL = "rank 1 died \x1b[2J\x1b]0;owned\x07"


def hash_store() -> Any:
    return dist.HashStore()  # type: ignore[attr-defined]  # torch hides it from type checkers


def test_what_is_written_without_the_secret_is_not_there() -> None:
    store = hash_store()
    ours = RunStore(store, b"secret")
    for content in (EVIL.encode(), b"", b"\xff" * 100):
        store.set("lost", content)
        assert ours.get("lost") is None
    RunStore(store, b"guessed").set("lost", "rank 1 died")
    assert ours.get("lost") is None
    ours.set("lost", "rank 1 died")
    assert ours.get("lost") == "rank 1 died"
    store.set("alive/1", store.get("lost"))
    assert ours.get("alive/1") is None, "a text counts under its own key only"


def test_texts_are_printed_without_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ours = RunStore(hash_store(), b"secret")
    ours.set("lost", EVIL)
    assert ours.get("lost") == "rank 1 died \\x1b[2J\\x1b]0;owned\\x07"
    fail(1, EVIL)
    assert capsys.readouterr().err == "placer: rank 1 died \\x1b[2J\\x1b]0;owned\\x07\n"


def test_a_stranger_ends_no_run() -> None:
    store, ended = hash_store(), dict[int, str]()
    now_s = [0.0]
    ranks = [
        Liveness(
            RunStore(store, b"secret"),
            rank,
            2,
            silence_s=5.0,
            end=partial(ended.__setitem__, rank),
            clock=lambda: now_s[0],
        )
        for rank in range(2)
    ]
    for _ in range(60):
        now_s[0] += 0.5
        store.set("lost", EVIL)
        assert all(rank.beat() for rank in ranks)
    assert not ended


def attacked(rank_of_stranger: int) -> tuple[bytes, str | None]:
    """Return what a rank reads after a stranger has overwritten every key in the store."""
    with joined(60.0) as store:
        secret = shared_secret()
        ours = RunStore(store, secret)
        ours.set(f"name/{dist.get_rank()}", "ours")
        dist.barrier()
        if dist.get_rank() == rank_of_stranger:
            for key in store.underlying_store.list_keys():
                store.underlying_store.set(key, EVIL)
            store.set("lost", EVIL)
        dist.barrier()
        return secret, ours.get("lost")


def test_ranks_share_a_secret_that_the_store_does_not_know() -> None:
    (first, of_first), (second, of_second) = on_ranks(2, attacked, 1, joined=False)
    assert first == second
    assert len(set(first)) > 8
    assert of_first is None
    assert of_second is None
