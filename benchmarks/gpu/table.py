"""The offload table of docs/gpu.md, from files of results.

    python -m benchmarks.gpu --table benchmarks/results/*h200*.json

prints it; on the page it lies between two markers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.plan import SHARES
from benchmarks.gpu.rounds import of_seconds, tied_in_common
from benchmarks.tables import Table

BASELINE: Final = "first layers that fit"
OURS: Final = "placer: "


@dataclass(frozen=True, slots=True)
class Cell:
    """Baseline over best placement of one model under one limit, and the file it is from."""

    text: str
    file: str


def offload_table(files: Sequence[Path]) -> Table:
    """Return the table of all files; what several of them measured is that of the last one."""
    cells: dict[tuple[str, str], Cell] = {}
    rounds: dict[str, int] = {}
    for file in files:
        for part, content in json.loads(file.read_text())["parts"].items():
            model, _, share = part.rpartition(": ")
            if share in SHARES and content.get("rows"):
                cells[model, share] = Cell(ratio_text(content["rows"]), file.name)
                lengths = [len(row.get("repeats_s", [])) for row in content["rows"]]
                rounds[file.name] = max(rounds.get(file.name, 0), *lengths)
    used = [name for name in reversed(rounds) if any(c.file == name for c in cells.values())]
    mark = {name: "*" * number for number, name in enumerate(used)}
    models = dict.fromkeys(model for model, _ in cells)
    rows = tuple(
        (model, *(_text(cells.get((model, share)), mark) for share in SHARES)) for model in models
    )
    sources = "; ".join(
        f"{f'({mark[name]}) ' if mark[name] else ''}`{name}`, {rounds[name]} rounds"
        for name in used
    )
    return Table(
        "Offload",
        "step of the first layers that fit over that of the best placement of a search, by the GPU "
        f"memory as a share of what the whole step takes; {sources}",
        ("model", *(share.replace("%", " %") for share in SHARES)),
        rows,
    )


def _text(cell: Cell | None, mark: Mapping[str, str]) -> str:
    return "not measured" if cell is None else cell.text + mark[cell.file]


def ratio_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return baseline over best placement, with a tie marked, or which ran out of memory."""
    steps = {row["name"]: of_seconds(row.get("repeats_s", [])) for row in rows}
    baseline = steps[BASELINE]
    best = min(
        (step for name, step in steps.items() if name.startswith(OURS)),
        key=lambda step: step.median_s,
    )
    failed = [who for who, step in (("baseline", baseline), ("placement", best)) if not step.ok]
    if failed:
        reasons = [row["failure"] for row in rows if row.get("failure")]
        overfull = all("out of memory" in reason for reason in reasons)
        return f"{' and '.join(failed)}: {'out of memory' if overfull else 'failed'}"
    tie = " (tie)" if tied_in_common(baseline, best) else ""
    return f"{baseline.median_s / best.median_s:.2f}x{tie}"
