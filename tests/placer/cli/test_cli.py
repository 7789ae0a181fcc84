"""Command line from the user's view: output, exit codes, no lost results."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from envs.hardware.cluster import cluster_to_toml
from envs.placement import Placement
from graphs.files import write_whole
from graphs.graph_file import save_graph
from placer.cli.main import main
from tests.helpers.simulator_cases import fork, one_kind

HEAVY = ("torch", "numpy", "networkx", "gymnasium", "numba", "rich")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from placer.cli.commands import build_parser\n"
        "build_parser().format_help()\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert out.strip() == "[]"


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


def test_graph_files_are_placed_without_torch(
    files: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    graph, cluster = map(str, files())
    out = str(tmp_path / "placement.json")
    optimize = ["optimize", graph, "--cluster", cluster, "--budget", "60e"]
    again = ["--start-from", out, "--out", str(tmp_path / "again.json")]
    replicas = ["--data-parallel", "auto", "--out", str(tmp_path / "replicas.json")]
    commands = [
        [*optimize, "--out", out, "--report", str(tmp_path / "report.html")],
        [*optimize, *again],
        [*optimize, *replicas],
        ["simulate", graph, "--cluster", cluster, "--placement", out],
    ]
    code = NO_TORCH.replace("COMMANDS", repr(commands))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_package_lists_its_public_names_before_they_are_used() -> None:
    code = (
        "import placer, sys; print(dir(placer) == sorted(placer.__all__), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_a_graph_is_optimized_simulated_and_shown(
    files: Callable[..., tuple[Path, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph, cluster = files()
    out, timeline = tmp_path / "placement.json", tmp_path / "timeline.json"
    arguments = ["optimize", str(graph), "--cluster", str(cluster), "--budget", "300e"]
    arguments += ["--out", str(out), "--timeline", str(timeline), "--json"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["measured"] is None
    assert found["step_s"] >= found["lower_bound_s"] > 0
    assert {event["ph"] for event in json.loads(timeline.read_text())["traceEvents"]} >= {"X"}

    simulate = ["simulate", str(graph), "--cluster", str(cluster), "--placement", str(out)]
    assert main([*simulate, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["step_s"] == pytest.approx(found["step_s"], rel=0, abs=1e-15)
    assert again["feasible"] is True
    assert again["critical_path"][0]["start_s"] == 0
    assert again["critical_path"][-1]["end_s"] == again["step_s"]

    assert main([*simulate, "--micro-batches", "4", "--json"]) == 0
    four = json.loads(capsys.readouterr().out)
    assert (again["micro_batches"], four["micro_batches"]) == (1, 4)
    assert again["period_s"] is None
    assert 0 < four["period_s"] <= again["step_s"]
    assert main([*simulate, "--micro-batches", "4"]) == 0
    assert "4 micro-batches" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*simulate, "--micro-batches", "0"])
    assert "'0' is not" in capsys.readouterr().err

    assert main(["show", str(out)]) == 0
    assert "predicted step" in capsys.readouterr().out
    op_id = next(iter(json.loads(out.read_text())["devices"]))
    assert main(["show", str(out), op_id]) == 0
    assert capsys.readouterr().out.strip() in ("a", "b")
    assert main(["show", str(out), "no.such.module"]) == 2
    assert "no.such.module" in capsys.readouterr().err


@pytest.mark.parametrize("as_json", [True, False])
def test_a_placement_that_cannot_run_is_told_and_has_no_timeline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    graph, cluster, out = (tmp_path / name for name in ("g.json", "c.toml", "p.json"))
    save_graph(fork(1), graph)
    cluster.write_text(cluster_to_toml(replace(one_kind(2), links=())))
    out.write_text(json.dumps({"format": "placer-placement/1", "devices": {"s": "d0", "0": "d1"}}))
    timeline = tmp_path / "timeline.json"
    arguments = ["simulate", str(graph), "--cluster", str(cluster), "--placement", str(out)]
    arguments += ["--timeline", str(timeline), *["--json"] * as_json]
    assert main(arguments) == 1
    told = capsys.readouterr()
    assert "no link joins these devices" in told.out
    assert told.err.startswith(f"placer: {timeline} is not written")
    assert told.err.count("\n") == 1
    assert not timeline.exists()


def test_a_graph_whose_ops_no_link_can_join_is_refused_before_the_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = fork(1)
    made.nodes["s"]["devices"], made.nodes["0"]["devices"] = ("d0",), ("d1",)
    graph, cluster = tmp_path / "g.json", tmp_path / "c.toml"
    save_graph(made, graph)
    cluster.write_text(cluster_to_toml(replace(one_kind(2), links=())))
    out = ["--out", str(tmp_path / "p.json")]
    assert main(["optimize", str(graph), "--cluster", str(cluster), *out]) == 1
    assert 'add a [[link]] between = ["d0", "d1"]' in capsys.readouterr().err


def test_a_budget_in_evaluations_gives_the_same_placement_again(
    files: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    graph, cluster = files()
    written = []
    for name in ("one.json", "two.json"):
        out = tmp_path / name
        arguments = ["optimize", str(graph), "--cluster", str(cluster), "--budget", "500e"]
        assert main([*arguments, "--seed", "3", "--out", str(out)]) == 0
        written.append(out.read_bytes())
    assert written[0] == written[1]


def test_a_graph_that_does_not_fit_says_where_by_how_much_and_why(
    files: Callable[..., tuple[Path, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "placement.json"
    for memory_bytes, *reasons in (
        (10, "fits nowhere"),
        (18_000_000, "No placement that was found", "misses by least"),
    ):
        graph, cluster = files(memory_bytes=memory_bytes)
        arguments = ["optimize", str(graph), "--cluster", str(cluster), "--budget", "50e"]
        assert main([*arguments, "--out", str(out)]) == 1
        told = capsys.readouterr().err
        assert all(reason in told for reason in reasons)
        assert not out.exists()


def test_a_link_to_where_results_go_is_followed(
    files: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    graph, cluster = files()
    link, real = tmp_path / "link.json", tmp_path / "real.json"
    link.symlink_to(real)
    arguments = ["optimize", str(graph), "--cluster", str(cluster), "--budget", "50e"]
    assert main([*arguments, "--out", str(link)]) == 0
    assert link.is_symlink()
    assert "devices" in json.loads(real.read_text())


def test_a_timeline_that_cannot_be_written_costs_nothing_else(
    files: Callable[..., tuple[Path, Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(path: Path, _content: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    graph, cluster = files()
    out, timeline = tmp_path / "p.json", tmp_path / "t.json"
    monkeypatch.setattr("placer.report.timeline.write_whole", full)
    arguments = ["optimize", str(graph), "--cluster", str(cluster), "--budget", "50e"]
    arguments += ["--out", str(out), "--timeline", str(timeline)]
    assert main(arguments) == 1
    told = capsys.readouterr()
    assert f"{timeline} cannot be written: no space left on device" in told.err
    assert str(out) in told.err
    assert "Best:" in told.out

    simulate = ["simulate", str(graph), "--cluster", str(cluster), "--placement", str(out)]
    assert main([*simulate, "--timeline", str(timeline)]) == 1
    assert "no space left on device" in capsys.readouterr().err
    assert out.exists()
    assert not timeline.exists()


def test_a_full_disk_is_told_before_the_search(
    files: Callable[..., tuple[Path, Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(_file: int, _from: int, size: int) -> None:
        assert size >= 4096
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    graph, cluster = files()
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr("os.posix_fallocate", full)
    monkeypatch.setattr("placer.api.optimize_job", lambda *_: pytest.fail("it searched"))
    arguments = ["optimize", str(graph), "--cluster", str(cluster), "--budget", "50e"]
    assert main([*arguments, "--out", str(tmp_path / "p.json")]) == 1
    assert "p.json cannot be written: no space left on device" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_placement_is_not_lost_when_the_disk_fills_meanwhile(
    everywhere: bool,
    files: Callable[..., tuple[Path, Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    graph, cluster = files()
    out, others = tmp_path / "p.json", tmp_path / "others"
    others.mkdir()

    def full(path: Path, content: str) -> None:
        if everywhere or path == out:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write_whole(path, content)

    monkeypatch.setattr("envs.placement.write_whole", full)
    monkeypatch.setattr("tempfile.tempdir", str(others))
    arguments = ["optimize", str(graph), "--cluster", str(cluster), "--budget", "50e", "--quiet"]
    assert main([*arguments, "--out", str(out)]) == 1
    told = capsys.readouterr()
    assert f"{out} cannot be written: no space left on device; the placement is " in told.err
    if everywhere:
        kept = json.loads(told.out.splitlines()[0])
        assert "on standard output" in told.err
    else:
        [other] = others.iterdir()
        assert str(other) in told.err
        kept = json.loads(other.read_text())
    assert Placement.from_dict(kept).made_by.budget == "50e"
    assert not out.exists()


def test_ctrl_c_while_results_are_written_loses_nothing(
    files: Callable[..., tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: Path, content: str) -> None:
        signal.raise_signal(signal.SIGINT)
        write_whole(path, content)

    graph, cluster = files()
    out, timeline = tmp_path / "p.json", tmp_path / "t.json"
    monkeypatch.setattr("envs.placement.write_whole", interrupted)
    monkeypatch.setattr("placer.report.timeline.write_whole", interrupted)
    arguments = ["optimize", str(graph), "--cluster", str(cluster), "--budget", "50e"]
    assert main([*arguments, "--out", str(out), "--timeline", str(timeline)]) == 0
    assert out.exists()
    assert timeline.exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_output_that_goes_nowhere_is_a_failed_job(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text('{"format": "placer-placement/1", "devices": {"a": "x"}}')
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "placer.cli.main", "show", str(path)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ended.returncode == 1
    assert ended.stderr == "placer: standard output: no space left on device\n"
