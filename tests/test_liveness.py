"""Who is gone, and who only waits, is told from the signs that ranks give."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from placer.parallel.liveness import Liveness, Store

INTERVAL_S = 0.02


@pytest.fixture
def store() -> Store:
    return dist.HashStore()  # type: ignore[attr-defined]  # torch hides it from type checkers


@pytest.fixture
def ranks(store: Store) -> Iterator[list[Liveness]]:
    every = [Liveness(store, rank, 3, INTERVAL_S) for rank in range(3)]
    yield every
    for one in every:
        one.close()


def test_ranks_that_fall_silent_are_named_by_all_others(ranks: list[Liveness]) -> None:
    ranks[2].at(4)
    ranks[1].close()
    told = str(ranks[2].error(RuntimeError("[gloo] connection closed by peer\nmore")))
    assert told.startswith("rank 1 died or hangs: pid ")
    assert told.endswith("(step 4 of rank 2 failed: [gloo] connection closed by peer)")
    ranks[2].close()  # it leaves for the sake of rank 1, and is not to blame
    assert str(ranks[0].error(RuntimeError("x"))).startswith("rank 1 died or hangs: ")


def test_two_ranks_that_fall_silent_are_both_named(ranks: list[Liveness]) -> None:
    ranks[0].close()
    ranks[1].close()
    assert str(ranks[2].error(RuntimeError("x"))).startswith("ranks 0, 1 died or hang: pid ")


def test_a_rank_that_never_gave_a_sign_is_named_at_once(store: Store) -> None:
    alone = Liveness(store, 0, 2, INTERVAL_S)
    told = str(alone.error(RuntimeError("x")))
    alone.close()
    assert told.startswith("rank 1 died or hangs: never heard of (step 0 of rank 0 failed: x)")


def test_a_rank_that_lets_others_wait_but_lives_is_named_as_such(ranks: list[Liveness]) -> None:
    for waiting in (0, 2):
        ranks[waiting].at(7)
    time.sleep(3 * INTERVAL_S)
    told = str(ranks[0].error(RuntimeError("Timed out after 5 s")))
    assert told.startswith("all ranks live, but rank 1 came to step 0 only (step 7 of rank 0")


def test_a_failure_of_ones_own_stays_what_it_is(ranks: list[Liveness]) -> None:
    failure = RuntimeError("shapes do not fit")
    assert ranks[0].error(failure) is failure


def test_where_collectives_wait_for_ever_the_thread_ends_every_rank(store: Store) -> None:
    ended: dict[int, str] = {}
    every = [
        Liveness(
            store,
            rank,
            4,
            INTERVAL_S,
            silence_s=10 * INTERVAL_S,
            end=partial(ended.__setitem__, rank),
        )
        for rank in range(4)
    ]
    time.sleep(20 * INTERVAL_S)
    assert not ended
    every[2].close()
    deadline_s = time.monotonic() + 10.0
    while len(ended) < 3 and time.monotonic() < deadline_s:
        time.sleep(INTERVAL_S)
    for one in every:
        one.close()
    assert sorted(ended) == [0, 1, 3]
    for rank, told in ended.items():
        assert told.startswith(f"rank {rank}: rank 2 died or hangs: pid ")
        assert told.endswith(f"(rank {rank} is in step 0)")


def watcher(wait_s: float) -> None:
    """Stands for a rank whose collective neither ends nor fails."""
    leaving = Liveness(dist.HashStore(), 0, 2, INTERVAL_S, silence_s=INTERVAL_S)  # type: ignore[attr-defined]  # as above
    leaving._store.set("alive/1", "1 0")
    leaving._store.set("name/1", "pid 1 on nowhere")
    time.sleep(wait_s)


def test_the_process_ends_though_its_main_thread_waits() -> None:
    code = "import test_liveness; test_liveness.watcher(60)"
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, Path(__file__).parents[:2]))},
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert found.returncode == 1
    assert "rank 0: rank 1 died or hangs: pid 1 on nowhere" in found.stderr
