"""Builds the report page: data, style and scripts in one file."""

from __future__ import annotations

import html
import json
from importlib import resources
from pathlib import Path
from typing import Any, Final

from graphs.files import write_whole

SCRIPTS: Final = (
    "basics.js",
    "units.js",
    "colours.js",
    "surface.js",
    "bars.js",
    "lines.js",
    "modules.js",
    "layers.js",
    "graph.js",
    "graph_drawing.js",
    "graph_input.js",
    "graph_details.js",
    "gantt.js",
    "gantt_numbers.js",
    "gantt_drawing.js",
    "gantt_input.js",
    "report.js",
)
"""Scripts in execution order; the last one draws the page."""

PAGE: Final = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<main id="report"></main>
<noscript>This report is drawn by scripts of its own; allow them to see it.</noscript>
<script type="application/json" id="data">{data}</script>
<script>
"use strict";
{scripts}</script>
</body>
</html>
"""


def write_report(data: dict[str, Any], path: Path) -> None:
    """Write the page with the data of :func:`report_data`, whole or not at all."""
    write_whole(path, page(data))


def page(data: dict[str, Any]) -> str:
    """Return the page as text. It loads nothing, and its content security policy forbids it."""
    return PAGE.format(
        title=html.escape(f"Placement of {data['graph']}"),
        style=_asset("report.css"),
        data=embedded(data),
        scripts="\n".join(_asset(name) for name in SCRIPTS),
    )


def embedded(data: dict[str, Any]) -> str:
    r"""Return JSON that is safe inside a script element, whatever op names contain.

    >>> embedded({"op": "</script>"})
    '{"op":"\\u003c/script>"}'
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _asset(name: str) -> str:
    return (resources.files("placer.report") / "assets" / name).read_text(encoding="utf-8")
