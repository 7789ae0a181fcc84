"""The report in a real browser: it opens, reacts to clicks and keys, and cuts nothing off."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import networkx as nx
import numpy as np
import pytest

from envs.hardware.cluster import Cluster, Device, Link
from envs.hardware.units import milliseconds
from envs.measurement import Measurement
from envs.problem import Problem
from graphs.graph import GraphArrays
from graphs.synthetic.inception import inception
from placer.evaluation import reviewed
from placer.job import SearchConfig
from placer.pipeline import optimize_problem
from placer.report.html import Source, next_commands, report_data, write_report
from placer.result import Result
from tests.helpers.chromium import covered_labels, cut_labels, ink_of, opened
from tests.helpers.random_problems import random_problem
from tests.helpers.unplaced import with_unplaced

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow
SECTIONS = ("won", "where", "when", "memory", "search", "next")
NAMES = ("cuda:0", "cuda:1", "cpu")
MEASURED_BYTES = {"cuda:0": 123_000_000, "cuda:1": 45_000_000}
HOSTILE = "</script><img src=x onerror=alert(1)>:loss"


def optimized(problem: Problem) -> Result:
    return optimize_problem(problem, SearchConfig(policy=None, budget="300e", measure=False))


def measured(result: Result, slower: float = 1.0, **fields: Any) -> Result:
    """Add measurements with a little scatter to the best and the single-device candidates.

    Wall times are so many times the CPU-clock times.
    """
    scatter = np.linspace(0.95, 1.1, 9)
    rows = tuple(
        replace(
            row,
            measurement=Measurement(
                wall_s=s * slower, cpu_clock_s=s, peak_memory_bytes=MEASURED_BYTES
            ),
        )
        if row is result.best or row is result.single
        else row
        for row in result.candidates
        for s in [row.predicted_s * scatter]
    )
    best = rows[result.candidates.index(result.best)]
    return replace(result, candidates=rows, best=best, **fields)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a report of Inception on two GPUs and a small CPU; one op has a hostile name."""
    memory = {"cuda:0": 16 * 10**9, "cuda:1": 16 * 10**9, "cpu": 10**9}
    devices = (Device(name=n, kind=n[:3], memory_bytes=size) for n, size in memory.items())
    links = (Link(between=NAMES, latency_s=5e-6, bandwidth_bytes_per_s=12e9),)
    cluster = Cluster(name="three", devices=tuple(devices), links=links)
    graph = nx.relabel_nodes(inception(blocks=3), {"loss:cross_entropy": HOSTILE})
    result = measured(optimized(Problem.of(GraphArrays.from_graph(graph), cluster)))
    path = tmp_path_factory.mktemp("report") / "report.html"
    source = Source(
        placement=Path("placement.json"), target="model.py:build", devices=NAMES, place=()
    )
    write_report(report_data(result, next_commands(source)), path)
    return path


def in_theme(*themes: str | int) -> pytest.MarkDecorator:
    """Open the page in these themes, dark ones in slow tests only, or at these widths."""
    pages = [pytest.param(t, marks=pytest.mark.slow) if t == "dark" else t for t in themes]
    return pytest.mark.parametrize("page", pages, indirect=True)


@pytest.fixture
def page(request: pytest.FixtureRequest, browser: Browser, report: Path) -> Iterator[Page]:
    asked = getattr(request, "param", "light")
    width = asked if isinstance(asked, int) else 1280
    with opened(browser, report, width=width, dark=asked == "dark") as page:
        yield page


@pytest.fixture(scope="module")
def shared_page(browser: Browser, report: Path) -> Iterator[Page]:
    """Yield a page for tests that leave it as it is."""
    with opened(browser, report) as page:
        yield page


def where(page: Page, node: str) -> dict[str, float]:
    """Return the position of a node (JavaScript) on the graph canvas."""
    place: dict[str, float] = page.evaluate(f"toScreen({node})")
    return place


def graph_canvas(page: Page) -> Any:
    return page.locator("#where canvas[tabindex]")


def details(page: Page) -> str:
    return page.locator(".details").inner_text()


