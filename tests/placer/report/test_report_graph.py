"""The graph of a report: layout and grouping of nodes, on small graphs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import networkx as nx
import numpy as np
import pytest

from envs.placement import Placement
from envs.problem import Problem
from graphs.graph import GraphArrays, add_edge, add_op, attributes_of, new_graph
from graphs.synthetic.shapes import layered
from graphs.synthetic.sketches import nmt, transformer
from placer.evaluation import reviewed
from placer.report.html import report_data, write_report
from tests.helpers.chromium import opened
from tests.helpers.simulator_cases import one_kind

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow
SCALE = "graph.scale"
COUNT = "graph.layout.nodes.length"


@pytest.fixture
def page(request: pytest.FixtureRequest, browser: Browser, tmp_path: Path) -> Iterator[Page]:
    """Yield a report of the graph in the test's parameter, its ops on two devices in turn."""
    graph = GraphArrays.from_graph(request.param)
    problem = Problem.of(graph, one_kind(2))
    unit = np.where(graph.group < 0, np.arange(len(graph)), graph.group)
    devices = (unit % 2).astype(np.int32)
    placement = Placement.of(graph, problem.cluster, devices, np.zeros(len(graph)))
    path = tmp_path / "report.html"
    write_report(report_data(reviewed(problem, placement)), path)
    with opened(browser, path) as page:
        yield page


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


def edges_that_do_not_go_down(page: Page) -> list[tuple[str, str]]:
    """Return the acyclic edges between visible nodes whose target is not below their source."""
    nodes: list[dict[str, Any]] = page.evaluate(
        """graph.layout.nodes.map(({ number, label, layer, y }) => ({ number, label, layer, y }))"""
    )
    edges = page.evaluate("graph.layout.edges.map(({ a, b }) => [a.number, b.number])")
    shown: nx.DiGraph[int] = nx.DiGraph(edges)
    cycle = {node: k for k, of in enumerate(nx.strongly_connected_components(shown)) for node in of}
    return [
        (nodes[a]["label"], nodes[b]["label"])
        for a, b in edges
        if cycle[a] != cycle[b]
        and (nodes[a]["layer"] >= nodes[b]["layer"] or nodes[a]["y"] >= nodes[b]["y"])
    ]


def nodes_over_each_other(page: Page) -> list[tuple[str, str]]:
    nodes: list[tuple[str, float, float]] = page.evaluate(
        "graph.layout.nodes.map(({ label, x, y }) => [label, x, y])"
    )
    width, height = page.evaluate("[NODE.width, NODE.height]")
    return [
        (one, other)
        for (one, x, y), (other, x2, y2) in combinations(nodes, 2)
        if abs(x - x2) < width and abs(y - y2) < height
    ]


def drawn_texts(page: Page) -> list[dict[str, Any]]:
    """Return ``text``, ``font_px`` and the box of every text on the graph canvas."""
    drawn: list[dict[str, Any]] = page.evaluate(
        """(() => {
          const { context } = graph.view;
          const drawn = [];
          context.fillText = (text, x, y) => {
            const long = context.measureText(text).width;
            const left = x - { left: 0, center: long / 2, right: long }[context.textAlign];
            const font_px = Number(/([0-9.]+)px/.exec(context.font)[1]);
            drawn.push({ text, font_px, left, right: left + long, y });
          };
          drawGraph(graph.view, theme());
          delete context.fillText;
          return drawn;
        })()"""
    )
    return drawn


def texts_over_each_other(page: Page) -> list[tuple[str, str]]:
    return [
        (one["text"], other["text"])
        for one, other in combinations(drawn_texts(page), 2)
        if one["left"] < other["right"]
        and other["left"] < one["right"]
        and abs(one["y"] - other["y"]) < min(one["font_px"], other["font_px"])
    ]


def labels_in_view(page: Page) -> list[str]:
    """Return the labels of the nodes that are entirely in view."""
    labels: list[str] = page.evaluate(
        """graph.layout.nodes.filter((node) => {
          const [{ x, y }, s] = [toScreen(node), graph.scale / 2];
          return x - NODE.width * s >= 0 && x + NODE.width * s <= graph.view.width - MAP_WIDTH &&
            y - NODE.height * s >= 0 && y + NODE.height * s <= GRAPH_HEIGHT;
        }).map((node) => node.label)"""
    )
    return labels


def press(page: Page, name: str) -> None:
    page.get_by_role("button", name=name).first.click()


@pytest.mark.parametrize("page", [stem()], indirect=True)
def test_modules_are_layered_by_their_inputs_and_ops_without_edges_stay_inside(page: Page) -> None:
    press(page, "Close all")
    assert page.evaluate("graph.layout.layers.map((layer) => layer.length)") == [1] * 6
    assert edges_that_do_not_go_down(page) == []
    press(page, "Open all")
    counters = """graph.layout.layers.map((layer) => layer.map((node) => node.label))
      .filter((layer) => layer.some((label) => label.endsWith("count")))"""
    rows = page.evaluate(counters)
    assert len(rows) == 5
    for row in rows:
        assert len({label.split(" ")[0] for label in row}) == 1
        assert len(row) == 2


MODELS = [
    pytest.param(graph, marks=pytest.mark.slow, id=graph.name)
    for graph in (nmt(), transformer(layers=24, micro_batches=1))
]


@pytest.mark.parametrize("page", [unrolled(), *map(scattered, range(3)), *MODELS], indirect=True)
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
    details = page.locator(".details")
    assert "12" in details.inner_text()
    page.get_by_role("button", name="Open these ops").click()
    page.get_by_role("button", name="Close loss").click()
    assert page.evaluate(COUNT) == 4
    page.fill("#find-op", ":loss#7")
    page.press("#find-op", "Enter")
    assert details.locator("h3").inner_text() == ":loss#7"
    assert page.evaluate(COUNT) == 3 + 12
    press(page, "Open all")
    assert page.evaluate(COUNT) == page.evaluate("N") == 26


@pytest.mark.parametrize("page", [losses(), unlike(), *MODELS], indirect=True)
def test_labels_can_be_read_when_the_page_opens_however_wide_the_graph_is(page: Page) -> None:
    assert page.evaluate(f"{SCALE} >= READABLE")
    texts, labels = drawn_texts(page), labels_in_view(page)
    written = {drawn["text"] for drawn in texts}
    assert sum(label in written for label in labels) > 0.75 * len(labels)
    ends = tuple(text.removeprefix("…") for text in written)
    assert [label for label in labels if not label.endswith(ends)] == []
    assert min(drawn["font_px"] for drawn in texts) > 10
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
