from __future__ import annotations

import numpy as np
import pytest

from placer.search.evolution import Evolution


@pytest.mark.parametrize("seed", range(2))
def test_evolution_minimises_an_ill_conditioned_quadratic(seed: int) -> None:
    size = 8
    rng = np.random.default_rng(seed)
    rotation = np.linalg.qr(rng.standard_normal((size, size)))[0]
    target = rng.standard_normal(size)
    stretch = 10.0 ** np.linspace(0, 3, size)
    evolution = Evolution(np.zeros(size), sigma=0.5, seed=seed)
    for _ in range(600):
        samples = evolution.ask()
        evolution.tell(samples, (((samples - target) @ rotation) ** 2 @ stretch))
    assert np.abs(evolution.mean - target).max() < 1e-3


def test_first_samples_have_the_requested_deviations() -> None:
    spread = np.array([0.1, 1.0, 4.0])
    evolution = Evolution(np.zeros(3), sigma=0.5, seed=0, population=4000, spread=spread)
    deviations = evolution.ask().std(axis=0)
    assert deviations / deviations[1] == pytest.approx(spread, rel=0.1)
    assert np.exp(np.log(deviations).mean()) == pytest.approx(0.5, rel=0.1)


def test_samples_without_deviation_are_refused() -> None:
    with pytest.raises(ValueError, match="sigma is 0"):
        Evolution(np.zeros(3), sigma=0, seed=0)


@pytest.mark.slow_repeats
@pytest.mark.parametrize("seed", range(3))
def test_evolution_ends_before_rounding_errors_when_all_costs_are_equal(seed: int) -> None:
    evolution = Evolution(np.zeros(3), sigma=0.5, seed=seed, population=6)
    generations = 0
    while not evolution.has_ended:
        evolution.tell(evolution.ask(), np.zeros(6))
        generations += 1
    assert 100 < generations < 20_000