@in_theme("light", "dark")
def test_every_section_is_drawn(page: Page) -> None:
    for name in SECTIONS:
        colours, share = ink_of(page, page.locator(f"#{name}").screenshot())
        assert colours > 8
        assert share > 0.01
    for name in ("where", "when"):
        colours, share = ink_of(page, page.locator(f"#{name} canvas[tabindex]").screenshot())
        assert colours > 8
        assert share > 0.04


@in_theme("light", "dark", 360, 599)
def test_nothing_is_wider_than_the_page_and_no_label_is_cut_or_covered(page: Page) -> None:
    for summary in page.locator("summary").all():
        summary.click()
    for shown in page.locator("details").all():
        shown.locator("tr").first.wait_for()
    sizes = page.evaluate(
        "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    assert sizes[0] <= sizes[1]
    assert page.locator("#won svg").get_by_text("cpu needs").count() > 0
    assert cut_labels(page) == []
    assert covered_labels(page) == []


@in_theme(360)
def test_on_a_phone_text_is_as_large_and_charts_and_tables_scroll(page: Page) -> None:
    page.get_by_text("The numbers").first.click()
    page.locator("#won tbody tr").first.wait_for()
    for where in ("#won .chart", "#won .scroll", "#when .scroll"):
        inner, outer = page.evaluate(
            f"(([at]) => [at.scrollWidth, at.clientWidth])([document.querySelector('{where}')])"
        )
        assert inner > outer
    sizes = page.evaluate(
        """[...document.querySelectorAll("svg text")].map((label) =>
             label.getBoundingClientRect().height)"""
    )
    assert min(sizes) > 11
    assert page.evaluate("timeToX(STEP) - timeToX(0)") > 200


@in_theme("light", 360)
def test_the_graph_begins_as_fit_makes_it_and_fit_cuts_no_node_off(page: Page) -> None:
    seen = "[graph.scale, graph.x, graph.y]"
    begin = page.evaluate(seen)
    page.get_by_role("button", name="Fit").first.click()
    assert page.evaluate(seen) == begin
    off = """graph.layout.nodes.filter((node) => {
      const [{ x, y }, half] = [toScreen(node), (NODE.width / 2) * graph.scale];
      return x - half < 0 || x + half > graph.view.width - MAP_WIDTH || y < 0;
    }).length"""
    assert page.evaluate(off) == 0
    if page.evaluate("innerWidth") > 1000:
        assert page.evaluate("graph.scale >= READABLE")
    page.get_by_role("button", name="Open all").click()
    page.get_by_role("button", name="Fit").first.click()
    assert page.evaluate(off) == 0


def test_labels_of_an_axis_by_powers_of_ten_do_not_overlap(shared_page: Page) -> None:
    for begin, end in ((1, 1e6), (1, 250), (1e-3, 90), (3, 21), (1, 123_456), (0.02, 0.5)):
        for width in (260, 330, 560):
            gaps = shared_page.evaluate(
                f"""(() => {{
                  const drawn = svg("svg", {{ width: {width}, height: 246 }});
                  document.body.append(drawn);
                  axes(drawn, {width}, 246, {end}, 0, 1, {{ x: null, y: TIMES }}, {begin});
                  const boxes = [...drawn.querySelectorAll("text")]
                    .filter((label) => label.getAttribute("y") === String(246 - 12))
                    .map((label) => label.getBoundingClientRect());
                  drawn.remove();
                  return boxes.slice(1).map((box, k) => box.left - boxes[k].right);
                }})()"""
            )
            assert gaps
            assert min(gaps) > 2


def test_speed_ups_and_peaks_say_whether_they_are_measured(page: Page) -> None:
    page.get_by_text("The numbers").first.click()
    page.locator("#won tbody tr").first.wait_for()
    rows = page.locator("#won tbody tr").all_inner_texts()
    assert sum("× measured" in row for row in rows) == 2
    assert sum("× predicted" in row for row in rows) > 2
    captions = page.locator("#memory figcaption").all_inner_texts()
    assert "123\u00a0MB measured" in captions[0]
    assert "not measured" in captions[2]


def test_a_busy_machine_shows_both_clocks_and_no_bar_of_the_unplaced_step(
    browser: Browser, tmp_path: Path
) -> None:
    unplaced = Measurement(wall_s=np.full(9, 1.372), cpu_clock_s=np.full(9, 1.372))
    result = with_unplaced(measured(optimized(random_problem(10)), slower=5.0), unplaced)
    runs = result.best.measurement
    assert runs is not None
    wall, cpu = (f"{milliseconds(s)}\u00a0ms" for s in (runs.median_s, runs.cpu_clock_median_s))
    path = tmp_path / "report.html"
    write_report(report_data(result), path)
    with opened(browser, path) as page:
        chart = page.locator("#won .chart")
        bars = chart.locator("g.candidate").filter(has_text="unplaced")
        assert bars.locator("rect").count() == 0
        assert bars.get_by_text(f"by the wall clock, to be compared with {wall}").count() == 1
        assert chart.locator(".whisker").count() >= 1
        assert chart.get_by_text(f"{cpu} CPU clock, {wall} wall").count() == 1
        assert wall in page.locator(".figures").inner_text()
    recorded = {"step_s": 0.5, "wall_median_s": 2.0, "single_device_step_s": 1.0}  # no quartiles
    again = reviewed(result.problem, replace(result.placement, measured=recorded))
    write_report(report_data(again), path)
    with opened(browser, path) as page:
        assert page.locator("#won .chart rect.measured").count() >= 1
        assert page.locator("#won .chart .whisker").count() == 0


@pytest.mark.parametrize(
    "label", ["a.layer.0.attention · softmax_backward", "encoder.weight", "convolution_backward"]
)
def test_a_label_keeps_last_names_and_is_cut_in_the_middle(shared_page: Page, label: str) -> None:
    widths = shared_page.evaluate(
        """label => {
          const context = document.createElement("canvas").getContext("2d");
          context.font = `11.5px ${FONT}`;
          const whole = Math.ceil(context.measureText(label).width);
          return [...Array(whole + 1).keys()].map((width) => {
            const shown = fitted(context, label, width);
            return [shown, context.measureText(shown).width <= width];
          });
        }""",
        label,
    )
    assert all(fits for _, fits in widths)
    last = label.rpartition(" · ")[2].rpartition(".")[2]
    shown = list(dict.fromkeys(text for text, _ in widths))
    assert (shown[0], shown[-1]) == ("", label)
    for text in shown[1:-1]:
        assert len(text) >= 5
        begin, dots, end = text.partition("…")
        if dots and not begin:  # only whole name parts are left out
            assert label.removesuffix(end)[-1] == "."
        elif dots:
            assert last.startswith(begin)
            assert last.endswith(end)
            assert 0 <= len(begin) - len(end) <= 1
        else:
            assert text == last


def test_a_first_value_far_above_the_others_does_not_flatten_the_search_chart(page: Page) -> None:
    heights, notes = [], []
    for first_s in (0.02, 9.0):
        page.evaluate(
            """first => {
              data.search.lines = [
                {name: "policy", evaluations: [1, 9, 9], seconds: [0.1, 1, 1],
                 cost_s: [first, 0.014, 0.014]},
                {name: "evolution", evaluations: [2, 5, 7, 9], seconds: [0.2, 0.5, 1, 1],
                 cost_s: [0.018, 0.012, 0.01, 0.01]},
              ];
              data.lower_bound_s = null;
              const host = document.createElement("div");
              host.id = "probe";
              document.querySelector("#search").append(host);
              searchChart(host, "evaluations", null, "evaluations");
            }""",
            first_s,
        )
        probe = page.locator("#probe")
        probe.locator("svg").wait_for()
        path = probe.locator("path.curve:not(.after-end)").nth(1).bounding_box()
        assert path is not None
        heights.append(path["height"])
        notes.append(probe.get_by_text("stands at the edge: up to 9.000\u00a0s").count())
        page.evaluate("document.querySelector('#probe').remove()")
    assert notes == [0, 1]
    assert heights[1] > 100
    assert heights[1] >= heights[0]


def test_times_are_formatted_as_in_the_terminal(shared_page: Page) -> None:
    for seconds in (0.0261, 0.35214, 0.00955, 0.0011234, 0.7):
        assert shared_page.evaluate(f"time({seconds})") == f"{milliseconds(seconds)}\u00a0ms"


def test_search_finds_an_op_and_opens_the_modules_around_it(page: Page) -> None:
    page.fill("#find-op", "mixed.1.branches.1.1:conv")
    assert "found" in page.locator(".found").inner_text()
    page.press("#find-op", "Enter")
    assert "mixed.1.branches.1.1:conv" in details(page)
    page.fill("#find-op", "no such op")
    assert page.locator(".found").inner_text() == "nothing found"


def test_names_are_text_whatever_they_hold(page: Page) -> None:
    page.fill("#find-op", "onerror")
    assert page.locator(".matches button").first.inner_text() == HOSTILE
    page.press("#find-op", "Enter")
    assert HOSTILE in details(page)
    assert page.locator("img").count() == 0


def test_modules_open_and_close(page: Page) -> None:
    page.get_by_role("button", name="Close all").click()
    few = page.evaluate("graph.layout.nodes.length")
    closed = "graph.layout.nodes.find((node) => node.isGroup)"
    graph_canvas(page).dblclick(position=where(page, closed))
    assert page.evaluate("graph.layout.nodes.length") > few
    page.get_by_role("button", name="Open all").click()
    assert page.evaluate("graph.layout.nodes.length") == page.evaluate("N")
    page.fill("#find-op", "mixed.1.branches.1.1:conv")
    page.press("#find-op", "Enter")
    page.get_by_role("button", name="Close mixed", exact=True).click()
    assert page.evaluate("graph.layout.nodes.length") < page.evaluate("N")
    assert page.evaluate("graph.selected.key.path") == "mixed"


def test_everything_can_be_done_by_keys(page: Page) -> None:
    page.focus("#find-op")
    focused = []
    for _ in range(7):
        page.keyboard.press("Tab")
        focused.append(page.evaluate("document.activeElement.textContent || 'canvas'"))
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid"
    assert focused[:6] == ["Open all", "Close all", "−", "+", "Fit", "canvas"]
    graph_canvas(page).focus()
    page.keyboard.press("ArrowDown")
    first = details(page)
    page.keyboard.press("ArrowDown")
    assert details(page) != first
    page.get_by_role("button", name="Close all").click()
    few = page.evaluate("graph.layout.nodes.length")
    graph_canvas(page).focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert page.evaluate("graph.layout.nodes.length") > few
    page.locator("#when canvas[tabindex]").focus()
    page.keyboard.press("ArrowRight")
    text = page.locator(".told").inner_text()
    page.keyboard.press("ArrowRight")
    assert page.locator(".told").inner_text() != text
    page.keyboard.press("+")
    assert page.evaluate("gantt.end - gantt.begin < STEP")
    page.keyboard.press("0")
    assert page.evaluate("gantt.end - gantt.begin === STEP")


def test_a_click_in_the_timeline_says_why_a_device_is_idle(page: Page) -> None:
    place = page.evaluate(
        """(() => {
          const row = gantt.rows.find((row) => row.items.some((item) => item.kind === "idle"));
          const item = row.items.filter((item) => item.kind === "idle")
            .reduce((a, b) => (b.end - b.begin > a.end - a.begin ? b : a));
          return { x: timeToX((item.begin + item.end) / 2), y: row.top + row.height / 2 };
        })()"""
    )
    page.locator("#when canvas[tabindex]").click(position=place)
    assert "is idle: it" in page.locator(".told").inner_text()


def test_the_tables_hold_what_is_drawn(page: Page) -> None:
    page.get_by_text("The numbers").first.click()
    rows = page.locator("#won tbody tr")
    rows.first.wait_for()  # rendered when first shown
    assert rows.count() == page.evaluate("data.candidates.length")
    assert page.locator("#when tbody tr").count() == len(NAMES)
    assert page.locator("code").first.inner_text().startswith("placer ")
