from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.hardware.cluster import Cluster
from envs.hardware.link_tables import NO_QUEUE
from envs.simulator import (
    INFEASIBLE_NS,
    Simulator,
)
from envs.simulator.trace import chrome_trace
from tests.helpers.simulator_cases import fork, one_kind, problem_of, random_case


@settings(max_examples=60)
@given(seed=st.integers(10**6, 10**7))
def test_the_trace_shows_every_op_transfer_and_the_peak_memory(seed: int) -> None:
    graph, cluster, devices, priority = random_case(seed, bad_places=False)
    for node in graph.nodes.values():  # no zero durations: one round per instant
        node["cost_s"] = {"*": 1e-6}
        node["loaded_cost_s"] = {"*": 1.5e-6} if node["loaded_cost_s"] else {}
    problem, where, levels = problem_of((graph, cluster, devices, priority))
    schedule = Simulator(problem).run(where, levels)
    if schedule.step_ns == INFEASIBLE_NS:
        with pytest.raises(ValueError, match="cannot run"):
            chrome_trace(problem, schedule)
        return
    trace = json.loads(json.dumps(chrome_trace(problem, schedule)))
    events = trace["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    ops = {event["name"]: event for event in spans if event["pid"] == 1}
    assert set(ops) == set(graph)
    assert {name: e["tid"] for name, e in ops.items()} == dict(zip(graph, devices, strict=True))
    assert max(e["ts"] + e["dur"] for e in ops.values()) == pytest.approx(schedule.step_ns / 1000)
    sent = schedule.transfers
    ports = 1 + (problem.second_queue[sent.source, sent.destination] != NO_QUEUE)
    assert len(spans) - len(ops) == ports.sum()
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in spans:
        key = (event["pid"], event["tid"])
        tracks.setdefault(key, []).append((event["ts"], event["ts"] + event["dur"]))
    for span in map(sorted, tracks.values()):
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(span))
    titles = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert len(set(titles)) == len(titles)
    names = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert names >= set(tracks)
    for d, name in enumerate(cluster.names):
        used = [e["args"]["bytes"] for e in events if e["name"] == f"memory of {name}"]
        assert min(used, default=0) >= 0
        if all(t > 0 for t in schedule.transfers.end_ns - schedule.transfers.start_ns):
            assert max(used, default=0) == schedule.peak_bytes[d]


def link_tracks(cluster: Cluster, devices: list[int]) -> dict[str, list[str]]:
    """Return {link track: transfers from op s to other ops}."""
    case = (fork(len(devices) - 1), cluster, devices, [0.0] * len(devices))
    problem, where, levels = problem_of(case)
    events = chrome_trace(problem, Simulator(problem).run(where, levels))["traceEvents"]
    links = [event for event in events if event["pid"] == 2]
    name = {e["tid"]: e["args"]["name"] for e in links if e["name"] == "thread_name"}
    return {
        name[tid]: [e["args"]["to"] for e in links if e["ph"] == "X" and e["tid"] == tid]
        for tid in name
    }


def test_two_links_of_one_device_have_tracks_of_their_own() -> None:
    five = one_kind(5)
    link = five.links[0]
    near, far = (replace(link, between=ends) for ends in (("d0", "d1", "d2"), ("d0", "d3", "d4")))
    assert link_tracks(replace(five, links=(near, far)), [0, 1, 2, 3, 4]) == {
        "d0 → d1, d2": ["d1", "d2"],
        "d0 → d3, d4": ["d3", "d4"],
    }
    assert link_tracks(five, [0, 1, 2]) == {"d0 → all": ["d1", "d2"]}
    assert link_tracks(one_kind(3, sharing="bus"), [0, 1]) == {"bus d0, d1, d2": ["d1"]}


def test_a_transfer_shows_on_every_port_that_it_occupies() -> None:
    ports = (("d0", "d1"), ("d2", "d3"))
    assert link_tracks(one_kind(4, ports=ports, full_duplex=False), [0, 2]) == {
        "d0, d1 ↔ d2, d3": ["d2"],
        "d2, d3 ↔ d0, d1": ["d2"],
    }
    assert link_tracks(one_kind(3, ingress=True), [0, 1, 2]) == {
        "out: d0 → all": ["d1", "d2"],
        "in: all → d1": ["d1"],
        "in: all → d2": ["d2"],
    }
    assert link_tracks(one_kind(4, ports=ports), [0, 2]) == {"d0, d1 → d2, d3": ["d2"]}


def test_tracks_are_in_the_order_of_devices_whichever_is_used_first() -> None:
    tracks = link_tracks(one_kind(3, ingress=True), [1, 2, 0])
    assert list(tracks) == ["out: d1 → all", "in: all → d0", "in: all → d2"]
