"""Recorded candidates that can be made again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest

from benchmarks.machine import hosts
from benchmarks.machine.hosts import (
    FILES,
    Row,
    costed,
    in_order,
    machine,
    parts_of,
    placement_of,
    rank_correlation,
    recorded,
    reruns,
    scaled,
)
from envs.problem import Problem
from envs.simulator import Simulator
from graphs.graph import GraphArrays, add_edge, add_op, new_graph
from graphs.graph_file import graph_to_dict


def chain_graph() -> nx.DiGraph[str]:
    """Return four layers of two ops each, one after the other."""
    graph = new_graph("chain")
    for k in range(8):
        add_op(graph, f"op{k}", cost_s={"*": 1e-3}, module=f"layers.{k // 2}", output_bytes=8)
        if k:
            add_edge(graph, f"op{k - 1}", f"op{k}")
    return graph


def chain() -> Problem:
    return Problem.of(GraphArrays.from_graph(chain_graph()), machine())


def test_times_are_scaled_to_their_sum_but_not_below_the_least() -> None:
    times_s = np.array([1.0, 2.0, 5.0])
    assert scaled(times_s, 0.0, 16.0) == pytest.approx([2.0, 4.0, 10.0])
    assert scaled(times_s, 3.0, 13.0) == pytest.approx([3.0, 3.0, 7.0])


def test_rank_correlation_of_orders() -> None:
    assert rank_correlation([1.0, 2.0, 3.0], [10.0, 30.0, 90.0]) == pytest.approx(1.0)
    assert rank_correlation([1.0, 2.0, 3.0], [9.0, 5.0, 1.0]) == pytest.approx(-1.0)


def test_every_model_has_its_steps_on_either_device() -> None:
    for file in FILES:
        for rows in recorded(file).values():
            assert {"all on cuda:0", "all on cpu"} <= {row.name for row in rows}
            assert all(row.measured_s > 0 for row in rows)


def test_first_layers_are_found_by_their_numbers_of_ops_and_copies() -> None:
    problem = chain()

    def found(name: str, ops_on_gpu: int, copies: int) -> list[int] | None:
        row = Row(
            model="", name=name, ops_on_gpu=ops_on_gpu, copies=copies, predicted_s=1, measured_s=1
        )
        devices = placement_of(problem, row)
        return None if devices is None else devices.tolist()

    assert found("first layers that fit, 50%", 8, 0) == [0] * 8
    assert found("first layers that fit, 50%", 5, 1) == [0] * 4 + [1] * 4  # up to two ops changed
    assert found("first layers that fit, 50%", 4, 9) is None
    assert found("placer: first layers", 4, 1) is None
    assert found("random, 50% of groups", 100, 1) is None


def test_copies_block_the_host() -> None:
    problem = chain()
    devices = np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int32)
    schedule = Simulator(problem, memory=False).run(devices, in_order(problem))
    assert schedule.issued is not None
    assert schedule.issued.tolist() == list(range(8))
    assert len(schedule.transfers) == 3


def test_recorded_placements_are_simulated_with_recorded_and_fitted_costs() -> None:
    costs_ns = {"cuda:0": " ".join(8 * ["2000000"]), "cpu": " ".join(8 * ["30000000"])}
    problem = costed(chain_graph(), machine(), costs_ns)
    order = " ".join(map(str, range(8)))
    recorded_s = {"00000000": 32e-3, "11111111": 240e-3, "00001111": 136e-3}
    rows = [
        {"name": devices, "devices": devices, "order": order, "median_s": step_s}
        | {"predicted_s": step_s / 2, "tied_with_fastest": step_s < 0.1}
        for devices, step_s in recorded_s.items()
    ]
    parts = {"chain: no limit": {"rows": rows[:2]}, "chain: 50%": {"rows": rows[2:]}}
    found = list(reruns(problem, "chain", parts))
    assert [each.name for each in found] == ["00000000", "11111111", "00001111, 50%"]
    assert [each.measured for each in found] == ["32.0 (tie)", "240.0", "136.0"]
    assert [each.recorded for each in found] == 3 * [0.5]
    expected = [16 / 32, 1.0, 128 / 136]
    assert [each.simulated for each in found] == pytest.approx(expected, rel=0.01)
    # A fit believes one measurement in part; the GPU's factor also serves the other placement.
    first, second, third = (each.fitted for each in found)
    assert 0.6 < first < 1.0
    assert second == pytest.approx(1.0, rel=0.05)
    assert third > 128 / 136
    with pytest.raises(ValueError, match="8 ops, but 7 were recorded on cuda:0"):
        costed(chain_graph(), machine(), {"cuda:0": " ".join(7 * ["1"])})


def test_rows_are_simulated_again_with_the_graph_that_was_recorded_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, file = chain_graph(), tmp_path / "new.json"
    rows = [
        {"name": device * 8, "devices": device * 8, "order": " ".join(map(str, range(8)))}
        | {"median_s": 1e-3, "predicted_s": 1e-3, "tied_with_fastest": True}
        for device in "01"
    ]
    content = {
        "costs_ns": dict.fromkeys(("cuda:0", "cpu"), " ".join(8 * ["1000"])),
        "graph": GraphArrays.from_graph(graph).hash,
        "rows": rows,
    }
    parts = {"calibration": parts_of("2026-11-20-h200-gpu")["calibration"]}
    parts |= {"chain: no limit": content}
    made: list[str] = []

    def extracted(model: str) -> nx.DiGraph[str]:
        made.append(model)
        return chain_graph()

    monkeypatch.setattr(hosts, "FOLDER", tmp_path)
    monkeypatch.setattr(hosts, "graph_of", extracted)

    def again(graph: nx.DiGraph[str] | None) -> dict[str, Any]:
        profile = {} if graph is None else {"graph": graph_to_dict(graph)}
        file.write_text(json.dumps({"parts": {"chain: profile": profile, **parts}}))
        found: dict[str, Any] = {}
        hosts.again("new", found)
        return found

    with_graph = again(graph)
    assert not made
    assert len(with_graph["reruns"]) == 2
    assert again(None) == with_graph
    assert made == ["chain"], "extracted anew where none was recorded"
    other = chain_graph()
    other.remove_node("op7")
    add_op(other, "op9", cost_s={"*": 1e-3}, module="", output_bytes=8)
    lost = again(other)
    assert lost["not_made_again"] == ["chain (another graph was recorded with it)"]
    assert not lost["reruns"]
