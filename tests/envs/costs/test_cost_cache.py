"""The cache of op times: known entries, concurrent processes, and files that are not caches."""

from __future__ import annotations

import contextlib
import math
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.costs.cache import TABLES, Conditions, CostCache, Session, UnreadableCacheError, file_name
from envs.costs.factor_cache import FactorCache
from envs.hardware.cache_folder import CacheWarning, warn_if_unwritable
from envs.hardware.cluster import LONGEST_S

HERE = Conditions(kind="core", hardware="this", torch="2")
SPREADS = st.sampled_from([0.0, 0.1, 0.11, 3.0])
COSTS_S = st.floats(1e-9, 100.0)


@pytest.fixture
def cache(tmp_path: Path) -> CostCache:
    return CostCache(tmp_path / "folder" / "costs.sqlite")


def session(
    cost_s: Mapping[str, float], spread: float = 0.0, measured: str = "2026-01-01"
) -> Session:
    return Session(cost_s=cost_s, runs=5, spread=spread, measured=measured)


def cost_s(cache: CostCache, signature: str = "a", conditions: Conditions = HERE) -> float | None:
    known = cache.known(conditions, [signature])
    return known[signature].cost_s if known else None


# --- known entries


def test_a_calm_session_is_known_at_once_with_its_day(cache: CostCache) -> None:
    assert cache.known(HERE, ["a"]) == {}
    cache.store(HERE, session({"a": 2.0, "b": 3.0}, measured="2026-01-31"))
    thousands = [str(i) for i in range(3000)]
    known = CostCache(cache.path).known(HERE, ["b", "c", *thousands, "a"])
    assert {name: cost.cost_s for name, cost in known.items()} == {"a": 2.0, "b": 3.0}
    assert known["a"].measured == "2026-01-31"


def test_a_session_of_unknown_noise_counts_as_noisy(cache: CostCache) -> None:
    for known in (None, None, 2.0):
        cache.store(HERE, Session(cost_s={"a": 2.0}, runs=1, spread=None, measured="2026-01-01"))
        assert cost_s(cache) == known
    cache.store(HERE, session({"a": 5.0}))
    assert cost_s(cache) == 5.0


@pytest.mark.slow
@settings(max_examples=40)
@given(st.lists(st.tuples(SPREADS, st.dictionaries(st.sampled_from("ab"), COSTS_S)), max_size=8))
def test_what_is_known_is_what_the_rule_says(
    tmp_path_factory: pytest.TempPathFactory, sessions: list[tuple[float, dict[str, float]]]
) -> None:
    cache = CostCache(tmp_path_factory.mktemp("cache") / "costs.sqlite")
    for spread, costs_s in sessions:
        cache.store(HERE, session(costs_s, spread))
    for signature in "ab":
        last = [(spread, costs[signature]) for spread, costs in sessions if signature in costs][-5:]
        calm = [seconds for spread, seconds in last if spread <= 0.1]
        noisy = [seconds for _, seconds in last] if len(last) >= 3 else []
        counting = sorted(calm or noisy)
        expected = counting[(len(counting) - 1) // 2] if counting else None
        assert cost_s(cache, signature) == expected


@pytest.mark.parametrize("never", [math.nan, math.inf, 0.0, -1.0, 1.01 * LONGEST_S])
def test_what_cannot_be_a_time_is_not_kept(never: float, cache: CostCache) -> None:
    cache.store(HERE, session({"a": never, "b": 1.0}))
    assert list(cache.known(HERE, "ab")) == ["b"]
    cache.store(HERE, session({"a": never}))
    cache.store(HERE, session({"a": 1.0}, spread=math.nan))
    assert cost_s(cache) is None
    assert [holding.sessions for holding in cache.holdings()] == [1]


@pytest.mark.parametrize(
    "other",
    [replace(HERE, kind="core*2"), replace(HERE, hardware="other"), replace(HERE, torch="3")],
)
def test_times_are_valid_for_their_conditions_only(other: Conditions, cache: CostCache) -> None:
    cache.store(HERE, session({"a": 1.0}))
    assert cost_s(cache, conditions=other) is None
    cache.store(other, session({"a": 2.0}))
    assert (cost_s(cache), cost_s(cache, conditions=other)) == (1.0, 2.0)
    if other.kind != HERE.kind:
        cache.clear(HERE.kind)
        assert [holding.conditions for holding in cache.holdings()] == [other]
        assert (cost_s(cache), cost_s(cache, conditions=other)) == (None, 2.0)


# --- other processes

WRITER = """
import sys
from pathlib import Path
from envs.costs.cache import CostCache, Conditions, Session
path, name = Path(sys.argv[1]), sys.argv[2]
here = Conditions(kind="core", hardware="this", torch="2")
for i in range(40):
    cache = CostCache(path)
    cost_s = {f"{name}{i}": 1.0, **{f"both{k}": 2.0 for k in range(50)}}
    cache.store(here, Session(cost_s=cost_s, runs=5, spread=0.0, measured="2026-01-01"))
    known = cache.known(here, [f"{name}{k}" for k in range(40)] + ["both7"])
    assert len(known) == i + 2, (i, sorted(known))
"""


def test_two_processes_write_and_read_at_once_and_nothing_is_lost(cache: CostCache) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(cache.path), name]) for name in "xy"
    ]
    assert [writer.wait(timeout=600) for writer in writers] == [0, 0]
    names = [f"{name}{i}" for name in "xy" for i in range(40)]
    assert set(cache.known(HERE, names)) == set(names)
    assert cost_s(cache, "both3") == 2.0
    assert cache.files() == [cache.path]


