"""Contents of the graph canvas of a report, and a plain twin of its layering."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any

import networkx as nx

if TYPE_CHECKING:
    from playwright.sync_api import Page


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
