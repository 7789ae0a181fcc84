"""Clusters: TOML round trip, and refusals that name the place of the error."""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.hardware.cluster import (
    FORMAT,
    LINK_ORDERS,
    MOST_DEVICES,
    RANGES,
    SHARINGS,
    Cluster,
    Device,
    Link,
    cluster_from_dict,
    cluster_to_toml,
    load_cluster,
)
from envs.hardware.host import Host
from envs.hardware.link_tables import NO_QUEUE
from envs.problem import Problem
from graphs.graph import GraphArrays, add_op, new_graph
from tests.helpers.simulator_cases import random_case, run

PRINTABLE = st.characters(exclude_categories=["C", "Z"], include_characters=" ")
TEXT = st.text(PRINTABLE, max_size=8)
NAMES = TEXT.filter(lambda name: name and not name.startswith("core:"))  # those have a form
TIMES = st.floats(*RANGES["latency_s"])
BANDWIDTHS = st.floats(*RANGES["bandwidth_bytes_per_s"])
RATES = BANDWIDTHS | st.just(math.nan)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    names = draw(st.lists(NAMES, unique=True, min_size=1, max_size=4))
    devices = tuple(
        Device(
            name=name,
            kind=draw(NAMES),
            memory_bytes=draw(st.integers(0, 2**63 - 1)),
            launch_s=draw(TIMES),
            peak_flop_per_s=draw(RATES),
            bandwidth_bytes_per_s=draw(RATES),
            source=draw(TEXT),
            price_per_hour=draw(st.floats(0, 1e9)),
        )
        for name in names
    )
    ends = st.lists(st.sampled_from(names), unique=True, min_size=2).map(tuple)

    def link() -> Link:
        between = draw(ends)
        sharing, full_duplex = draw(st.sampled_from(SHARINGS)), draw(st.booleans())
        return Link(
            between=between,
            latency_s=draw(TIMES),
            bandwidth_bytes_per_s=draw(BANDWIDTHS),
            pinned_bandwidth_bytes_per_s=draw(st.just(0.0) | BANDWIDTHS),
            sharing=sharing,
            bus="host" if sharing == "bus" and draw(st.booleans()) else "",
            full_duplex=full_duplex,
            order=draw(st.sampled_from(LINK_ORDERS)),
            ports=draw(st.sampled_from([(), (between[:1],), (between[1:], between[:1])])),
            one_way=len(between) == 2 and draw(st.booleans()),
            ingress=sharing == "egress" and full_duplex and draw(st.booleans()),
        )

    unnamed = [name for name in names if not name.startswith("core:")]
    cut = draw(st.integers(0, len(unnamed)))
    parts = (tuple(unnamed[:cut]), tuple(unnamed[cut:]))
    hosts = tuple(
        Host(devices=part, overlap=draw(st.booleans()), autograd=draw(st.booleans()))
        for part in parts
        if part
    )
    links = [link() for _ in range(draw(st.integers(0, 3) if len(names) > 1 else st.just(0)))]
    return Cluster(
        name=draw(TEXT),
        devices=devices,
        links=tuple(links),
        hosts=hosts if draw(st.booleans()) else (),
        once_per_destination=draw(st.booleans()),
    )


def device(**changes: Any) -> dict[str, Any]:
    return {"name": "core:0", "kind": "core", "memory_bytes": 8} | changes


def link(**changes: Any) -> dict[str, Any]:
    ends = ["core:0", "core:1"]
    return {"between": ends, "latency_s": 1e-6, "bandwidth_bytes_per_s": 1e9} | changes


def pair(**changes: Any) -> dict[str, Any]:
    """Return a valid file of two cores and a link, with changed top-level keys."""
    devices = [device(), device(name="core:1")]
    return {"format": FORMAT, "name": "pair", "device": devices, "link": [link()]} | changes


