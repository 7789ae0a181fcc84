"""Factors of op costs: classes of ops, and the fit by hand and on made-up measurements."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from envs.costs.factors import (
    CLASSES,
    COMMON_DEVIATION,
    FITTED,
    LARGEST,
    LARGEST_UNPLACED,
    LAUNCH,
    NOISE,
    OWN_DEVIATION,
    class_of,
    factors_of_ops,
    fit,
    fitted_source,
    unplaced_factors,
)

TRUE = np.array([1.3, 0.9, 1.05, 1.0, 1.1])


def shares_of(count: int, seed: int = 0) -> NDArray[np.float64]:
    """Return shares of each class in the steps of made-up placements; the rest is transfers."""
    return np.random.default_rng(seed).dirichlet(np.ones(len(CLASSES) + 1), count)[:, :-1]


@pytest.mark.parametrize(
    ("name", "ops"),
    [
        ("convolution", "convolution convolution_backward.input Conv2d"),
        ("matrix product", "mm addmm bmm baddbmm _scaled_dot_product_flash_attention_for_cpu LSTM"),
        (
            "reduction",
            "_softmax batch_norm_backward avg_pool2d sum embedding_dense_backward",
        ),
        ("copy", "cat unsafe_split constant_pad_nd embedding new_zeros clone"),
        (
            "elementwise",
            "add add.gradient threshold_backward silu tanh adam group upsample_bilinear2d",
        ),
    ],
)
def test_ops_have_the_class_of_their_names(name: str, ops: str) -> None:
    assert {class_of(op) for op in ops.split()} == {name}


def test_one_class_and_one_step_by_hand() -> None:
    prior = COMMON_DEVIATION**2 + OWN_DEVIATION**2
    error = math.log(1.2)
    (log_factor,) = fit(np.array([[0.5]]), np.array([error]), ["core"])
    # argmin of (error - x / 2)^2 / noise^2 + x^2 / prior
    assert log_factor == pytest.approx(0.5 * error / (0.25 + NOISE**2 / prior))


def test_the_fit_minimizes_error_and_distance_from_the_prior() -> None:
    shares, kinds = shares_of(4), ["core"] * len(CLASSES)
    error = np.array([0.1, -0.05, 0.02, 0.08])
    same = np.ones((len(CLASSES), len(CLASSES)))
    prior = COMMON_DEVIATION**2 * same + OWN_DEVIATION**2 * np.eye(len(CLASSES))

    def loss(x: NDArray[np.float64]) -> float:
        residual = error - shares @ x
        return float(residual @ residual / NOISE**2 + x @ np.linalg.solve(prior, x))

    best = fit(shares, error, kinds)
    for seed in range(20):
        step = np.random.default_rng(seed).normal(0.0, 1e-3, len(CLASSES))
        assert loss(best) < loss(best + step)


def test_many_measurements_recover_the_factors_and_few_stay_near_one() -> None:
    kinds = ["core"] * len(CLASSES)
    many = shares_of(400)
    found = np.exp(fit(many, many @ np.log(TRUE), kinds))
    np.testing.assert_allclose(found, TRUE, rtol=2e-3)
    noise = np.random.default_rng(1).normal(0.0, NOISE, 5)
    noisy = np.exp(fit(shares_of(5), noise, kinds))
    assert np.abs(noisy - 1).max() < 0.1
    assert fit(many, np.zeros(400), kinds).tolist() == [0.0] * len(CLASSES)


def test_a_common_error_becomes_a_common_factor() -> None:
    shares = np.array([[0.7, 0.0, 0.2, 0.0, 0.1]] * 3)
    factors = np.exp(fit(shares, np.full(3, math.log(1.2)), ["core"] * len(CLASSES)))
    np.testing.assert_allclose(factors, 1.2, atol=0.03)


def test_kinds_do_not_share_their_deviation() -> None:
    shares = np.array([[1.0, 0.0]] * 5)
    log_factors = fit(shares, np.full(5, 0.2), ["cpu", "cuda"])
    assert log_factors[0] == pytest.approx(0.2, rel=0.01)
    assert log_factors[1] == 0.0


def test_known_factors_are_the_starting_point_not_the_prior() -> None:
    shares, kinds = shares_of(6), ["core"] * len(CLASSES)
    known = np.full(len(CLASSES), 0.05)
    at_once = fit(shares, shares @ np.log(TRUE), kinds)
    again = fit(shares, shares @ (np.log(TRUE) - known), kinds, known)
    np.testing.assert_allclose(again, at_once)


def test_factors_are_within_limits() -> None:
    assert np.exp(fit(np.array([[1.0]]), np.array([3.0]), ["core"])) == pytest.approx(LARGEST)
    assert np.exp(fit(np.array([[1.0]]), np.array([-3.0]), ["core"])) == pytest.approx(1 / LARGEST)
    for (predicted_s, measured_s), factor in {
        (2.0, 3.0): 1.5,
        (1.0, 100.0): LARGEST_UNPLACED,
        (100.0, 1.0): 1 / LARGEST_UNPLACED,
    }.items():
        everything = (*CLASSES, LAUNCH)
        assert unplaced_factors(predicted_s, measured_s) == dict.fromkeys(everything, factor)


def test_ops_without_a_factor_keep_their_cost_and_sources_say_it_once() -> None:
    assert factors_of_ops(["copy", "reduction"], {"copy": 1.2}).tolist() == [1.2, 1.0]
    assert fitted_source(fitted_source("measured")) == f"measured{FITTED}"