def test_a_file_that_is_locked_for_long_is_no_failure(
    cache: CostCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envs.costs.cache.WAIT_S", 0.01)
    cache.store(HERE, session({"a": 1.0}))
    other = sqlite3.connect(cache.path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    cache.store(HERE, session({"b": 1.0}))
    assert cost_s(cache) is None
    with pytest.raises(OSError, match="locked by another process"):
        cache.holdings()
    other.close()
    assert list(cache.known(HERE, "ab")) == ["a"]


# --- files that are not caches


def foreign(path: Path) -> None:
    path.unlink()
    with contextlib.closing(sqlite3.connect(path)) as file:
        file.execute("CREATE TABLE recipes (name TEXT)")
        file.commit()


def without_a_table(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as file:
        file.execute("DROP TABLE cost")
        file.commit()


def torn(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:200] + b"\xff" * (len(content) - 200))


DAMAGES = [
    foreign,
    without_a_table,
    torn,
    lambda path: path.write_bytes(b"no database at all, but long enough to be taken for one" * 99),
]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    "meet", [cost_s, lambda cache: cache.store(HERE, session({"a": 3.0}))], ids=["read", "write"]
)
def test_a_damaged_or_foreign_file_is_set_aside_with_a_remark(
    damage: Callable[[Path], None], meet: Callable[[CostCache], object], cache: CostCache
) -> None:
    cache.store(HERE, session({"a": 1.0}))
    damage(cache.path)
    content = cache.path.read_bytes()
    with pytest.raises(UnreadableCacheError):
        cache.holdings()
    with pytest.warns(UserWarning, match="no readable cache of op costs"):
        meet(cache)
    cache.store(HERE, session({"a": 2.0}))
    assert cost_s(cache) == 2.0
    aside = cache.path.with_name("costs.sqlite.set-aside")
    assert aside.read_bytes() == content
    assert cache.files() == [cache.path, aside]


def test_an_empty_file_is_filled(cache: CostCache) -> None:
    cache.path.parent.mkdir()
    cache.path.touch()
    assert (cost_s(cache), cache.holdings()) == (None, [])
    cache.store(HERE, session({"a": 1.0}))
    assert cost_s(cache) == 1.0


def test_the_folder_is_for_its_user_alone_and_texts_can_be_printed(cache: CostCache) -> None:
    cache.store(HERE, session({"a": 1.0}))
    assert stat.S_IMODE(cache.path.parent.stat().st_mode) == 0o700
    cache.store(replace(HERE, kind="core\x1b[2J"), session({"a": 1.0}))
    with pytest.raises(ValueError, match="cannot be printed"):
        cache.holdings()


@pytest.mark.parametrize(
    "damage", ["UPDATE session SET spread = 'x'", "UPDATE session SET measured = 7, spread = NULL"]
)
def test_a_session_with_values_of_another_type_does_not_count(
    damage: str, cache: CostCache
) -> None:
    cache.store(HERE, session({"a": 1.0}))
    with contextlib.closing(sqlite3.connect(cache.path)) as file:
        file.execute("PRAGMA writable_schema = ON")
        file.execute("UPDATE sqlite_master SET sql = replace(sql, 'NOT NULL', '')")
        file.commit()
    with contextlib.closing(sqlite3.connect(cache.path)) as file:
        file.execute(damage)
        file.commit()
    assert cost_s(cache) is None
    cache.store(HERE, session({"a": 2.0}))
    assert cost_s(cache) == 2.0
    assert len(cache.holdings()) == 1


def test_a_version_with_other_tables_has_a_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACER_CACHE", str(tmp_path))
    CostCache().store(HERE, session({"a": 1.0}))
    name = file_name([*TABLES, "CREATE TABLE more (id INTEGER)"])
    assert name != file_name(TABLES)
    (tmp_path / name).touch()
    assert CostCache().files() == [tmp_path / file_name(TABLES), tmp_path / name]
    assert cost_s(CostCache()) == 1.0


def test_without_a_home_nothing_is_kept_and_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("PLACER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.warns(CacheWarning, match="PLACER_CACHE"):
        cache = CostCache()
    cache.store(HERE, session({"a": 1.0}))
    assert cost_s(cache) is None
    assert (cache.holdings(), cache.files()) == ([], [])


@pytest.mark.parametrize("folder", ["file", "file/below", "/proc/no such folder"])
def test_a_folder_in_which_nothing_can_be_kept_is_told_once(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warn_if_unwritable.cache_clear()
    (tmp_path / "file").touch()
    monkeypatch.setenv("PLACER_CACHE", str(tmp_path / folder))
    cache = CostCache()
    assert cost_s(cache) is None
    with pytest.warns(CacheWarning, match=f"{folder} cannot be written: op times are measured"):
        cache.store(HERE, session({"a": 1.0}))
    cache.store(HERE, session({"b": 1.0}))
    FactorCache().scale_factors(HERE, "a step", {"load": 2.0}, 4.0)
