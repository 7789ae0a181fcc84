"""Names of core sets, wherever they are read: cluster files, placement files, replicas."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.hardware.cluster import Cluster, Device
from envs.hardware.core_sets import check_core_sets, core_runs, has_several_cores
from envs.hardware.discover import core_set, cores_of
from envs.placement_file import parse_placement
from envs.replication import Replication

BAD_NAMES = [
    (("core:0-1", "core:0"), "core:0 and core:0-1 overlap in core 0"),
    (("core:5", "core:0-3", "core:7", "core:3-4"), "core:0-3 and core:3-4 overlap in core 3"),
    (("core:0", "core:00"), "core 0: a core belongs to one device only, so leave one of them out"),
    (("n1:core:0-3", "n2:core:2", "n1:core:2"), "n1:core:0-3 and n1:core:2 overlap in core 2"),
    (("core:5-3", "core:0"), "device core:5-3 is empty: write the lower core first"),
    (("n1:core:5-3", "n1:core:0"), "device n1:core:5-3 is empty"),
    (("core:0+0", "core:1"), "device core:0+0 names a core twice: write each core once"),
    (("core:0-2+1", "core:3"), "device core:0-2+1 names a core twice"),
    (("core:0-1-1", "core:2"), "there is no device 'core:0-1-1'; write core:N"),
    (("core:", "core:2"), "there is no device 'core:'"),
    (("core:0", "core:1+"), "there is no device 'core:1+'"),
    (("n1:core:x", "core:1"), "there is no device 'n1:core:x'"),
    (("core:٣", "core:1"), "there is no device 'core:٣'"),
    (("core:0-99999999999", "core:1"), "no machine has that many, write a lower number"),
]
bad_names = pytest.mark.parametrize(("names", "message"), BAD_NAMES)


@bad_names
def test_bad_sets_in_a_cluster_are_refused_by_name(names: Sequence[str], message: str) -> None:
    devices = tuple(Device(name=name, kind="core", memory_bytes=1) for name in names)
    with pytest.raises(ValueError, match=f"cluster 'c': .*{re.escape(message)}"):
        Cluster(name="c", devices=devices)


@bad_names
def test_bad_sets_in_a_placement_are_refused_by_name(names: Sequence[str], message: str) -> None:
    devices = {f"op{i}": name for i, name in enumerate(names)}
    content = {"format": "placer-placement/1", "devices": devices}
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_placement(content, ())
    content = {"format": "placer-placement/1", "devices": {}, "device_order": list(names)}
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_placement(content, ())


@bad_names
def test_bad_sets_of_replicas_are_refused_by_name(names: Sequence[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Replication(groups=tuple((name,) for name in names))


def test_replicas_need_devices() -> None:
    with pytest.raises(ValueError, match="one or more groups"):
        Replication(groups=((),))


def test_sets_of_several_hosts_and_other_devices_do_not_overlap() -> None:
    check_core_sets(
        ["core:0-1", "n1:core:0", "n1:core:1+3", "n1:core:2", "cpu", "cuda:0", "cuda:0"]
    )


@given(st.sets(st.integers(0, 40), min_size=1))
def test_names_of_sets_are_read_back(cores: set[int]) -> None:
    runs = core_runs(core_set(cores))
    assert {core for low, high in runs for core in range(low, high + 1)} == cores


def test_a_set_of_another_host_has_no_cores_here() -> None:
    with pytest.raises(ValueError, match="there is no device n1:core:0"):
        cores_of("n1:core:0")


@pytest.mark.parametrize(
    ("name", "several"),
    [("core:0", False), ("n1:core:7", False), ("core:0-3", True), ("core:0+2", True)],
)
def test_a_set_of_several_cores_is_known_by_its_name(name: str, several: bool) -> None:
    assert has_several_cores(name) is several
