"""Ranks that are gone differ from ranks that wait by their heartbeats, which no stranger forges."""

from __future__ import annotations

import os
import threading
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from placer.parallel import liveness
from placer.parallel.liveness import RUN_FAILED, Liveness, RunStore, shared_secret
from placer.parallel.processes import joined
from tests.helpers.ranks import on_ranks

INTERVAL_S = 0.5
SILENCE_S = 10 * INTERVAL_S


def run_store() -> RunStore:
    return RunStore(dist.HashStore(), b"secret")  # type: ignore[attr-defined]  # torch hides it


class Ranks:
    """Ranks with one clock, which advances while one of them sleeps."""

    def __init__(self, count: int, *, silence_s: float | None = None) -> None:
        self.now_s = 0.0
        self.ended: dict[int, str] = {}
        store = run_store()
        self.every = [
            Liveness(
                store,
                rank,
                count,
                INTERVAL_S,
                silence_s=silence_s,
                end=partial(self.ended.__setitem__, rank),
                clock=lambda: self.now_s,
                sleep=self.sleep,
            )
            for rank in range(count)
        ]
        self.living = dict(enumerate(self.every))

    def __getitem__(self, rank: int) -> Liveness:
        return self.every[rank]

    def sleep(self, seconds: float) -> None:
        for _ in range(round(seconds / INTERVAL_S)):
            self.now_s += INTERVAL_S
            self.living = {rank: one for rank, one in self.living.items() if one.beat()}

    def error(self, rank: int, why: str = "x") -> str:
        return str(self[rank].error(RuntimeError(why)))


def test_ranks_that_fall_silent_are_named_by_all_others() -> None:
    ranks = Ranks(3)
    ranks[2].at(4)
    del ranks.living[1]
    message = ranks.error(2, "[gloo] connection closed by peer\nmore")
    assert message.startswith("rank 1 died or hangs: pid ")
    assert message.endswith("(step 4 of rank 2 failed: [gloo] connection closed by peer)")
    del ranks.living[2]  # it leaves because of rank 1 and is not to blame
    assert ranks.error(0).startswith("rank 1 died or hangs: ")
    ranks = Ranks(3)
    del ranks.living[0], ranks.living[1]
    assert ranks.error(2).startswith("ranks 0, 1 died or hang: pid ")


def test_a_rank_that_never_gave_a_sign_is_named_at_once() -> None:
    store = run_store()

    def sleep(_: float) -> None:
        alone.beat()

    alone = Liveness(store, 0, 2, INTERVAL_S, sleep=sleep)
    message = str(alone.error(RuntimeError("x")))
    assert message.startswith("rank 1 died or hangs: never started (step 0 of rank 0 failed: x)")


def test_no_rank_is_named_while_heartbeats_of_ones_own_do_not_come_either() -> None:
    store, sleeps = run_store(), list[float]()

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        for rank in every if len(sleeps) > 3 else ():  # at first the machine is too busy
            for _ in range(round(seconds / INTERVAL_S)):
                rank.beat()

    every = [Liveness(store, rank, 2, INTERVAL_S, sleep=sleep) for rank in range(2)]
    failure = RuntimeError("x")
    assert every[1].error(failure) is failure
    assert len(sleeps) == 4


def test_a_rank_that_lets_others_wait_but_lives_is_named_as_such() -> None:
    ranks = Ranks(3)
    for waiting in (0, 2):
        ranks[waiting].at(7)
    message = ranks.error(0, "Timed out after 5 s")
    assert message.startswith("all ranks are alive, but rank 1 only reached step 0 (step 7 of rank")


def test_a_failure_of_ones_own_stays_what_it_is() -> None:
    failure = RuntimeError("shapes do not fit")
    assert Ranks(3)[0].error(failure) is failure


def test_of_a_failure_of_ones_own_the_first_line_is_told() -> None:
    assert Ranks(3).error(0, "CUDA error: unknown error\nCompile with ...") == (
        "CUDA error: unknown error"
    )


def test_where_collectives_wait_for_ever_every_rank_ends_once_one_is_silent() -> None:
    ranks = Ranks(4, silence_s=SILENCE_S)
    ranks.sleep(10 * SILENCE_S)
    del ranks.living[2]
    ranks.sleep(SILENCE_S)
    assert not ranks.ended
    ranks.sleep(3 * liveness.MISSED * INTERVAL_S)
    assert sorted(ranks.ended) == [0, 1, 3]
    assert ranks.living == {}
    for rank, message in ranks.ended.items():
        assert message.startswith(f"rank {rank}: rank 2 died or hangs: pid ")
        assert message.endswith(f"(rank {rank} is in step 0)")


def test_the_thread_gives_signs_and_ends_the_process_though_the_main_thread_waits(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    left, statuses = threading.Event(), list[int]()

    def leave(status: int) -> None:
        statuses.append(status)
        left.set()

    monkeypatch.setattr(os, "_exit", leave)
    store = run_store()
    store.set("alive/1", "1 0")
    store.set("name/1", "pid 1 on nowhere")
    leaving = Liveness(store, 0, 2, interval_s=0.001, silence_s=0.001)
    leaving.start()
    assert left.wait(timeout=60)
    leaving.close()
    assert statuses == [RUN_FAILED]
    assert "rank 0: rank 1 died or hangs: pid 1 on nowhere" in capfd.readouterr().err


FORGED = "rank 1 died \x1b[2J\x1b]0;owned\x07"


def test_texts_written_without_the_secret_are_ignored() -> None:
    store: Any = dist.HashStore()  # type: ignore[attr-defined]  # torch hides it
    ours = RunStore(store, b"secret")
    for content in (FORGED.encode(), b"", b"\xff" * 100):
        store.set("lost", content)
        assert ours.get("lost") is None
    RunStore(store, b"guessed").set("lost", "rank 1 died")
    assert ours.get("lost") is None
    ours.set("lost", FORGED)
    assert ours.get("lost") == "rank 1 died \\x1b[2J\\x1b]0;owned\\x07"  # printable
    store.set("alive/1", store.get("lost"))
    assert ours.get("alive/1") is None, "a text counts under its own key only"


def overwritten(rank_of_stranger: int) -> tuple[bytes, str | None]:
    """Return what a rank reads after a stranger has overwritten every key in the store."""
    with joined(60.0) as (store, _):
        secret = shared_secret()
        ours = RunStore(store, secret)
        ours.set(f"name/{dist.get_rank()}", "ours")
        dist.barrier()
        if dist.get_rank() == rank_of_stranger:
            for key in store.underlying_store.list_keys():
                store.underlying_store.set(key, FORGED)
            store.set("lost", FORGED)
        dist.barrier()
        return secret, ours.get("lost")


def test_ranks_share_a_secret_that_the_store_does_not_know() -> None:
    (first, of_first), (second, of_second) = on_ranks(2, overwritten, 1, joined=False)
    assert first == second
    assert len(set(first)) > 8
    assert of_first is None
    assert of_second is None
