"""Reports of two models on four devices, as first shown at 1280 pixels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from envs.hardware.cluster import Cluster, Device, Link, cluster_to_toml
from placer.cli.main import main
from tests.helpers.chromium import chromium, covered_labels, cut_labels, ink_of, opened
from tests.helpers.folders import ROOT
from tests.helpers.graph_canvas import (
    drawn_texts,
    edges_that_do_not_go_down,
    labels_in_view,
    nodes_over_each_other,
    texts_over_each_other,
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow
MODELS = ROOT / "graphs" / "models"
SECTIONS = ("won", "where", "when", "memory", "search", "next")
NAMES = tuple(f"gpu:{k}" for k in range(4))
FOUR = Cluster(
    name="four",
    devices=tuple(
        Device(
            name=name,
            kind="gpu",
            memory_bytes=80 * 10**9,
            launch_s=5e-6,
            peak_flop_per_s=67e12,
            bandwidth_bytes_per_s=3.35e12,
        )
        for name in NAMES
    ),
    links=(Link(between=NAMES, latency_s=5e-6, bandwidth_bytes_per_s=450e9),),
)
TRANSFORMER = """
import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(1000, 256)
        self.body = nn.TransformerEncoder(layer, 24, enable_nested_tensor=False)
        self.head = nn.Linear(256, 1000)

    def forward(self, tokens):
        return self.head(self.body(self.embedding(tokens))).flatten(0, 1)


def build():
    tokens, targets = torch.randint(1000, (8, 64)), torch.randint(1000, (8 * 64,))
    return Encoder(), (tokens, targets), nn.functional.cross_entropy
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module", params=["nmt", "transformer"])
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a simulated report that the command wrote."""
    folder = tmp_path_factory.mktemp(request.param)
    model = MODELS / f"{request.param}.py"
    if not model.exists():
        model = folder / model.name
        model.write_text(TRANSFORMER)
    (folder / "four.toml").write_text(cluster_to_toml(FOUR))
    command = f"optimize {model}:build --cluster {folder}/four.toml --budget 300e --no-measure"
    files = f"--out {folder}/placement.json --report {folder}/report.html --quiet"
    assert main([*command.split(), *files.split()]) == 0
    return folder / "report.html"


@pytest.fixture
def page(browser: Browser, report: Path) -> Iterator[Page]:
    with opened(browser, report) as found:
        yield found


def test_every_section_is_drawn_with_no_label_cut_or_covered(page: Page) -> None:
    for name in SECTIONS:
        colours, share = ink_of(page, page.locator(f"#{name}").screenshot())
        assert colours > 8
        assert share > 0.01
    for name in ("where", "when"):
        colours, share = ink_of(page, page.locator(f"#{name} canvas[tabindex]").screenshot())
        assert colours > 8
        assert share > 0.04
    assert cut_labels(page) == []
    assert covered_labels(page) == []
    longest = page.locator(".details")
    assert longest.evaluate("(list) => list.scrollHeight <= list.clientHeight")
    inner, outer = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert inner <= outer


def test_the_graph_is_layered_by_what_reads_what(page: Page) -> None:
    assert edges_that_do_not_go_down(page) == []
    assert nodes_over_each_other(page) == []
    assert page.evaluate("graph.layout.layers.every((layer) => layer.length < 6)")
    page.get_by_role("button", name="Open all").click()
    assert page.evaluate("graph.layout.edges.every(({ a, b }) => a.layer < b.layer)")


def test_labels_of_the_graph_can_be_read_and_most_are_whole(page: Page) -> None:
    assert page.evaluate("graph.scale >= READABLE")
    labels, texts = labels_in_view(page), drawn_texts(page)
    written = {drawn["text"] for drawn in texts}
    ends = tuple(text.removeprefix("…") for text in written if len(text) > 4)
    assert len(labels) > 10
    assert [label for label in labels if not label.endswith(ends)] == []
    assert sum(label in written for label in labels) > 0.75 * len(labels)
    assert min(drawn["font_px"] for drawn in texts) > 10
    assert texts_over_each_other(page) == []
