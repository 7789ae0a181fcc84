"""A real browser for tests of HTML pages, if installed, and checks that apply to every page."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

PATIENCE_MS = 120_000  # reached only by failures

# Playwright's own wait evaluates a string on all looks but the first; the page's policy forbids
# that.
DRAWN = """async (patience_ms) => {
  const end = performance.now() + patience_ms;
  while (!(graph.view.width > 0 && gantt.view.width > 0)) {
    if (performance.now() > end) return false;
    await new Promise((next) => setTimeout(next, 5));
  }
  return true;
}"""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Yield Debian's Chromium driven by Playwright; skip the test if either is missing."""
    reason = "needs chromium (apt-get install chromium) and playwright"
    api = pytest.importorskip("playwright.sync_api", reason=reason)
    found = shutil.which("chromium")
    if found is None:
        pytest.skip(reason)
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=found, args=list(QUIET), timeout=PATIENCE_MS
        )
        yield browser
        browser.close()


@contextmanager
def opened(
    browser: Browser, report: Path, *, width: int = 1280, dark: bool = False
) -> Iterator[Page]:
    """Yield a drawn report, offline; fail at the end if the page logged or requested anything."""
    context = browser.new_context(
        viewport={"width": width, "height": 800},
        color_scheme="dark" if dark else "light",
        offline=True,
    )
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: complaints.append(dialog.message))
    page.on("request", lambda asked: complaints.append(asked.url))
    page.goto(report.as_uri())
    assert page.evaluate(DRAWN, PATIENCE_MS), "the charts are not drawn"
    yield page
    context.close()
    assert [told for told in complaints if told != report.as_uri()] == []


def cut_labels(page: Page) -> list[str]:
    """Return the labels that extend beyond their chart."""
    cut: list[str] = page.evaluate(
        """[...document.querySelectorAll("svg text")].filter((label) => {
          const [own, all] = [label, label.ownerSVGElement].map((e) => e.getBoundingClientRect());
          return own.left < all.left - 1 || own.right > all.right + 1 || own.top < all.top - 1 ||
            own.bottom > all.bottom + 1;
        }).map((label) => label.textContent)"""
    )
    return cut


def covered_labels(page: Page) -> list[str]:
    """Return the pairs of labels that overlap."""
    covered: list[str] = page.evaluate(
        """[...document.querySelectorAll("svg")].flatMap((svg) => {
          const labels = [...svg.querySelectorAll("text")];
          const boxes = labels.map((label) => label.getBoundingClientRect());
          return labels.flatMap((label, i) => boxes.slice(0, i).flatMap((box, j) =>
            box.left < boxes[i].right - 1 && boxes[i].left < box.right - 1 &&
            box.top < boxes[i].bottom - 3 && boxes[i].top < box.bottom - 3
              ? [`${labels[j].textContent} | ${label.textContent}`] : []));
        })"""
    )
    return covered


def ink_of(page: Page, png: bytes) -> tuple[int, float]:
    """Return the number of colours, and the share of pixels unlike the most frequent colour."""
    source = "data:image/png;base64," + base64.b64encode(png).decode()
    found: list[Any] = page.evaluate(
        """async (source) => {
          const image = new Image();
          image.src = source;
          await image.decode();
          const canvas = document.createElement("canvas");
          [canvas.width, canvas.height] = [image.width, image.height];
          const context = canvas.getContext("2d");
          context.drawImage(image, 0, 0);
          const pixels = new Uint32Array(
            context.getImageData(0, 0, image.width, image.height).data.buffer);
          const counts = new Map();
          for (const pixel of pixels) counts.set(pixel, (counts.get(pixel) ?? 0) + 1);
          return [counts.size, 1 - Math.max(...counts.values()) / pixels.length];
        }""",
        source,
    )
    return int(found[0]), float(found[1])
