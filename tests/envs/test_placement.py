"""Placements: replay data, queries, and refusals."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.hardware.cluster import Cluster, Device
from envs.placement import OBJECTIVES, MadeBy, Placement
from envs.placement_file import FORMAT
from graphs.graph import GraphArrays, add_edge, add_op, new_graph

IDS = (
    "stem:convolution",
    "stem.bn@1:batch_norm#2",
    "stemless:relu",
    "stem:backward/convolution",
    ":loss",
)
PRINTABLE = st.characters(exclude_categories=["C", "Z"], include_characters=" ")
RECORD = st.fixed_dictionaries(
    {"step_s": st.floats(0, 5.5e9), "note": st.text(PRINTABLE, max_size=5) | st.integers()},
    optional={
        "peak_memory_bytes": st.dictionaries(
            st.text(PRINTABLE, max_size=5), st.integers(0, 2**63 - 1), max_size=2
        )
    },
)


def cluster_of(*names: str) -> Cluster:
    return Cluster(
        name="test", devices=tuple(Device(name=n, kind="core", memory_bytes=8) for n in names)
    )


def nest(depth: int) -> list[Any]:
    return [nest(depth - 1)] if depth else []


def chain(**changes: Any) -> GraphArrays:
    """Return the ops of IDS in a chain; ``changes`` apply to each of them."""
    graph = new_graph("chain")
    for op_id in IDS:
        add_op(graph, op_id, cost_s={"*": 1.0}, **changes)
    for source, target in pairwise(IDS):
        add_edge(graph, source, target)
    return GraphArrays.from_graph(graph)


def place(graph: GraphArrays, cluster: Cluster, devices: list[int]) -> Placement:
    return Placement.of(graph, cluster, np.array(devices), np.arange(len(devices), 0, -1))


CLUSTER = cluster_of("core:0", "core:1")
TRIAL = {"step_s": 1, "predicted_s": 1, "samples": 0}
GRAPH = chain()


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    names = draw(
        st.lists(st.text(PRINTABLE, min_size=1, max_size=5), unique=True, min_size=1, max_size=3)
    )
    ops = draw(st.lists(st.text(PRINTABLE, max_size=5), unique=True, min_size=1, max_size=5))
    return Placement(
        graph=draw(st.text(PRINTABLE, max_size=5)),
        cluster=draw(st.text(PRINTABLE, max_size=5)),
        ops=tuple(ops),
        device_names=tuple(names),
        devices=tuple(draw(st.integers(0, len(names) - 1)) for _ in ops),
        priority=tuple(draw(st.floats(allow_nan=False, allow_infinity=False)) for _ in ops),
        objective=draw(st.sampled_from(OBJECTIVES)),
        micro_batches=draw(st.integers(1, 64)),
        predicted=draw(st.none() | RECORD),
        measured=draw(st.none() | RECORD),
        made_by=MadeBy(placer="p", seed=draw(st.none() | st.integers()), budget="9e", version="0"),
    )


@settings(max_examples=50)
@given(placement=placements())
def test_placement_survives_the_round_trip_through_a_file(
    tmp_path_factory: pytest.TempPathFactory, placement: Placement
) -> None:
    path = tmp_path_factory.mktemp("placements") / "placement.json"
    placement.save(path)
    assert Placement.load(path, placement.device_names) == placement
    assert [file.name for file in path.parent.iterdir()] == ["placement.json"]


def test_a_file_says_that_the_model_is_left_unplaced_only_if_it_is(tmp_path: Path) -> None:
    placed, path = place(GRAPH, CLUSTER, [1] * len(GRAPH)), tmp_path / "placement.json"
    placed.save(path)
    assert "unplaced" not in json.loads(path.read_text())
    assert not Placement.load(path).unplaced
    replace(placed, unplaced=True).save(path)
    read = Placement.load(path)
    assert read.unplaced
    assert read.used_devices == ("core:1",)
    assert read.aligned(GRAPH, CLUSTER) == replace(placed, unplaced=True)


def test_devices_are_in_order_of_first_use_where_no_order_is_given() -> None:
    read = Placement.from_dict({"format": FORMAT, "devices": {"a": "y", "b": "x", "c": "y"}})
    assert read.device_names == ("y", "x")
    assert read.devices == (0, 1, 0)
    assert read.priority == (0.0, 0.0, 0.0)


def test_devices_in_use_keep_the_order_of_the_cluster_in_a_file(tmp_path: Path) -> None:
    placement = place(GRAPH, cluster_of("b", "idle", "a"), [2, 0, 2, 0, 2])
    placement.save(tmp_path / "placement.json")
    read = Placement.load(tmp_path / "placement.json")
    assert read.device_names == ("b", "a")
    assert read.devices == (1, 0, 1, 0, 1)
    edited = json.loads((tmp_path / "placement.json").read_text())
    edited["devices"] |= {GRAPH.ids[0]: "c"}
    assert Placement.from_dict(edited).device_names == ("b", "a", "c")


def test_where_a_module_is_is_told_by_device_and_phase() -> None:
    ops = ["a.0:mm", "a.0:backward/mm", "a.1@2:mm", ":add", "a.1:optimizer/sgd"]
    placement = Placement(
        graph="",
        cluster="",
        ops=tuple(ops),
        device_names=("x", "y"),
        devices=(1, 0, 0, 1, 0),
        priority=(0.0,) * 5,
    )
    assert placement.device_of("a") == "y"
    assert placement.device_of("a.1") == placement.device_of("a.1@2:mm") == "x"
    assert placement.devices_of("a.0") == {"y": 1, "x": 1}
    assert placement.devices_of("a.1") == {"x": 2}, "of all its calls"
    assert placement.phases_of("a") == {
        "x": {"forward": 1, "backward": 1, "optimizer": 1},
        "y": {"forward": 1},
    }
    assert placement.phases_of("(model)") == {"y": {"forward": 1}}
    assert placement.device_of("(model)") == "y"


def test_unknown_module_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(KeyError, match=r"no op or module 'ste'.*did you mean stem\?"):
        place(GRAPH, CLUSTER, [0] * 5).device_of("ste")
    with pytest.raises(KeyError, match=r"no op or module 'stem\.bm'.*did you mean stem\.bn"):
        place(GRAPH, CLUSTER, [0] * 5).device_of("stem.bm")


def test_placement_of_another_graph_is_refused() -> None:
    placement = place(GRAPH, CLUSTER, [0] * 5)
    other = chain(output_bytes=1)
    for refused in (placement.check, placement.aligned):
        with pytest.raises(ValueError, match=f"made for graph {GRAPH.hash[:12]}, not for 'chain'"):
            refused(other, CLUSTER)


def test_placement_on_other_devices_is_refused() -> None:
    with pytest.raises(ValueError, match=r"core:0, core:1, .* cpu"):
        place(GRAPH, CLUSTER, [0] * 5).check(GRAPH, cluster_of("cpu"))


def test_split_group_is_refused() -> None:
    tied = chain(colocate="tied")
    place(tied, CLUSTER, [1] * 5).check(tied, CLUSTER)
    with pytest.raises(ValueError, match=r"'stem:convolution' and 'stemless:relu' share state"):
        place(tied, CLUSTER, [1, 1, 0, 1, 1]).check(tied, CLUSTER)


def test_op_where_the_graph_does_not_allow_it_is_refused() -> None:
    limited = chain(devices=("core:1", "cpu"))
    with pytest.raises(ValueError, match="is on core:0, but may only run on core:1, cpu"):
        place(limited, CLUSTER, [1, 0, 1, 1, 1]).check(limited, CLUSTER)


@given(order=st.permutations(range(5)), flipped=st.booleans(), hashed=st.booleans())
def test_aligned_placement_means_the_same_in_the_graphs_order(
    order: list[int], flipped: bool, hashed: bool
) -> None:
    original = place(GRAPH, CLUSTER, [0, 1, 1, 0, 1])
    data = original.to_dict() | {"graph": GRAPH.hash if hashed else "", "cluster": "other"}
    data["devices"] = {IDS[i]: data["devices"][IDS[i]] for i in order}
    names = ("core:1", "core:0") if flipped else ("core:0", "core:1")
    aligned = Placement.from_dict(data, names).aligned(GRAPH, CLUSTER)
    assert aligned == original


def test_aligned_refuses_missing_and_surplus_ops_and_unknown_devices() -> None:
    whole = dict.fromkeys(IDS, "core:1")

    def align(devices: dict[str, str]) -> None:
        Placement.from_dict({"format": FORMAT, "devices": devices}).aligned(GRAPH, CLUSTER)

    with pytest.raises(ValueError, match=r"lacks 3 of the 5 ops .* 'stemless:relu'"):
        align(dict.fromkeys(IDS[:2], "core:1"))
    with pytest.raises(ValueError, match=r"2 ops .* 'x'"):
        align({"x": "core:1", "y": "core:1"} | whole)
    with pytest.raises(ValueError, match="'test' has no device 'core:7'"):
        align(whole | {IDS[3]: "core:7"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"priority": (1.0,)}, "1 priorities"),
        ({"devices": (0, 2)}, "'b' is on device 2"),
        ({"devices": (-1, 0)}, "'a' is on device -1"),
        ({"priority": (0.0, math.nan)}, "'b': priority is nan"),
        ({"objective": "speed"}, "'speed'"),
        ({"micro_batches": 0}, "micro_batches is 0"),
        ({"ops": (), "devices": (), "priority": ()}, "at least one op"),
        ({"unplaced": True}, "is on one device, not on x, y"),
        ({"predicted": {"step_s": math.inf}}, r"predicted\.step_s is inf"),
        ({"measured": {"step_s": 1.0, "contention": math.nan}}, r"measured\.contention is nan"),
    ],
)
def test_placement_without_meaning_cannot_be_made(changes: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {
        "graph": "",
        "cluster": "",
        "ops": ("a", "b"),
        "device_names": ("x", "y"),
        "devices": (0, 1),
        "priority": (0.0, 1.0),
    }
    Placement(**fields)
    with pytest.raises(ValueError, match=message):
        Placement(**fields | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "placer-placement/9"}, "format is 'placer-placement/9'"),
        ({"device": {}}, "unknown key device; .*devices?"),
        ({"devices": None}, "devices is None"),
        ({"devices": {"a": 0}}, r"devices\['a'\] is 0"),
        ({"devices": {}}, "at least one op"),
        ({"devices": {"a": "x", "b": ""}}, r"devices\['b'\] is ''"),
        ({"devices": {"a": "z"}}, r"devices\['a'\] is 'z'"),
        ({"priority": {"c": 1}}, r"priority\['c'\]"),
        ({"priority": {"a": True}}, r"priority\['a'\] is True"),
        ({"micro_batches": 1.5}, "micro_batches is 1.5"),
        ({"predicted": {"step_s": None}}, r"predicted\.step_s is None"),
        (
            {"predicted": {"step_s": 1.0, "peak_memory_bytes": {"x": "1 GB"}}},
            r"predicted\.peak_memory_bytes\.x is '1 GB'",
        ),
        ({"predicted": {}}, "predicted lacks step_s"),
        ({"predicted": {"step_s": {"a": 1}}}, r"predicted\.step_s is \{'a': 1\}"),
        ({"measured": {"step_s": 1, "spread": -0.1}}, r"measured\.spread is -0\.1"),
        ({"measured": {"step_s": 1, "contention": {}}}, r"measured\.contention is \{\}"),
        ({"measured": {"step_s": 1, "trials": 3}}, r"measured\.trials is 3, not an object"),
        ({"measured": {"step_s": 1, "trials": {"a": {"step_s": 1}}}}, r"measured\.trials\.a lacks"),
        ({"measured": {"step_s": 1, "trials": {"a": TRIAL}}}, r"measured\.trials\.a\.samples is 0"),
        ({"measured": {"step_s": 1, "note": [math.inf]}}, r"measured\.note is inf"),
        ({"measured": {"step_s": 1, "note": nest(9)}}, r"measured\.note is nested"),
        ({"in_flight": 2**70}, "in_flight is 1180591620717411303424"),
        ({"devices": {str(i): f"d{i}" for i in range(1025)}}, "1025"),
        ({"replicas": {"groups": [["x"]], "accumulate": 1e300}}, "accumulate is 1"),
        ({"unplaced": 1}, "unplaced is 1, neither true nor false"),
        ({"unplaced": True}, "is on one device, not on x, y"),
        ({"device_order": "ab"}, "device_order is 'ab'"),
        ({"device_order": ["x", "x"]}, "'x' twice"),
        ({"made_by": {"author": "x"}}, r"made_by\.author"),
        ({"made_by": {"seed": "x"}}, r"made_by\.seed is 'x'"),
    ],
)
def test_refusal_of_a_file_starts_with_its_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "placement.json"
    valid = {"format": FORMAT, "devices": {"a": "x", "b": "y"}}
    names = () if len(changes.get("devices") or ()) > 2 else ("x", "y")
    path.write_text(json.dumps(valid))
    Placement.load(path, ("x", "y"))
    path.write_text(json.dumps(valid | changes))
    with pytest.raises(ValueError, match=message) as refusal:
        Placement.load(path, names)
    assert str(refusal.value).startswith(f"{path}: ")
