"""Draw the pictures of the docs from a run on this machine: ``python docs/pictures/draw.py``.

The model is that of ``docs/quickstart.md``, placed on two cores and measured.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from html import escape
from pathlib import Path

import numpy as np

import placer
from envs.simulator import Schedule, Simulated
from envs.simulator.critical_path import critical_path, idle_times
from graphs.graph import PHASES
from placer.result import Result
from placer.search.candidate import Candidate

HERE = Path(__file__).resolve().parent
STYLE = """\
text { font: 12px system-ui, sans-serif; fill: #1f2328; }
.soft { fill: #59636e; } .small { font-size: 11px; } .head { font-size: 14px; font-weight: 600; }
.inside { fill: #ffffff; text-anchor: middle; } .end { text-anchor: end; }
.text { fill: #2b6cb0; } .image { fill: #b45309; } .rest { fill: #6b7280; }
.backward { fill-opacity: 0.72; } .sent { fill: #6b7280; } .critical { fill: #d1242f; }
.axis { stroke: #d1d9e0; } .bound { stroke: #d1242f; stroke-width: 2; stroke-dasharray: 5 4; }
.predicted { fill: none; stroke: #1f2328; stroke-width: 1.5; } .measured { fill: #2b6cb0; }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc; } .soft { fill: #9198a1; } .inside { fill: #ffffff; }
  .axis { stroke: #3d444d; } .critical { fill: #ff7b72; } .bound { stroke: #ff7b72; }
  .predicted { stroke: #f0f6fc; } .measured { fill: #4b83c4; }
}"""
WIDTH = 860
LEFT = 120
ROW = 30


def main() -> None:
    """Run the quickstart and draw both pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="5s")
    arguments = parser.parse_args()
    found = placed(arguments.budget)
    (HERE / "timeline.svg").write_text(timeline(found))
    (HERE / "gain.svg").write_text(gain(found))


def placed(budget: str) -> Result:
    """Optimize the quickstart's model on two cores."""
    page = (HERE.parent / "quickstart.md").read_text()
    [source] = re.findall(r"```python\n(# model\.py\n.*?)```", page, re.DOTALL)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.py")
        path.write_text(source)
        return placer.optimize(f"{path}:build", "core:0,core:1", budget=budget, progress=False)


def timeline(found: Result) -> str:
    """Return an SVG of the step on one core and as placed: a track per core, one for transfers."""
    assert found.single is not None
    simulated = Simulated(found.problem)
    parts: list[str] = []
    _, alone = simulated.run(found.single.placement)
    _, best = simulated.run(found.best.placement)
    scale = (WIDTH - LEFT - 20) / alone.step_ns
    bottom = _step(parts, found, found.single, alone, scale, 24)
    bottom = _step(parts, found, found.best, best, scale, bottom + 34)
    text = (
        "Full colour: forward, fainter: backward; red: the critical path. Simulated, by op costs "
        "measured on this machine."
    )
    parts.append(f'<text class="soft small" x="12" y="{bottom + 22}">{text}</text>')
    return _svg(parts, bottom + 36, "A training step on one core and on two")


def _step(
    parts: list[str], found: Result, row: Candidate, schedule: Schedule, scale: float, top: float
) -> float:
    """Draw one step below ``top`` and return its bottom."""
    graph, names = found.problem.graph, found.problem.cluster.names
    used = sorted({int(d) for d in schedule.devices})
    title = f"{row.name}: {schedule.step_ns / 1e6:.1f} ms"
    parts.append(f'<text class="head" x="12" y="{top}">{escape(title)}</text>')
    top += 10
    critical = {
        stretch.op
        for stretch in critical_path(found.problem, schedule)
        if stretch.kind == "compute"
    }
    for line, d in enumerate(used):
        y = top + line * ROW
        parts.append(f'<text class="soft" x="12" y="{y + 16}">{escape(names[d])}</text>')
        for i in np.flatnonzero(schedule.devices == d).tolist():
            x, end = LEFT + schedule.start_ns[i] * scale, LEFT + schedule.end_ns[i] * scale
            module = graph.ids[i].partition(":")[0]
            tower = module.partition(".")[0]
            kind = tower if tower in ("text", "image") else "rest"
            is_backward = graph.phase[i] == PHASES.index("backward")
            shade = " backward" if is_backward else ""
            width = max(end - x - 1, 0.4)
            parts.append(
                f'<rect class="{kind}{shade}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="22">'
                f"<title>{escape(graph.ids[i])}</title></rect>"
            )
            if width > 7.5 * len(module):
                middle = (x + end) / 2
                parts.append(
                    f'<text class="inside small" x="{middle:.1f}" y="{y + 15}">{module}</text>'
                )
            if i in critical:
                parts.append(
                    f'<rect class="critical" x="{x:.1f}" y="{y + 23}" width="{width:.1f}" '
                    'height="2.5"/>'
                )
    bottom = top + len(used) * ROW
    sent = schedule.transfers
    if len(sent.start_ns):
        parts.append(f'<text class="soft" x="12" y="{bottom + 12}">between them</text>')
        for start, end in zip(sent.start_ns.tolist(), sent.end_ns.tolist(), strict=True):
            x, width = LEFT + start * scale, max((end - start) * scale, 1.0)
            parts.append(
                f'<rect class="sent" x="{x:.1f}" y="{bottom + 3}" width="{width:.1f}" height="10"/>'
            )
        bottom += 16
    idle = sum(gap.end_ns - gap.start_ns for gap in idle_times(found.problem, schedule))
    share = idle / (schedule.step_ns * found.problem.device_count)
    text = f"idle: {share:.0%} of both cores' time"
    parts.append(
        f'<text class="soft small end" x="{WIDTH - 12}" y="{top - 10}">{escape(text)}</text>'
    )
    return bottom


def gain(found: Result) -> str:
    """Return an SVG of all candidates, predicted and measured, and the lower bound."""
    rows = sorted(found.candidates, key=found.step_s)
    longest_s = max(max(row.predicted_s, found.step_s(row)) for row in rows)
    scale = (WIDTH - LEFT - 110) / longest_s
    parts: list[str] = []
    for line, row in enumerate(rows):
        y = 16 + line * ROW
        parts.append(f'<text x="12" y="{y + 15}">{escape(row.name)}</text>')
        told = f"{row.predicted_s * 1e3:.1f} ms predicted"
        reach = row.predicted_s
        if row.measurement is not None:
            step_s = found.step_s(row)
            told = f"{step_s * 1e3:.1f} ms"
            reach = max(reach, step_s)
            parts.append(_bar("measured", y + 2, step_s * scale))
        parts.append(_bar("predicted", y + 2, row.predicted_s * scale))
        x = LEFT + reach * scale + 8
        parts.append(f'<text class="soft small" x="{x:.1f}" y="{y + 15}">{told}</text>')
    bottom, bound = 16 + len(rows) * ROW, LEFT + found.lower_bound_s * scale
    parts.append(f'<line class="bound" x1="{bound:.1f}" x2="{bound:.1f}" y1="8" y2="{bottom}"/>')
    text = (
        "Filled: measured. Outlined: predicted. Dashed: the lower bound, "
        f"{found.lower_bound_s * 1e3:.1f} ms, which no placement can beat."
    )
    parts.append(f'<text class="soft small" x="12" y="{bottom + 18}">{text}</text>')
    return _svg(parts, bottom + 30, "Steps of all candidates")


def _bar(kind: str, y: float, width: float) -> str:
    return f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{width:.1f}" height="18"/>'


def _svg(parts: list[str], height: float, title: str) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'width="{WIDTH}" height="{height:.0f}" role="img">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n{body}\n</svg>\n"
    )


if __name__ == "__main__":
    main()
