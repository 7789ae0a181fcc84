"""Factors in the cache of op costs: kept with the costs of a step, and gone with them."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from envs.costs.cache import TABLES, Conditions, CostCache, Session, file_name
from envs.costs.cached_costs import MeasuredCosts
from envs.costs.factor_cache import FactorCache, step_id
from envs.costs.factors import FITTED, LARGEST
from envs.hardware.cache_folder import CacheWarning
from envs.hardware.cluster import Device
from envs.hardware.discover import discover

HERE = Conditions(kind="core", hardware="this", torch="2")
SIGNATURES = ("a", "b", "c")
STEP = step_id(SIGNATURES)


@pytest.fixture
def cache(tmp_path: Path) -> FactorCache:
    return FactorCache(tmp_path / "folder" / "costs.sqlite")


def test_factors_are_those_of_a_step_under_its_conditions(cache: FactorCache) -> None:
    assert cache.factors(HERE, STEP) == {}
    cache.scale_factors(HERE, STEP, {"convolution": 1.2, "copy": 0.9}, LARGEST)
    assert cache.factors(HERE, STEP) == {"convolution": 1.2, "copy": 0.9}
    assert cache.factors(HERE, step_id(SIGNATURES[:2])) == {}
    assert cache.factors(HERE, step_id(SIGNATURES, unplaced=True)) == {}
    assert cache.factors(replace(HERE, kind="core*2"), STEP) == {}
    assert cache.factors(replace(HERE, torch="3"), STEP) == {}


def test_later_factors_multiply_earlier_ones_within_the_limits(cache: FactorCache) -> None:
    cache.scale_factors(HERE, STEP, {"convolution": 1.25, "copy": 0.8}, LARGEST)
    cache.scale_factors(HERE, STEP, {"convolution": 1.4, "copy": 1.25}, LARGEST)
    assert cache.factors(HERE, STEP) == pytest.approx({"convolution": LARGEST, "copy": 1.0})


def test_factors_that_were_not_fitted_again_stay(cache: FactorCache) -> None:
    cache.scale_factors(HERE, STEP, {"load": 1.2}, LARGEST)
    cache.scale_factors(HERE, STEP, {"copy": 1.1}, LARGEST)
    assert cache.factors(HERE, STEP) == {"load": 1.2, "copy": 1.1}


def test_a_cleared_kind_has_no_factors(cache: FactorCache) -> None:
    other = replace(HERE, kind="core*2")
    for conditions in (HERE, other):
        cache.scale_factors(conditions, STEP, {"copy": 1.1}, LARGEST)
    CostCache(cache.path).clear("core")
    assert cache.factors(HERE, STEP) == {}
    assert cache.factors(other, STEP) == {"copy": 1.1}
    cache.forget_factors(other, STEP)
    assert cache.factors(other, STEP) == {}


def test_a_cache_from_before_there_were_factors_is_read_and_gets_them(cache: FactorCache) -> None:
    session = Session(cost_s={"a": 1.0}, runs=5, spread=0.0, measured="2026-01-01")
    CostCache(cache.path).store(HERE, session)
    with sqlite3.connect(cache.path) as file:
        tables = [name for (name,) in file.execute("SELECT name FROM sqlite_master")]
    assert "factor" not in tables
    assert file_name(TABLES) == CostCache().path.name
    assert cache.factors(HERE, STEP) == {}
    cache.scale_factors(HERE, STEP, {"copy": 1.1}, LARGEST)
    assert cache.factors(HERE, STEP) == {"copy": 1.1}
    assert cache.known(HERE, ["a"])["a"].cost_s == 1.0


def test_factors_that_are_no_numbers_above_zero_are_ignored(cache: FactorCache) -> None:
    cache.scale_factors(HERE, STEP, {"copy": 1.1, "reduction": 1.2}, LARGEST)
    with sqlite3.connect(cache.path) as file:
        file.execute("PRAGMA ignore_check_constraints = ON")
        file.execute("UPDATE factor SET factor = 'much' WHERE class = 'copy'")
    assert cache.factors(HERE, STEP) == {"reduction": 1.2}


def test_a_cache_that_cannot_be_written_keeps_no_factors(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = FactorCache(tmp_path / "file" / "costs.sqlite")
    with pytest.warns(CacheWarning, match="file cannot be written"):
        cache.scale_factors(HERE, STEP, {"copy": 1.1}, LARGEST)
    assert cache.factors(HERE, STEP) == {}


# --- with the costs


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setenv("PLACER_CACHE", str(tmp_path))
    (one,) = discover("core:0").devices
    return one


def costs_of(
    unplaced: bool = False, signatures: tuple[str, ...] | None = SIGNATURES
) -> MeasuredCosts:
    """Return the costs of three ops that take one second each in every run."""
    return MeasuredCosts(
        profile=lambda devices: {device.kind: np.ones((3, 3)) for device in devices},
        method="",
        signatures=signatures,
        classes=("convolution", "copy", "reduction"),
        unplaced=unplaced,
    )


def seconds(costs: MeasuredCosts, device: Device) -> list[float]:
    known = costs.known({"core": device})
    assert known is not None
    return list(known["core"].cost_s)


FACTORS: Mapping[str, Mapping[str, float]] = {
    "core": {"convolution": 1.2, "copy": 0.9},
    "cuda": {"convolution": 1.3},
}


def test_cached_costs_are_fitted_and_say_so_until_the_step_is_profiled_again(
    device: Device,
) -> None:
    costs, devices = costs_of(), {"core": device}
    costs.costs(devices)
    assert seconds(costs, device) == [1.0, 1.0, 1.0]
    costs.keep_factors(devices, FACTORS)
    assert seconds(costs, device) == [1.2, 0.9, 1.0]
    cached = costs.costs(devices)["core"]
    assert cached.cost_s.tolist() == [1.2, 0.9, 1.0]
    assert all(source.endswith(FITTED) for source in cached.sources)

    assert costs.costs(devices, fresh=True)["core"].cost_s.tolist() == [1.0, 1.0, 1.0]
    assert seconds(costs, device) == [1.0, 1.0, 1.0]
    known = costs.known(devices)
    assert known is not None
    assert not any(FITTED in source for source in known["core"].sources)


def test_the_unplaced_model_has_factors_of_its_own(device: Device) -> None:
    placed, unplaced, devices = costs_of(), costs_of(unplaced=True), {"core": device}
    placed.costs(devices)
    unplaced.keep_factors(
        devices, {"core": dict.fromkeys(("convolution", "copy", "reduction"), 2.0)}
    )
    assert seconds(placed, device) == [1.0, 1.0, 1.0]
    assert seconds(unplaced, device) == [2.0, 2.0, 2.0]
    placed.costs(devices, fresh=True)
    assert seconds(unplaced, device) == [1.0, 1.0, 1.0]


def test_costs_that_cannot_be_cached_keep_no_factors(device: Device) -> None:
    costs = costs_of(signatures=None)
    costs.keep_factors({"core": device}, FACTORS)
    assert costs.known({"core": device}) is None
    assert not CostCache().path.exists()
