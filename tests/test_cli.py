"""The command line as a user meets it: answers, exit codes, and nothing lost."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from graphs.files import save_graph
from graphs.synthetic import layered
from placer.cli.main import main

HEAVY = ("torch", "numpy", "networkx", "gymnasium", "numba", "rich")
CLUSTER = """
format = "placer-cluster/1"
name = "pair"
[[device]]
name = "a"
kind = "x"
memory_bytes = {memory}
[[device]]
name = "b"
kind = "x"
memory_bytes = {memory}
[[link]]
between = ["a", "b"]
latency_s = 1e-6
bandwidth_bytes_per_s = 1e10
"""


@pytest.fixture
def files(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Writes a graph and a cluster of two devices."""
    import numpy as np

    def write(memory_bytes: int = 1 << 40) -> tuple[Path, Path]:
        graph, cluster = tmp_path / "graph.json", tmp_path / "cluster.toml"
        save_graph(layered(np.random.default_rng(0), ops=40, width=6), graph)
        cluster.write_text(CLUSTER.format(memory=memory_bytes))
        return graph, cluster

    return write


def test_help_imports_nothing_heavy_and_is_quick() -> None:
    code = (
        "import sys\n"
        "from placer.cli.main import build_parser\n"
        "build_parser().format_help()\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert out.strip() == "[]"

    def help_cpu_s() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "placer.cli.main", "--help"], capture_output=True, check=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(help_cpu_s() for _ in range(5)) < 0.15


@pytest.mark.parametrize("command", ["optimize", "simulate", "devices", "show", "train"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert command in capsys.readouterr().out


def test_unknown_commands_are_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["optimise"])
    assert stopped.value.code == 2
    assert "optimize" in capsys.readouterr().err


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

    assert main(["show", str(out)]) == 0
    assert "predicted step" in capsys.readouterr().out
    op_id = next(iter(json.loads(out.read_text())["devices"]))
    assert main(["show", str(out), op_id]) == 0
    assert capsys.readouterr().out.strip() in ("a", "b")
    assert main(["show", str(out), "no.such.module"]) == 2
    assert "no.such.module" in capsys.readouterr().err


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


def test_a_graph_that_fits_nowhere_says_where_by_how_much_and_why(
    files: Callable[..., tuple[Path, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph, cluster = files(memory_bytes=10)
    out = tmp_path / "placement.json"
    arguments = ["optimize", str(graph), "--cluster", str(cluster), "--budget", "50e"]
    assert main([*arguments, "--out", str(out)]) == 1
    told = capsys.readouterr().err
    assert "fits nowhere" in told
    assert "largest:" in told
    assert not out.exists()


MODEL = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Linear(4, 4), (torch.randn(2, 4), torch.randn(2, 4)), nn.functional.mse_loss

def branches_on_data():
    class Model(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y.sum() if y.sum() > 0 else y.mean()
    return Model(4, 4), torch.randn(2, 4)

def no_loss():
    return nn.Linear(4, 4), torch.randn(2, 4)

def nonsense():
    return 7

def broken():
    raise RuntimeError("no such data set")
"""


@pytest.mark.parametrize(
    ("target", "code", "words"),
    [
        ("{dir}/modle.py:build", 2, ["no file", "did you mean", "model.py"]),
        ("{dir}/model.py:biuld", 2, ["no function 'biuld'", "build"]),
        ("{dir}/model.py", 2, ["path/to/model.py:function"]),
        ("{dir}/model.py:nonsense", 2, ["must return (model, inputs)", "int"]),
        ("{dir}/model.py:broken", 2, ["no such data set"]),
        ("{dir}/model.py:branches_on_data", 1, ["cannot be exported", "control flow"]),
        ("{dir}/model.py:no_loss", 1, ["scalar loss", "(2, 4)"]),
    ],
)
def test_bad_targets_get_a_sentence(
    target: str, code: int, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    arguments = ["optimize", target.format(dir=tmp_path), "--out", str(tmp_path / "p.json")]
    assert main([*arguments, "--devices", "core:0"]) == code
    told = capsys.readouterr().err
    for word in words:
        assert word in told
    assert "Traceback" not in told
    assert not (tmp_path / "p.json").exists()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--devices", "core:999"], ["core:999", "may run on cores"]),
        (["--devices", "gpu:0"], ["gpu:0", "core:N"]),
        (["--devices", "cuda:0"], ["cuda:0"]),
        (["--devices", "core:0,core:0"], ["overlap"]),
        (["--budget", "fast"], ["fast", "20s"]),
        (["--cluster", "no.toml"], ["no.toml"]),
        (["--out", "/no/such/folder/p.json"], ["cannot be written", "/no/such/folder"]),
        (["--out", "/proc/p.json"], ["cannot be written", "/proc/p.json"]),
        (["--timeline", "/"], ["cannot be written"]),
        (["--policy", "generalissimo"], ["generalissimo", "generalist"]),
    ],
)
def test_bad_options_are_refused_before_any_work(
    more: list[str], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["optimize", "never/loaded.py:build", "--out", str(tmp_path / "p.json"), *more]
    assert main(arguments) == 2
    told = capsys.readouterr().err
    for word in words:
        assert word in told
    assert "never/loaded" not in told


def test_a_placement_of_another_graph_is_refused(
    files: Callable[..., tuple[Path, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph, cluster = files()
    out = tmp_path / "placement.json"
    arguments = ["optimize", str(graph), "--cluster", str(cluster), "--budget", "50e"]
    assert main([*arguments, "--out", str(out)]) == 0
    placement = json.loads(out.read_text())
    placement["graph"] = "0" * 64
    out.write_text(json.dumps(placement))
    simulate = ["simulate", str(graph), "--cluster", str(cluster), "--placement", str(out)]
    capsys.readouterr()
    assert main(simulate) == 2
    assert "made for graph 000000000000" in capsys.readouterr().err
