from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.hardware import discover as discovery
from envs.hardware.discover import (
    available_memory_bytes,
    core_set,
    cores_of,
    discover,
    physical_cores,
)

CORES = sorted(os.sched_getaffinity(0))
FIRST = f"core:{CORES[0]}"


def test_a_thread_that_ends_while_it_is_pinned_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended, listed = 2**22 + 1, discovery._threads  # Linux gives no thread such an id
    monkeypatch.setattr(discovery, "_threads", lambda: [ended, *listed()])
    with discovery.pinned(CORES[:1]):
        assert os.sched_getaffinity(0) == {CORES[0]}
    assert sorted(os.sched_getaffinity(0)) == CORES


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(8), 11})


def test_auto_takes_the_cores_that_this_process_may_run_on() -> None:
    expected = tuple(f"core:{core}" for core in physical_cores()[: discovery.MOST_CORES])
    assert discover().names == expected
    assert discover(" auto ").names == expected


@pytest.mark.usefixtures("eight_cores")
def test_auto_takes_eight_at_most() -> None:
    assert discover().names == tuple(f"core:{core}" for core in range(8))


@pytest.mark.usefixtures("eight_cores")
def test_core_sets_and_single_cores() -> None:
    cluster = discover("core:0-3, core:5,core:11")
    assert cluster.names == ("core:0-3", "core:5", "core:11")
    assert [device.kind for device in cluster.devices] == ["core*4", "core", "core"]
    assert cores_of("core:0-3") == (0, 1, 2, 3)
    assert cores_of("core:11+0+5-7") == (0, 5, 6, 7, 11)
    assert core_set([7, 0, 1, 4]) == "core:0-1+4+7"
    assert cluster.links == ()


@given(st.sets(st.sampled_from(CORES), min_size=1))
def test_a_core_set_is_named_so_that_its_cores_are_found(cores: set[int]) -> None:
    assert cores_of(core_set(cores)) == tuple(sorted(cores))


@pytest.mark.usefixtures("eight_cores")
def test_devices_share_the_free_memory_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    changing = iter((1001, 907, 802))  # other processes run
    monkeypatch.setattr(discovery, "available_memory_bytes", lambda: next(changing))
    assert [d.memory_bytes for d in discover("core:1,core:2-4").devices] == [500, 500]


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("core:0,core:0", "overlap in core 0"),
        ("core:8", "6, 7, 11"),
        ("core:0-2+2", "device core:0-2+2 names a core twice"),
        ("core:3-1", "empty"),
        ("cuda:99", "there is no device cuda:99"),
        ("cpu:0", "there is no device 'cpu:0'"),
        ("core:0,cpu", "core:0 and cpu cannot share a placement"),
        ("cpu,cpu", "device cpu is named more than once"),
        ("core:²", "there is no device 'core:²'"),
        ("", "no devices were named"),
    ],
)
def test_other_names_are_refused_with_what_to_write(names: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        discover(names)


def test_pages_of_files_that_nobody_uses_count_as_free_in_a_control_group(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    assert available_memory_bytes(tmp_path) == 100_000
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 300000\n")
    assert available_memory_bytes(tmp_path) == 400_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory_bytes(tmp_path) > 1_000_000, "that of the machine"
