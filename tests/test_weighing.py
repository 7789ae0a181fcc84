"""Weighing devices: the listed offers, the best ones, and refusals."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import placer as public
from envs.cluster import Cluster, Device, Link, cluster_to_toml
from graphs.files import save_graph
from graphs.graph import add_edge, add_op, new_graph
from graphs.synthetic import layered
from placer.choose import PlacementError
from placer.cli.main import main
from placer.objectives import Objective
from placer.pipeline import Options, optimize_graph
from placer.report.progress import Silent
from placer.search.budget import Budget
from placer.tradeoff import Tradeoff, pareto_front
from placer.weighing import weigh_graph

OPTIONS = Options(budget=Budget(evaluations=600))
NUMBERS = st.sampled_from([0.0, 1.0, 2.0, 3.0, 4.5, np.inf])


def device(name: str, price: float, kind: str = "gpu", memory_bytes: int = 10**12) -> Device:
    return Device(name=name, kind=kind, memory_bytes=memory_bytes, price_per_hour=price)


def cluster_of(*devices: Device) -> Cluster:
    names = tuple(device.name for device in devices)
    links = (Link(between=names, latency_s=1e-6, bandwidth_bytes_per_s=1e10),)
    return Cluster(name="shop", devices=devices, links=links)


SHOP = cluster_of(
    device("gpu:0", 2.0), device("gpu:1", 2.0), device("old:0", 0.5, "old"), device("cpu", 0, "cpu")
)


def branches(count: int, cost_s: float = 1e-3) -> nx.DiGraph[str]:
    """Return independent chains of three ops that are slower on old and cpu."""
    graph = new_graph("branches")
    for b in range(count):
        for i in range(3):
            cost = {"gpu": cost_s, "old": 2 * cost_s, "cpu": 50 * cost_s}
            add_op(graph, f"{b}.{i}", cost_s=cost, output_bytes=1, parameter_bytes=100)
            if i:
                add_edge(graph, f"{b}.{i - 1}", f"{b}.{i}")
    return graph


def shop_graph() -> nx.DiGraph[str]:
    graph = layered(np.random.default_rng(3), ops=40, width=5)
    for _, attributes in graph.nodes(data=True):
        cost = attributes["cost_s"]["*"]
        attributes["cost_s"] = {"gpu": cost, "old": 2.5 * cost, "cpu": 8 * cost}
    return graph


def names(found: Tradeoff) -> list[tuple[str, ...]]:
    return [offer.cluster.names for offer in found.offers]


@given(points=st.lists(st.tuples(NUMBERS, NUMBERS), max_size=8))
def test_a_point_is_on_the_front_unless_another_is_nowhere_worse_and_somewhere_better(
    points: list[tuple[float, float]],
) -> None:
    def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
        return one[0] <= other[0] and one[1] <= other[1] and one != other

    expected = [not any(beats(other, point) for other in points) for point in points]
    assert pareto_front(points) == expected


def test_steps_and_prices_by_hand() -> None:
    found = weigh_graph(branches(2), cluster_of(device("a", 3.6), device("b", 3.6)), OPTIONS)
    assert names(found) == [("a",), ("a", "b")]
    one, both = found.offers
    assert (one.step_s, both.step_s) == pytest.approx((6e-3, 3e-3))
    assert (one.price_per_hour, both.price_per_hour) == (3.6, 7.2)
    assert one.price_per_million_steps == pytest.approx(6.0)
    assert both.price_per_million_steps == pytest.approx(6.0)
    assert found.front == found.offers
    assert found.fastest is both
    assert found.cheapest is both  # at the same price per step, the faster one


def test_what_a_plan_leaves_idle_is_not_rented() -> None:
    chain = branches(1)
    found = weigh_graph(chain, cluster_of(device("a", 1.0), device("b", 2.0)), OPTIONS)
    assert names(found) == [("a",), ("b",)]
    assert found.searched == 3
    assert [offer in found.front for offer in found.offers] == [True, False]
    assert found.fastest is found.cheapest is found.offers[0]


def test_more_devices_are_always_faster_and_the_fastest_is_no_slower_than_without_prices() -> None:
    graph = shop_graph()
    found = weigh_graph(graph, SHOP, OPTIONS)
    assert len(found.offers) > 4
    for larger in found.offers:
        for smaller in found.offers:
            if set(smaller.cluster.names) < set(larger.cluster.names):
                assert larger.step_s < smaller.step_s
    budget = Budget(evaluations=600 // 8)  # its share: 8 of 11 sub-clusters have 2 or more devices
    whole = optimize_graph(graph, SHOP, replace(OPTIONS, budget=budget))
    assert found.fastest.step_s <= whole.best.predicted_s
    for offer in found.offers:
        assert offer.found is not None
        used = {offer.found.placement.device_of(op) for op in offer.found.placement.ops}
        assert used == set(offer.cluster.names)


def test_a_budget_in_evaluations_gives_the_same_offers_again() -> None:
    first, again = (weigh_graph(shop_graph(), SHOP, OPTIONS) for _ in range(2))
    assert names(first) == names(again)
    assert [o.step_s for o in first.offers] == [o.step_s for o in again.offers]


def test_what_does_not_fit_or_cannot_run_is_listed_with_the_reason() -> None:
    graph = branches(2)
    graph.nodes["0.0"]["devices"] = ("a", "b")
    shop = cluster_of(
        device("a", 1.0, memory_bytes=350), device("b", 2.0, memory_bytes=10**6), device("c", 3.0)
    )
    found = weigh_graph(graph, shop, OPTIONS)
    by_name = {offer.cluster.names: offer for offer in found.offers}
    assert "350 bytes" in by_name["a",].why
    assert "'0.0' can run on none of its devices" in by_name["c",].why
    for unable in (by_name["a",], by_name["c",]):
        assert unable.found is None
        assert np.isinf([unable.step_s, unable.price_per_million_steps]).all()
        assert unable not in found.front
    assert by_name["b",].why == ""


class StoppedAt(Silent):
    """A user who presses Ctrl-C during one of the searches."""

    def __init__(self, number: int) -> None:
        self.begins = f"{number} of "
        self.pressed = False

    def advance(self, share: float, text: str = "") -> None:
        if not self.pressed and text.startswith(self.begins):
            self.pressed = True
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_keeps_the_offers_so_far() -> None:
    found = weigh_graph(shop_graph(), SHOP, OPTIONS, StoppedAt(6))
    assert (found.searched, found.left_out) == (5, 6)
    assert any("6 of 11" in remark for remark in found.remarks)
    assert {("gpu:0",), ("old:0",), ("cpu",)} <= set(names(found))


def test_a_graph_that_fits_nowhere_is_refused() -> None:
    small = [device(name, 1.0, memory_bytes=10) for name in "ab"]
    with pytest.raises(PlacementError, match="fits nowhere"):
        weigh_graph(branches(1), cluster_of(*small), OPTIONS)


@pytest.mark.parametrize(
    ("cluster", "options", "message"),
    [
        (
            cluster_of(device("a", 0.0), device("b", 0.0)),
            OPTIONS,
            "write price_per_hour",
        ),
        (
            SHOP,
            replace(OPTIONS, objective=Objective(name="max-load")),
            "objective max-load",
        ),
        (
            cluster_of(*(device(f"d{i}", i) for i in range(8))),
            OPTIONS,
            "255 different sub-clusters, at most 64",
        ),
    ],
)
def test_what_cannot_be_weighed_is_refused(
    cluster: Cluster, options: Options, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        weigh_graph(branches(1), cluster, options)


def test_devices_for_a_model_are_weighed_from_python() -> None:
    devices = tuple(
        Device(
            name=name,
            kind="x",
            memory_bytes=10**9,
            peak_flop_per_s=1e9,
            bandwidth_bytes_per_s=1e9,
            price_per_hour=1.5,
        )
        for name in ("x:0", "x:1")
    )
    links = (Link(between=("x:0", "x:1"), latency_s=1e-9, bandwidth_bytes_per_s=1e12),)
    shop = Cluster(name="shop", devices=devices, links=links)
    found = public.weigh_devices(
        nn.Linear(4, 4), torch.randn(2, 4), shop, training=False, budget="50e", progress=False
    )
    assert found.offers[0].cluster.names == ("x:0",)
    assert found.extraction is not None
    assert found.picked("cheapest").placement.graph == found.problem.graph.hash


def run(folder: Path, cluster: Cluster, more: Sequence[str]) -> int:
    save_graph(shop_graph(), folder / "graph.json")
    (folder / "shop.toml").write_text(cluster_to_toml(cluster))
    arguments = ["optimize", str(folder / "graph.json"), "--budget", "300e"]
    arguments += ["--out", str(folder / "p.json"), *more]
    return main([a.format(folder=folder) for a in arguments])


PARETO = ["--cluster", "{folder}/shop.toml", "--pareto"]


@pytest.mark.parametrize("pick", ["fastest", "cheapest"])
def test_offers_as_json_and_the_picked_placement(
    pick: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, SHOP, [*PARETO, "--pareto-pick", pick, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {
        "rows", "searched", "left_out", "search_s", "cost_source", "remarks", "picked", "seed",
        "stopped", "out",
    }  # fmt: skip
    for row in found["rows"]:
        assert set(row) == {
            "devices", "feasible", "why", "step_s", "price_per_hour", "price_per_million_steps",
            "peak_memory_bytes", "plan", "pareto", "fastest", "cheapest",
        }  # fmt: skip
        assert set(row["peak_memory_bytes"]) == set(row["devices"])
        price = row["price_per_hour"] * row["step_s"] / 3600 * 1e6
        assert row["price_per_million_steps"] == pytest.approx(price)
    [picked] = [row for row in found["rows"] if row[pick]]
    assert picked["pareto"]
    placement = json.loads((tmp_path / "p.json").read_text())
    assert set(placement["devices"].values()) == set(picked["devices"])
    assert placement["predicted"]["step_s"] == picked["step_s"]

    simulate = ["simulate", str(tmp_path / "graph.json"), "--placement", str(tmp_path / "p.json")]
    assert main([*simulate, "--cluster", str(tmp_path / "shop.toml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] == picked["step_s"]


def test_offers_as_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = replace(SHOP.devices[3], memory_bytes=10)
    assert run(tmp_path, replace(SHOP, devices=(*SHOP.devices[:3], tiny)), PARETO) == 0
    told = capsys.readouterr()
    for word in ("Pareto, fastest", "gpu:0, gpu:1, old:0", "cpu: The model fits nowhere"):
        assert word in told.out
    assert "p.json" in told.err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--pareto"], "--pareto needs prices"),
        ([*PARETO[:2], "--pareto-pick", "fastest"], "give both"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    more: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--cluster" not in more:  # a model, with devices of this machine
        more = ["--devices", "core:0", *more]
        arguments = ["optimize", "never/loaded.py:build", "--out", str(tmp_path / "p.json")]
        assert main([*arguments, *more]) == 2
    else:
        assert run(tmp_path, SHOP, more) == 2
    assert words in capsys.readouterr().err
