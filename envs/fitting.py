"""Fit the simulator to measured steps, with one factor per device and one for transfers.

Ops are timed in a context that differs from a whole step; a few measured steps correct for that.
With p the logarithms of the factors and r the logarithms of predicted over measured step times,
Gauss-Newton steps with numeric derivatives minimize |r|^2 + RIDGE |p|^2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from envs.placement import Placement
from envs.problem import Problem
from envs.simulator import INFEASIBLE_NS, Simulator
from graphs.frozen import frozen

RIDGE: Final = 0.01
"""Weight of the ridge penalty: keeps factors near 1 where few or no measurements determine them."""
FARTHEST: Final = math.log(8.0)
STEPS: Final = 12
DIFFERENCE: Final = 0.03
HALVINGS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fit:
    """A problem rescaled so that its predictions match measured steps as well as factors allow."""

    problem: Problem
    device_factors: tuple[float, ...]  # multiply op costs
    transfer_factor: float  # multiplies latencies, divides bandwidths
    error_before: float  # root mean square of log(predicted / measured)
    error: float


def fitted(problem: Problem, placements: Sequence[Placement], measured_s: Sequence[float]) -> Fit:
    """Fit a problem to the measured step times of placements.

    Raises:
        ValueError: there are no measurements, one is not above 0, or a placement cannot be
            simulated.
    """
    if not placements or len(placements) != len(measured_s) or min(measured_s) <= 0.0:
        raise ValueError(f"{len(placements)} placements with steps of {list(measured_s)} s")
    pairs = [placement.arrays() for placement in placements]
    devices, priority = (np.stack(arrays) for arrays in zip(*pairs, strict=True))
    measured_ns = np.array(measured_s) * 1e9

    def residuals(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        steps = Simulator(scaled(problem, logs), memory=False).step_ns(devices, priority)
        if (steps == INFEASIBLE_NS).any():
            raise ValueError("a placement has an op where it may not run")
        return np.asarray(np.log(np.maximum(steps, 1) / measured_ns))

    logs = np.zeros(problem.device_count + 1)
    left = residuals(logs)
    before = left
    for _ in range(STEPS):
        better = _stepped(residuals, logs, left)
        if better is None:
            break
        logs, left = better
    factors = np.exp(logs).tolist()
    return Fit(
        problem=scaled(problem, logs),
        device_factors=tuple(factors[:-1]),
        transfer_factor=factors[-1],
        error_before=_root_mean_square(before),
        error=_root_mean_square(left),
    )


def scaled(problem: Problem, logs: NDArray[np.float64]) -> Problem:
    """Return the problem with device costs and transfer times multiplied by exp(logs), (D + 1,)."""
    factors = np.exp(logs)
    return replace(
        problem,
        cost_ns=frozen(np.rint(problem.cost_ns * factors[:-1]).astype(np.int64)),
        latency_s=frozen(problem.latency_s * factors[-1]),
        bandwidth_bytes_per_s=frozen(problem.bandwidth_bytes_per_s / factors[-1]),
    )


def _stepped(
    residuals: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    logs: NDArray[np.float64],
    left: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    # A damped Gauss-Newton step: better factors and residuals, or None if no step size helps.
    nudges = DIFFERENCE * np.eye(len(logs))
    slopes = np.stack([(residuals(logs + nudge) - left) / DIFFERENCE for nudge in nudges], axis=1)
    normal = slopes.T @ slopes + RIDGE * np.eye(len(logs))
    step = -np.linalg.solve(normal, slopes.T @ left + RIDGE * logs)
    least = _loss(left, logs)
    for halving in range(HALVINGS):
        tried = np.clip(logs + step / 2**halving, -FARTHEST, FARTHEST)
        remaining = residuals(tried)
        if _loss(remaining, tried) < least * (1.0 - 1e-6):
            return tried, remaining
    return None


def _loss(left: NDArray[np.float64], logs: NDArray[np.float64]) -> float:
    return float((left**2).sum() + RIDGE * (logs**2).sum())


def _root_mean_square(values: NDArray[np.float64]) -> float:
    return float(np.sqrt((values**2).mean()))
