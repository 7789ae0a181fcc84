"""The graph of a report: layout and grouping of nodes, on small graphs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import networkx as nx
import numpy as np
import pytest

from envs.placement import Placement
from envs.problem import Problem
from graphs.graph import GraphArrays, add_edge, add_op, attributes_of, new_graph
from graphs.synthetic.shapes import layered
from placer.report.html import report_data, reviewed, write_report
from tests.helpers.chromium import chromium, opened
from tests.helpers.graph_canvas import (
    drawn_texts,
    edges_that_do_not_go_down,
    labels_in_view,
    nodes_over_each_other,
    texts_over_each_other,
)
from tests.helpers.simulator_cases import one_kind

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SCALE = "graph.scale"
COUNT = "graph.layout.nodes.length"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture
def page(request: pytest.FixtureRequest, browser: Browser, tmp_path: Path) -> Iterator[Page]:
    """Yield a report of the graph in the test's parameter, its ops on two devices in turn."""
    graph = GraphArrays.from_graph(request.param)
    problem = Problem.of(graph, one_kind(2))
    devices = (np.arange(len(graph)) % 2).astype(np.int32)
    placement = Placement.of(graph, problem.cluster, devices, np.zeros(len(graph)))
    path = tmp_path / "report.html"
    write_report(report_data(reviewed(problem, placement)), path)
    with opened(browser, path) as found:
        yield found


def graph_of(*chains: list[str]) -> nx.DiGraph[str]:
    """Return ops named ``module:op`` or ``module:op#occurrence``, each reading its predecessor."""
    graph = new_graph("small")
    for op_id in dict.fromkeys(op_id for chain in chains for op_id in chain):
        module, _, op = op_id.partition("#")[0].rpartition(":")
        add_op(graph, op_id, cost_s={"*": 1e-6}, op=op, module=module, output_bytes=100)
    for edge in dict.fromkeys((a, b) for chain in chains for a, b in pairwise(chain)):
        add_edge(graph, *edge)
    return graph


def stem() -> nx.DiGraph[str]:
    """Return convolutions as in Inception's stem, each with an unconnected counter."""
    convolutions = [[f"conv{k}:{op}" for op in ("conv", "norm", "relu")] for k in range(5)]
    path = [op for convolution in convolutions for op in convolution]
    path[9:9] = [":pool"]
    return graph_of(path, *[[f"conv{k}:count"] for k in range(5)])


def unrolled() -> nx.DiGraph[str]:
    """Return two modules called in turn, a cycle when collapsed, between other modules."""
    calls = [f"{module}:mm#{t}" for t in range(4) for module in ("lower", "upper")]
    return graph_of(["embed:rows", *calls, ":loss"], ["embed:rows", "upper:mm#2"])


def losses(count: int = 12) -> nx.DiGraph[str]:
    """Return a loss for each of many calls of a module, and their sum."""
    calls = [f"head:mm#{t}" for t in range(count)]
    each = [[call, f":loss#{t}", ":sum"] for t, call in enumerate(calls)]
    return graph_of([":embed", *calls], *each)


def unlike() -> nx.DiGraph[str]:
    """Return twelve parallel ops of different kinds."""
    return graph_of(*[[":input", f":kind{k}", ":sum"] for k in range(12)])


def scattered(seed: int) -> nx.DiGraph[str]:
    """Return a random graph with ops in random modules: nearly all collapsed ones form cycles."""
    rng = np.random.default_rng(seed)
    graph = layered(rng, ops=60, width=6)
    for op_id in graph:
        attributes_of(graph, op_id)["module"] = str(rng.choice(["", "a", "a.b", "a.c", "d", "e"]))
    return graph


def press(page: Page, name: str) -> None:
    page.get_by_role("button", name=name).first.click()


@pytest.mark.parametrize("page", [stem()], indirect=True)
def test_modules_stand_below_what_they_read_whatever_else_is_in_them(page: Page) -> None:
    press(page, "Close all")
    assert page.evaluate("graph.layout.layers.map((layer) => layer.length)") == [1] * 6
    assert edges_that_do_not_go_down(page) == []


