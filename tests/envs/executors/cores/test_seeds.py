from __future__ import annotations

from itertools import product

from envs.executors.cores.pool import spread_seed


def test_no_two_workers_of_any_rank_share_a_seed() -> None:
    seeds = [
        spread_seed(spread_seed(seed, rank), device)
        for seed, rank, device in product(range(4), range(16), range(8))
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert spread_seed(-1, 0) == spread_seed(2**64 - 1, 0)
