"""``placer optimize`` and what follows it, from the user's view: no lost results."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from envs.hardware.cluster import cluster_to_toml
from envs.placement import Placement
from graphs.files import write_whole
from graphs.graph import add_edge, add_op, new_graph
from graphs.graph_file import save_graph
from placer.cli.main import main
from tests.helpers.simulator_cases import fork, one_kind

Files = Callable[..., tuple[Path, Path]]

NO_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "gymnasium", "stable_baselines3"):
            raise AssertionError(f"{name} is imported")

sys.meta_path.insert(0, NoTorch())
from placer.cli.main import main

for command in COMMANDS:
    assert main(command) == 0, command
"""


@pytest.mark.slow
def test_graph_files_are_placed_without_torch(files: Files, tmp_path: Path) -> None:
    graph, cluster = map(str, files())
    out = str(tmp_path / "placement.json")
    optimize = ["optimize", graph, "--cluster", cluster, "--budget", "60e"]
    again = ["--start-from", out, "--out", str(tmp_path / "again.json")]
    replicas = ["--data-parallel", "auto", "--out", str(tmp_path / "replicas.json")]
    commands = [
        [*optimize, "--out", out, "--report", str(tmp_path / "report.html")],
        [*optimize, *again],
        [*optimize, *replicas],
        ["evaluate", graph, "--cluster", cluster, "--placement", out],
    ]
    code = NO_TORCH.replace("COMMANDS", repr(commands))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_graph_is_optimized_evaluated_and_shown(
    files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def json_of(*arguments: str) -> dict[str, Any]:
        capsys.readouterr()
        assert main([*arguments, "--json"]) == 0
        content: dict[str, Any] = json.loads(capsys.readouterr().out)
        return content

    graph, cluster = map(str, files())
    out, timeline = tmp_path / "placement.json", tmp_path / "timeline.json"
    arguments = ["--cluster", cluster, "--budget", "300e", "--out", str(out)]
    optimized = json_of("optimize", graph, *arguments)
    assert optimized["measured"] is None
    assert optimized["measuring_s"] == 0
    assert optimized["total_s"] >= optimized["search_s"] > 0
    assert optimized["step_s"] >= optimized["lower_bound_s"] > 0

    placed = [graph, "--cluster", cluster, "--placement", str(out)]
    one = json_of("evaluate", *placed, "--timeline", str(timeline))
    assert one["step_s"] == pytest.approx(optimized["step_s"], rel=0, abs=1e-15)
    assert one["feasible"] is True
    assert one["critical_path"][0]["start_s"] == 0
    assert one["critical_path"][-1]["end_s"] == one["step_s"]
    assert {event["ph"] for event in json.loads(timeline.read_text())["traceEvents"]} >= {"X"}
    assert main(["evaluate", *placed, "--timeline", str(timeline)]) == 0
    assert capsys.readouterr().err.endswith(f"timeline: {timeline}\n")
    assert json_of("simulate", *placed) == one  # as other programs call it
    four = json_of("evaluate", *placed, "--micro-batches", "4")
    assert (one["micro_batches"], one["period_s"], four["micro_batches"]) == (1, None, 4)
    assert 0 < four["period_s"] <= one["step_s"]

    for command in (["evaluate", *placed, "--micro-batches", "4"], ["show", str(out)]):
        assert main(command) == 0
    printed = capsys.readouterr().out
    assert "4 micro-batches" in printed
    assert "predicted step" in printed
    op_id, device = next(iter(json.loads(out.read_text())["devices"].items()))
    assert main(["show", str(out), op_id]) == 0
    assert capsys.readouterr().out.strip() == device


def test_a_placement_that_cannot_run_is_reported_and_has_no_timeline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph, cluster, out = (tmp_path / name for name in ("g.json", "c.toml", "p.json"))
    save_graph(fork(1), graph)
    cluster.write_text(cluster_to_toml(replace(one_kind(2), links=())))
    out.write_text(json.dumps({"format": "placer-placement/1", "devices": {"s": "d0", "0": "d1"}}))
    timeline = tmp_path / "timeline.json"
    arguments = ["evaluate", str(graph), "--cluster", str(cluster), "--placement", str(out)]
    assert main([*arguments, "--json"]) == 1
    assert "no link joins these devices" in json.loads(capsys.readouterr().out)["why"]
    assert main([*arguments, "--timeline", str(timeline)]) == 1
    printed = capsys.readouterr()
    assert "no link joins these devices" in printed.out
    assert f"placer: {timeline} is not written" in printed.err
    assert not timeline.exists()


def optimize(files: Files, out: Path, *more: str) -> int:
    graph, cluster = files()
    arguments = ["optimize", str(graph), "--cluster", str(cluster), "--budget", "50e"]
    return main([*arguments, "--out", str(out), *more])


def full(path: Path, _content: str) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def test_a_report_that_cannot_be_written_costs_nothing_else(
    files: Files,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, report = tmp_path / "p.json", tmp_path / "r.html"
    import_module("placer.report.html.page")  # takes the function before it is replaced
    monkeypatch.setattr("graphs.files.write_whole", full)
    assert optimize(files, out, "--report", str(report)) == 1
    printed = capsys.readouterr()
    assert f"{report} cannot be written: no space left on device; the placement is in {out}" in (
        printed.err
    )
    assert "Best:" in printed.out
    assert out.exists()
    assert not report.exists()


def test_a_full_disk_is_reported_before_the_search(
    files: Files,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def no_space(_file: int, _from: int, size: int) -> None:
        assert size >= 4096
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    files()
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr("os.posix_fallocate", no_space)
    monkeypatch.setattr("placer.api.optimize_job", lambda *_: pytest.fail("it searched"))
    assert optimize(files, tmp_path / "p.json") == 1
    assert "p.json cannot be written: no space left on device" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_placement_is_not_lost_when_the_disk_fills_meanwhile(
    everywhere: bool,
    files: Files,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, others = tmp_path / "p.json", tmp_path / "others"
    others.mkdir()

    def write(path: Path, content: str) -> None:
        (full if everywhere or path == out else write_whole)(path, content)

    monkeypatch.setattr(f"{Placement.save.__module__}.write_whole", write)
    monkeypatch.setattr("tempfile.tempdir", str(others))
    assert optimize(files, out, "--json") == 1
    printed = capsys.readouterr()
    assert f"{out} cannot be written: no space left on device; the placement is " in printed.err
    if everywhere:
        kept = json.loads(printed.out)
        assert "on standard output" in printed.err
    else:
        [other] = others.iterdir()
        assert str(other) in printed.err
        kept = json.loads(other.read_text())
        assert json.loads(printed.out)["best"]
    assert Placement.from_dict(kept).made_by.budget == "50e"
    assert not out.exists()


def test_ctrl_c_while_results_are_written_loses_nothing(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: Path, content: str) -> None:
        signal.raise_signal(signal.SIGINT)
        write_whole(path, content)

    monkeypatch.setattr(f"{Placement.save.__module__}.write_whole", interrupted)
    assert optimize(files, tmp_path / "p.json") == 0
    assert (tmp_path / "p.json").exists()


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    "objective",
    [[], ["--objective", "max-load"], ["--objective", "throughput", "--micro-batches", "3"]],
)
def test_a_graph_with_abstract_times_is_placed_like_the_same_graph_in_microseconds(
    objective: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def json_of(*arguments: str) -> dict[str, Any]:
        capsys.readouterr()
        assert main([*arguments, "--json"]) == 0
        content: dict[str, Any] = json.loads(capsys.readouterr().out)
        return content

    rng = random.Random(0)
    costs = [rng.randint(1000, 1_000_000) for _ in range(30)]
    inputs = [rng.sample(range(i), min(i, 2)) for i in range(30)]
    found: dict[float, tuple[dict[str, Any], dict[str, Any]]] = {}
    for unit_s in (1.0, 1e-6):
        graph = new_graph("abstract")
        for i in range(30):
            add_op(graph, str(i), cost_s={"*": costs[i] * unit_s}, output_bytes=1000 * (i % 7))
            for u in inputs[i]:
                add_edge(graph, str(u), str(i))
        cluster = one_kind(3, latency_s=100 * unit_s, bandwidth_bytes_per_s=1 / unit_s)
        save_graph(graph, tmp_path / "graph.json")
        write_whole(tmp_path / "cluster.toml", cluster_to_toml(cluster))
        files = [str(tmp_path / "graph.json"), "--cluster", str(tmp_path / "cluster.toml")]
        out = str(tmp_path / "placement.json")
        optimized = json_of("optimize", *files, *objective, "--budget", "300e", "--out", out)
        timeline = ["--timeline", str(tmp_path / "timeline.json")]
        found[unit_s] = optimized, json_of("evaluate", *files, "--placement", out, *timeline)
        main(["show", out, "--html", str(tmp_path / "page.html"), "--target", files[0]])
    (optimized, evaluated), (of_short, short) = found.values()
    assert optimized["step_s"] > 1e6
    for key in ("step_s", "lower_bound_s"):
        assert optimized[key] == pytest.approx(1e6 * of_short[key], rel=1e-6)
    for key in ("step_s", "max_load_s", "period_s"):
        if short[key] is not None:
            assert evaluated[key] == pytest.approx(1e6 * short[key], rel=1e-6)
    ends = [part["end_s"] for part in evaluated["critical_path"]]
    assert ends == pytest.approx([1e6 * part["end_s"] for part in short["critical_path"]])
