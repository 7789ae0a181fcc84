"""Ops that did not fit on a device are cached with the memory that was free then."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from envs.costs.cache import Conditions, CostCache, Session
from envs.costs.cached_costs import MeasuredCosts
from envs.costs.oversize_cache import OversizeCache
from envs.hardware.cache_folder import CacheWarning
from envs.hardware.cluster import Device
from envs.hardware.discover import discover

HERE = Conditions(kind="core", hardware="this", torch="2")
SIGNATURES = ("small", "large", "small", "huge")
NEEDED_BYTES = {"small": 0, "large": 1000, "huge": 5000}


class Machine:
    """A device with some free memory, on which ops that need more cannot be timed."""

    def __init__(self) -> None:
        self.free_bytes: int | None = 500
        self.profiles = 0
        (device,) = discover("cpu").devices
        self.devices = {device.kind: device}

    def costs(self) -> MeasuredCosts:
        return MeasuredCosts(
            profile=self.profile,
            method="",
            signatures=SIGNATURES,
            free_bytes=lambda _: self.free_bytes,
        )

    def profile(self, devices: Sequence[Device]) -> dict[str, NDArray[np.float64]]:
        self.profiles += 1
        room = math.inf if self.free_bytes is None else self.free_bytes
        one = [1.0 if NEEDED_BYTES[each] <= room else math.nan for each in SIGNATURES]
        return {device.kind: np.array([one, one]) for device in devices}  # calm: known at once

    def lacking(self) -> list[str]:
        """Return the ops without a cost, cached or not."""
        (found,) = self.costs().costs(self.devices).values()
        return [SIGNATURES[i] for i in np.flatnonzero(np.isnan(found.cost_s))]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv("PLACER_CACHE", str(tmp_path))
    return Machine()


@pytest.fixture
def cache(tmp_path: Path) -> OversizeCache:
    return OversizeCache(tmp_path / "folder" / "costs.sqlite")


def test_ops_without_room_are_profiled_once_for_the_same_or_less_memory(machine: Machine) -> None:
    for free_bytes in (500, 505, 300, 500):
        machine.free_bytes = free_bytes
        assert machine.lacking() == ["large", "huge"]
        assert machine.profiles == 1
    found = machine.costs().known(machine.devices)
    assert found is not None
    (known,) = found.values()
    assert known.sources[0].startswith("cached, measured 20")
    assert known.sources[1] == "cached, measured without room for it"


def test_ops_are_tried_again_with_more_memory_than_they_did_not_fit_in(machine: Machine) -> None:
    machine.lacking()
    machine.free_bytes = 2000
    assert machine.costs().known(machine.devices) is None
    assert machine.lacking() == ["huge"]
    assert machine.profiles == 2
    machine.free_bytes = 500
    assert machine.lacking() == ["huge"], "what was timed once has a time"
    machine.free_bytes = 2000
    assert machine.lacking() == ["huge"]
    assert machine.profiles == 2
    machine.free_bytes = 9000
    assert machine.lacking() == []
    assert machine.lacking() == []
    assert machine.profiles == 3


def test_less_memory_than_before_or_after_the_profile_says_nothing(machine: Machine) -> None:
    profile = machine.profile

    def crowded(devices: Sequence[Device]) -> dict[str, NDArray[np.float64]]:
        found = profile(devices)
        machine.free_bytes = 100  # another process has taken some
        return found

    costs = replace(machine.costs(), profile=crowded)
    costs.costs(machine.devices)
    machine.free_bytes = 500
    assert machine.costs().known(machine.devices) is None
    machine.free_bytes = 100
    assert machine.costs().known(machine.devices) is not None


def test_where_free_memory_is_unknown_ops_without_room_are_not_cached(machine: Machine) -> None:
    machine.lacking()
    machine.free_bytes = None
    assert machine.costs().known(machine.devices) is None
    assert replace(machine.costs(), free_bytes=None).known(machine.devices) is None


def test_a_cleared_kind_has_none_and_conditions_are_apart(cache: OversizeCache) -> None:
    session = Session(cost_s={"a": 1.0}, runs=5, spread=0.0, measured="2026-01-01")
    CostCache(cache.path).store(HERE, session)  # a file from before they were kept
    assert cache.oversize(HERE, ["a", "b"], 10) == set()
    other = replace(HERE, kind="core*2")
    for conditions in (HERE, other):
        cache.store_oversize(conditions, {"a", "b"}, set(), 10)
    cache.store_oversize(HERE, {"a"}, {"b"}, 5)
    assert cache.oversize(HERE, ["a", "b"], 10) == {"a"}
    assert cache.oversize(other, ["b", "c"], 10) == {"b"}
    CostCache(cache.path).clear("core")
    assert cache.oversize(HERE, ["a"], 10) == set()
    assert cache.oversize(other, ["a"], 10) == {"a"}


def test_sizes_that_are_no_numbers_do_not_count(cache: OversizeCache) -> None:
    cache.store_oversize(HERE, {"a", "b"}, set(), 10)
    with sqlite3.connect(cache.path) as file:
        file.execute("UPDATE oversize SET free_bytes = 'much' WHERE signature = 'a'")
    assert cache.oversize(HERE, ["a", "b"], 10) == {"b"}


def test_a_cache_that_cannot_be_written_keeps_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = OversizeCache(tmp_path / "file" / "costs.sqlite")
    with pytest.warns(CacheWarning, match="file cannot be written"):
        cache.store_oversize(HERE, {"a"}, {"b"}, 10)
    assert cache.oversize(HERE, ["a"], 10) == set()
