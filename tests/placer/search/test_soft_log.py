from __future__ import annotations

import numpy as np

from envs.compiled import compiled_borrowing
from envs.problem import Singles
from placer.search.list_scheduler.soft_log import soft_log, soft_log_of

NUMBERS = np.concatenate([[0.0], np.geomspace(1e-6, 1e30, 5000)]).astype(np.float32)


@compiled_borrowing
def _fill(x: Singles, logs: Singles) -> None:
    for k in range(len(x)):
        logs[k] = soft_log_of(x[k])


def test_it_is_near_the_logarithm_and_rises_but_for_rounding() -> None:
    logs = soft_log(NUMBERS)
    assert logs[0] == 0.0
    assert (np.diff(logs) > -1e-6).all()
    assert np.abs(logs - np.log1p(NUMBERS.astype(np.float64))).max() < 0.0055


def test_the_compiled_form_is_the_same_to_the_last_bit() -> None:
    logs = np.zeros_like(NUMBERS)
    _fill(NUMBERS.copy(), logs)
    assert logs.tolist() == soft_log(NUMBERS).tolist()
