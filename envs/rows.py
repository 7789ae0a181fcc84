"""Validation of placement arrays before they are passed to compiled code."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from envs.problem import Problem


def device_rows(problem: Problem, devices: ArrayLike) -> NDArray[np.int32]:
    """Return placements (B, N), or one (N,), as a contiguous, writable int32 array (B, N).

    Copies only if necessary.

    Raises:
        ValueError: wrong shape, values that are not integers, or a device that does not exist.
    """
    given, count = np.asarray(devices), problem.op_count
    if given.ndim > 2 or given.shape[-1:] != (count,):
        raise ValueError(f"devices {given.shape} must be (B, {count}) or ({count},)")
    if given.dtype.kind not in "iu":
        raise ValueError(f"devices are of type {given.dtype}, not whole numbers")
    if given.size and not 0 <= given.min() <= given.max() < problem.device_count:
        wrong = given[(given < 0) | (given >= problem.device_count)][0]
        raise ValueError(
            f"device {wrong} does not exist, {problem.cluster.name!r} has "
            f"{problem.device_count}: 0 to {problem.device_count - 1}"
        )
    return np.require(given, np.int32, ["C", "W"]).reshape(-1, count)


def device_row(problem: Problem, devices: ArrayLike) -> NDArray[np.int32]:
    """Return one placement, (N,) or (1, N), as (N,).

    Raises:
        ValueError: as for :func:`device_rows`, or there is not exactly one placement.
    """
    rows = device_rows(problem, devices)
    if len(rows) != 1:
        raise ValueError(f"this takes one placement, not {len(rows)}")
    return rows.ravel()


def priority_rows(problem: Problem, priority: ArrayLike) -> NDArray[np.float64]:
    """Return priorities (B, N) or (N,) as (B, N), like :func:`device_rows`.

    Raises:
        ValueError: wrong shape, values that are not real numbers, or a number that is not finite.
    """
    given, count = np.asarray(priority), problem.op_count
    if given.ndim > 2 or given.shape[-1:] != (count,):
        raise ValueError(f"priority {given.shape} must be (B, {count}) or ({count},)")
    if given.dtype.kind not in "iuf":
        raise ValueError(f"priorities are of type {given.dtype}, not numbers")
    if not np.isfinite(given).all():
        raise ValueError("a priority is not a finite number")
    return np.require(given, np.float64, ["C", "W"]).reshape(-1, count)
