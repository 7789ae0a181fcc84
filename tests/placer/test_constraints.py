"""The user's constraints hold for every placement that a search returns."""

from __future__ import annotations

import os
from typing import Any

import networkx as nx
import numpy as np
import pytest

import placer
from envs.core_runtime import CoreRuntime
from graphs.graph import add_edge, add_op, graph_hash, new_graph
from graphs.selection import ConstraintError
from placer.evaluation import reviewed
from placer.job import Constraints, Job, SearchConfig
from placer.pipeline import optimize_job
from tests.helpers import tiny_models
from tests.helpers.clusters import toy_pair

CORES = sorted(os.sched_getaffinity(0))


PAIR = toy_pair("a", "b")


def two_branches() -> nx.DiGraph[str]:
    """Return two equal independent chains: best on two devices, "left" and "right" apart."""
    graph = new_graph("two branches")
    for module in ("left", "right"):
        for i in range(6):
            add_op(graph, f"{module}:{i}", cost_s={"*": 1e-3}, output_bytes=8, module=module)
            if i:
                add_edge(graph, f"{module}:{i - 1}", f"{module}:{i}")
    return graph


def searched(budget: str = "50e", **kept: Any) -> placer.Result:
    """Return what a search with constraints finds for two branches on a pair."""
    return optimize_job(
        Job(
            source=two_branches(),
            cluster=PAIR,
            search=SearchConfig(policy=None, budget=budget),
            constraints=Constraints(**kept),
        )
    )


def devices_by_module(**kept: Any) -> list[tuple[set[str], set[str]]]:
    """Return the devices of left and right in every feasible candidate, the best first."""
    result = searched(budget="200e", **kept)
    placements = [row.placement for row in result.candidates if np.isfinite(row.predicted_s)]
    names = [
        [p.device_names[device] for device in p.devices] for p in (result.placement, *placements)
    ]
    return [(set(devices[:6]), set(devices[6:])) for devices in names]


def test_pins_hold_for_every_candidate_though_no_single_device_can_take_all() -> None:
    pins = {"left": "b", "right:3": "a"}
    best, *others = devices_by_module(pins=pins)
    assert best == ({"b"}, {"a"})
    assert others
    assert all(left == {"b"} and "a" in right for left, right in others)


def test_only_what_is_on_one_device_is_called_single() -> None:
    parted = searched(pins={"left": "b"})
    names = {row.name for row in parted.candidates}
    assert "a where allowed" in names
    assert "single b" in names
    assert "single a" not in names
    pinned = searched(pins={"left": "b", "right": "a"})
    assert pinned.best.name == "a where allowed"
    assert pinned.placement.made_by.placer == "a where allowed"
    shown = reviewed(pinned.problem, pinned.placement)
    assert [row.name for row in shown.candidates].count("a where allowed") == 1


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_pins_that_part_tied_modules_are_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CoreRuntime, "costs", lambda *_, **__: pytest.fail("it measures"))
    one, two = (f"core:{core}" for core in CORES[:2])
    job = Job(
        source=tiny_models.tied_weights(),
        cluster=toy_pair(one, two, kind="core"),
        constraints=Constraints(pins={"embedding": one, "head": two}),
    )
    with pytest.raises(ConstraintError, match=r"'parameter embedding\.weight'"):
        optimize_job(job)


def test_ops_kept_together_share_a_device_in_every_candidate() -> None:
    [(left, right), *_] = devices_by_module()
    assert left != right
    together = devices_by_module(keep_together=["*"])
    assert all(left == right and len(left) == 1 for left, right in together)


def test_a_placement_made_with_constraints_is_one_of_the_graph_without_them() -> None:
    graph = two_branches()
    assert Constraints().applied_to(graph, PAIR) is graph
    kept = Constraints(keep_together=["left"], pins={"right": "a"})
    assert graph_hash(kept.applied_to(graph, PAIR)) == graph_hash(graph)


def test_one_name_in_place_of_a_list_is_refused() -> None:
    with pytest.raises(ConstraintError, match="a list of names"):
        Constraints(keep_together="left")
