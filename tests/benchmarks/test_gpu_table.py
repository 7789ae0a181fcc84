"""The offload table, from files of results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.gpu.table import offload_table
from benchmarks.tables import BEGIN, END
from tests.helpers.folders import ROOT


def test_the_page_has_the_table_of_the_recorded_files() -> None:
    files = sorted((ROOT / "benchmarks" / "results").glob("*h200*.json"))
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    between = page.partition(BEGIN)[2].partition(END)[0]
    assert between.strip() == offload_table(files).markdown().strip()


def rows(baseline_s: list[float], *ours_s: list[float]) -> dict[str, Any]:
    """Return a part with these repeats; one without repeats ran out of memory."""
    names = ["first layers that fit", *(f"placer: {k}" for k in range(len(ours_s)))]
    return {
        "rows": [
            {"name": name, "repeats_s": steps_s, "failure": "" if steps_s else "CUDA out of memory"}
            for name, steps_s in zip(names, (baseline_s, *ours_s), strict=True)
        ]
    }


def test_ties_failures_and_the_file_of_each_cell_are_shown(tmp_path: Path) -> None:
    parts = {
        "one.json": {"a: 75%": rows([9.0] * 3, [1.0] * 3), "a: 50%": rows([3.0] * 3, [2.0] * 3)},
        "two.json": {
            "a: 75%": rows([2.0] * 7, [1.6] * 7, [1.0] * 7),
            "b: 75%": rows([1.001, 2.002], [1.0, 2.0]),
            "b: 50%": rows([1.0] * 7, []),
            "b: 30%": {"skipped": "no time"},
            "c: 75%": rows([], [1.0] * 7),
            "c: 50%": rows([], []),
        },
    }
    for name, content in parts.items():
        (tmp_path / name).write_text(json.dumps({"parts": content}))
    table = offload_table([tmp_path / name for name in parts])
    assert table.rows == (
        ("a", "2.00x", "1.50x*", "not measured"),
        ("b", "1.00x (tie)", "placement: out of memory", "not measured"),
        ("c", "baseline: out of memory", "baseline and placement: out of memory", "not measured"),
    )
    assert "`two.json`, 7 rounds; (*) `one.json`, 3 rounds" in table.note