@pytest.mark.parametrize("page", [stem()], indirect=True)
def test_an_op_that_is_tied_to_nothing_stands_in_its_module(page: Page) -> None:
    press(page, "Open all")
    counters = """graph.layout.layers.map((layer) => layer.map((node) => node.label))
      .filter((layer) => layer.some((label) => label.endsWith("count")))"""
    rows = page.evaluate(counters)
    assert len(rows) == 5
    for row in rows:
        assert len({label.split(" ")[0] for label in row}) == 1
        assert len(row) == 2


@pytest.mark.parametrize("page", [unrolled(), *map(scattered, range(3))], indirect=True)
def test_only_edges_in_a_cycle_may_go_up(page: Page) -> None:
    for name in ("Close all", "Open all"):
        press(page, name)
        assert edges_that_do_not_go_down(page) == []
        assert nodes_over_each_other(page) == []
    assert page.evaluate("graph.layout.edges.every(({ a, b }) => a.layer < b.layer)")  # of ops


@pytest.mark.parametrize("page", [unrolled()], indirect=True)
def test_modules_of_a_cycle_stand_in_the_order_of_their_first_calls(page: Page) -> None:
    press(page, "Close all")
    labels = page.evaluate("graph.layout.layers.map((layer) => layer.map((node) => node.label))")
    assert labels == [["embed"], ["lower"], ["upper"], ["loss"]]


@pytest.mark.parametrize("page", [losses()], indirect=True)
def test_like_ops_side_by_side_are_one_node_that_opens_and_closes(page: Page) -> None:
    press(page, "Close all")
    assert page.evaluate(COUNT) == 4
    assert "×12" in {drawn["text"] for drawn in drawn_texts(page)}
    alike = "graph.layout.nodes.find((node) => node.label === 'loss')"
    canvas = page.locator("#where canvas[tabindex]")
    canvas.dblclick(position=page.evaluate(f"toScreen({alike})"))
    assert page.evaluate(COUNT) == 3 + 12
    canvas.press("c")
    assert page.evaluate(COUNT) == 4
    told = page.locator(".details")
    assert "12" in told.inner_text()
    page.get_by_role("button", name="Open these ops").click()
    page.get_by_role("button", name="Close loss").click()
    assert page.evaluate(COUNT) == 4
    page.fill("#find-op", ":loss#7")
    page.press("#find-op", "Enter")
    assert told.locator("h3").inner_text() == ":loss#7"
    assert page.evaluate(COUNT) == 3 + 12
    press(page, "Open all")
    assert page.evaluate(COUNT) == page.evaluate("N") == 26


@pytest.mark.parametrize("page", [losses(3)], indirect=True)
def test_a_few_like_ops_stay_what_they_are(page: Page) -> None:
    press(page, "Close all")
    assert page.evaluate(COUNT) == 3 + 3


@pytest.mark.parametrize("page", [losses(), unlike()], indirect=True)
def test_labels_can_be_read_when_the_page_opens_however_wide_the_graph_is(page: Page) -> None:
    assert page.evaluate(f"{SCALE} >= READABLE")
    written = {drawn["text"] for drawn in drawn_texts(page)}
    assert {"embed", "input"} & set(labels_in_view(page)) & written
    assert min(drawn["font_px"] for drawn in drawn_texts(page)) > 10
    assert texts_over_each_other(page) == []


def long_names() -> nx.DiGraph[str]:
    """Return a short chain of ops with long names, as in small models."""
    ops = ("native_layer_norm_backward", "convolution", "addmm")
    return graph_of([f"classifier.features.{k}:{op}" for k in range(2) for op in ops])


@pytest.mark.parametrize("page", [long_names()], indirect=True)
def test_where_there_is_room_every_label_is_whole_and_none_is_twice(page: Page) -> None:
    press(page, "Open all")
    labels: list[str] = page.evaluate("graph.layout.nodes.map((node) => node.label)")
    assert len(set(labels)) == 6
    assert set(labels) <= {drawn["text"] for drawn in drawn_texts(page)}
    assert texts_over_each_other(page) == []
    assert set(labels_in_view(page)) == set(labels)
    press(page, "Fit")
    assert nodes_over_each_other(page) == []


@pytest.mark.parametrize("page", [unlike()], indirect=True)
def test_fit_shows_all_of_the_width_at_any_scale(page: Page) -> None:
    assert len(labels_in_view(page)) < page.evaluate(COUNT)
    press(page, "Fit")
    assert page.evaluate(f"{SCALE} < READABLE")
    assert len(labels_in_view(page)) == page.evaluate(COUNT)