def gpus(hosts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a valid file of a GPU and the CPU, with hosts."""
    devices = [device(name="cuda:0", kind="cuda"), device(name="cpu", kind="cpu*16")]
    return {"format": FORMAT, "name": "gpus", "device": devices, "host": hosts}


def test_hosts_keep_the_devices_of_a_part_of_their_cluster() -> None:
    cluster = cluster_from_dict(gpus([{"devices": ["cuda:0"]}, {"devices": ["cpu"]}]))
    assert cluster.hosts == (Host(devices=("cuda:0",)), Host(devices=("cpu",)))
    assert cluster.part([1]).hosts == (Host(devices=("cpu",)),)
    assert "overlap" not in cluster_to_toml(cluster)
    assert "autograd" not in cluster_to_toml(cluster)


def test_an_op_occupies_the_thread_for_its_launch_or_on_the_cpu_for_its_cost() -> None:
    graph = new_graph("one op")
    add_op(graph, "a", cost_s={"*": 1e-3})
    launched = [device(launch_s=1e-5, name=name, kind=kind, memory_bytes=0) for name, kind in
                (("cuda:0", "cuda"), ("n1:cpu", "cpu*16"), ("cuda:1", "cuda"))]  # fmt: skip
    content = gpus([{"devices": ["cuda:0", "n1:cpu"]}]) | {"device": launched}
    problem = Problem.of(GraphArrays.from_graph(graph), cluster_from_dict(content))
    assert problem.hosts is not None
    assert problem.hosts.thread.tolist() == [0, 0, 1]
    assert problem.hosts.launch_ns.tolist() == [10_000, 0, 0]
    assert problem.hosts.synchronous.tolist() == [False, True, True]
    assert problem.cost_ns.tolist() == [[1_000_000, 1_010_000, 1_010_000]]


def test_optional_keys_have_defaults() -> None:
    cluster = cluster_from_dict(pair())
    assert cluster.once_per_destination
    assert cluster.price_per_hour == 0.0
    assert cluster.links[0].sharing == "egress"
    text = cluster_to_toml(replace(cluster, once_per_destination=False))
    assert not {"ports", "ingress", "pinned_bandwidth_bytes_per_s", "price_per_hour"} & {
        line.split(" ")[0] for line in text.splitlines()
    }
    assert not cluster_from_dict(tomllib.loads(text)).once_per_destination
    prices = [device(price_per_hour=2), device(name="core:1", price_per_hour=0.49)]
    assert cluster_from_dict(pair(device=prices)).price_per_hour == 2.49


@settings(max_examples=60)
@given(cluster=clusters())
def test_cluster_survives_the_round_trip_through_toml(
    tmp_path_factory: pytest.TempPathFactory, cluster: Cluster
) -> None:
    path = tmp_path_factory.mktemp("clusters") / "cluster.toml"
    path.write_bytes(cluster_to_toml(cluster).encode())
    again = load_cluster(path)
    assert repr(again) == repr(cluster)
    assert cluster_to_toml(again) == cluster_to_toml(cluster)


@given(clusters())
def test_a_problem_joins_the_pairs_of_devices_that_links_join(cluster: Cluster) -> None:
    graph = new_graph("one op")
    add_op(graph, "a", cost_s={"*": 1e-6})
    devices = tuple(replace(device, launch_s=0.0) for device in cluster.devices)
    problem = Problem.of(GraphArrays.from_graph(graph), replace(cluster, devices=devices))
    for (s, a), (d, b) in permutations(enumerate(cluster.names), 2):
        link = cluster.link_between(a, b)
        assert problem.connected[s, d] == (link is not None)
        if link is not None:
            assert problem.latency_s[s, d] == link.latency_s
            assert problem.bandwidth_bytes_per_s[s, d] == link.bandwidth_bytes_per_s
            queued = sum(queue[s, d] != NO_QUEUE for queue in (problem.queue, problem.second_queue))
            both_ports = link.ingress or (link.sharing == "egress" and not link.full_duplex)
            assert queued == (0 if link.sharing == "none" else 1 + both_ports)


def test_devices_that_share_a_port_are_not_joined_by_its_link() -> None:
    devices = [device(name=name) for name in "abcd"]
    card = link(between=list("abcd"), ports=[["a", "b"]], ingress=True)
    bus = link(between=["a", "b"], sharing="bus")
    cluster = cluster_from_dict(pair(device=devices, link=[card, bus]))
    first, second = cluster.links
    assert first.ports == (("a", "b"),)
    for source, destination, expected in [
        ("a", "c", first), ("c", "b", first), ("c", "d", first), ("a", "b", second)
    ]:  # fmt: skip
        assert cluster.link_between(source, destination) is expected


def test_a_one_way_link_carries_from_the_first_to_the_second_only() -> None:
    cluster = cluster_from_dict(pair(link=[link(one_way=True, latency_s=1.0), link()]))
    there, both = cluster.links
    assert cluster.link_between("core:0", "core:1") is there
    assert cluster.link_between("core:1", "core:0") is both
    with pytest.raises(ValueError, match="a one-way link leads"):
        Link(between=("a", "b", "c"), latency_s=0.0, bandwidth_bytes_per_s=1.0, one_way=True)


def test_device_is_found_by_name_or_the_nearest_one_is_suggested() -> None:
    cluster = cluster_from_dict(pair())
    assert cluster.index("core:1") == 1
    with pytest.raises(ValueError, match=r"no device 'core1'.* did you mean"):
        cluster.index("core1")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pair(format="placer-cluster/2"), "format is 'placer-cluster/2', this version reads"),
        (pair(devices=[]), "unknown key devices; did you mean device?"),
        (pair(device=[]), "cluster 'pair' has no devices"),
        (pair(device=[device(memory=3)]), r"unknown key device\[0\]\.memory; did you mean"),
        (pair(device=[device(), device()]), "names core:0 more than once"),
        (pair(device=[device(name="")]), "device '' of kind 'core': neither may be empty"),
        (pair(device=[device(memory_bytes=True)]), r"device\[0\]\.memory_bytes is True"),
        (pair(link=[link(between="core:0")]), r"link\[0\]\.between is 'core:0', not a list"),
        (pair(link=[link(between=["core:0"])]), "name at least two different devices"),
        (pair(link=[link(between=["core:0", "gpu"])]), "names device 'gpu'"),
        (pair(link=[link(sharing="ring")]), "sharing is 'ring'"),
        (pair(link=[link(ports=["core:0"])]), r"link\[0\]\.ports\[0\] is 'core:0', not"),
        (pair(link=[link(ports=[["gpu"]])]), "ports names 'gpu'"),
        (pair(link=[link(ports=[["core:0"], ["core:0"]])]), "names 'core:0' more than once"),
        (pair(link=[link(ports=[["core:0"], []])]), "a list in ports is empty"),
        (pair(link=[link(ports=[["core:0", "core:1"]])]), "all devices share one port"),
        (pair(link=[link(ingress=1)]), r"link\[0\]\.ingress is 1, not true or false"),
        (pair(link=[link(ingress=True, full_duplex=False)]), "ingress is for full-duplex links"),
        (gpus([{"devices": ["cuda:0", "cuda:2"]}]), "names device 'cuda:2'; there are cuda:0, cpu"),
        (gpus([{"devices": ["cpu", "cpu"]}]), "hosts name device 'cpu' 2 times"),
        (gpus([{"devices": ["cpu"]}, {"devices": ["cpu"]}]), "hosts name device 'cpu' 2 times"),
        (gpus([{"devices": []}]), "a host names no devices"),
        (gpus([{"device": ["cpu"]}]), r"unknown key host\[0\]\.device; did you mean devices"),
        (gpus([{"devices": "cpu"}]), r"host\[0\]\.devices is 'cpu', not a list"),
        (gpus([{"devices": ["cpu"], "overlap": 1}]), r"host\[0\]\.overlap is 1, not true or false"),
        (gpus([{}]), r"host\[0\].*devices"),
        (pair(host=[{"devices": ["core:0"]}]), "a core has a worker process of its own"),
        (pair(transfers={"once": True}), r"unknown key transfers\.once"),
        (pair(transfers={"once_per_destination": 1}), r"transfers\.once_per_destination is 1, not"),
    ],
)
def test_fault_is_refused_with_its_place(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cluster_from_dict(content)


def test_refusal_of_a_file_starts_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('format = "x"')
    with pytest.raises(ValueError, match="format is 'x'") as refusal:
        load_cluster(path)
    assert str(refusal.value).startswith(f"{path}: ")


@settings(max_examples=60)
@given(seed=st.integers(0, 10**7))
def test_a_placement_on_part_of_a_cluster_takes_the_same_step_on_that_part_alone(seed: int) -> None:
    graph, cluster, _, priority = random_case(seed, bad_places=False)
    for node in graph.nodes.values():
        node["loaded_cost_s"] = {}  # they depend on how many devices the machine has
    rng = np.random.default_rng(seed)
    part = np.sort(rng.permutation(len(cluster))[: rng.integers(1, len(cluster) + 1)])
    places = rng.integers(0, len(part), len(graph))
    whole = run(graph, cluster, part[places].tolist(), priority)
    alone = run(graph, cluster.part(part.tolist()), places.tolist(), priority)
    assert alone.step_ns == whole.step_ns
    assert alone.start_ns.tolist() == whole.start_ns.tolist()
    assert alone.peak_bytes.tolist() == whole.peak_bytes[part].tolist()


@pytest.mark.parametrize("key", RANGES)
def test_numbers_of_devices_and_links_beyond_their_ranges_are_refused(key: str) -> None:
    low, high = RANGES[key]
    device: dict[str, Any] = {"name": "d", "kind": "k", "memory_bytes": 1}
    link: dict[str, Any] = {"between": ("d", "e"), "latency_s": 0.0, "bandwidth_bytes_per_s": 1.0}
    for value in (np.nextafter(low, -math.inf), -math.inf, math.nan, 2 * high):
        if not (low <= value <= high) and not (key == "peak_flop_per_s" and math.isnan(value)):
            with pytest.raises(ValueError, match=f"{key} is .*{low:g} .. "):
                Link(**link | {key: value}) if hasattr(Link, key) else Device(
                    **device | {key: value}
                )


def test_clusters_of_too_many_devices_are_refused() -> None:
    devices = tuple(Device(name=f"d{i}", kind="k", memory_bytes=1) for i in range(MOST_DEVICES + 1))
    with pytest.raises(ValueError, match=r"1025 devices.* 1024"):
        Cluster(name="c", devices=devices)
    assert len(Cluster(name="c", devices=devices[1:])) == MOST_DEVICES
