"""A simulated step as a Chrome trace."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator_cases import problem_of, random_case

from envs.simulator import (
    INFEASIBLE_NS,
    Simulator,
)
from envs.simulator.timeline import chrome_trace

torch.set_num_threads(1)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(10**6, 10**7))
def test_the_trace_shows_every_op_transfer_and_the_peak_memory(seed: int) -> None:
    graph, cluster, devices, priority = random_case(seed, bad_places=False)
    for node in graph.nodes.values():  # nothing without duration: one round for each instant
        node["cost_s"] = {"*": 1e-6}
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
    assert len(spans) - len(ops) == len(schedule.transfers)
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in spans:
        key = (event["pid"], event["tid"])
        tracks.setdefault(key, []).append((event["ts"], event["ts"] + event["dur"]))
    for span in map(sorted, tracks.values()):
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(span))
    names = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert names >= set(tracks)
    for d, name in enumerate(cluster.names):
        used = [e["args"]["bytes"] for e in events if e["name"] == f"memory of {name}"]
        assert min(used, default=0) >= 0
        if all(t > 0 for t in schedule.transfers.end_ns - schedule.transfers.start_ns):
            assert max(used, default=0) == schedule.peak_bytes[d]
