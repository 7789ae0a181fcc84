"""Who is gone, and who only waits, is told from the signs that ranks give."""

from __future__ import annotations

import time
from collections.abc import Iterator

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


def test_a_rank_that_lets_others_wait_but_lives_is_named_as_such(ranks: list[Liveness]) -> None:
    for waiting in (0, 2):
        ranks[waiting].at(7)
    time.sleep(3 * INTERVAL_S)
    told = str(ranks[0].error(RuntimeError("Timed out after 5 s")))
    assert told.startswith("all ranks live, but rank 1 came to step 0 only (step 7 of rank 0")


def test_a_failure_of_ones_own_stays_what_it_is(ranks: list[Liveness]) -> None:
    failure = RuntimeError("shapes do not fit")
    assert ranks[0].error(failure) is failure
