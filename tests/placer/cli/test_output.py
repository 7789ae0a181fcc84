"""Output streams: results to stdout, messages to stderr, colours only to terminals."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from envs.placement import module_of
from placer.cli.main import main

COLOUR = re.compile(r"\x1b\[[0-9;]*\b(3[0-7]|38|4[0-7]|48|9[0-7])[;m]")
TALK = """
import sys
from placer.report.console import stdout_console
from placer.progress import progress_for

with progress_for(sys.stderr) as progress:
    progress.stage("a stage")
    progress.advance(0.5)
stdout_console().print("the best row", style="bold green")
"""
OPTIMIZE = ["optimize", "graph.json", "--cluster", "cluster.toml", "--budget", "20e"]
MODEL = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), torch.ones(2, 4)
"""


@pytest.fixture
def folder(files: Callable[..., tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, with graph.json, cluster.toml and a placement."""
    graph, _ = files()
    monkeypatch.chdir(graph.parent)
    assert main(OPTIMIZE) == 0
    return graph.parent


@pytest.fixture
def model(folder: Path) -> None:
    """Write model.py and placements of it, too."""
    Path("model.py").write_text(MODEL)
    for name, device in (("of_model.json", "cuda:0"), ("here.json", "cpu")):
        content = {"format": "placer-placement/1", "devices": ops_of_model(device)}
        Path(name).write_text(json.dumps(content))


def ops_of_model(device: str) -> dict[str, str]:
    from graphs.extract import extract
    from graphs.extract.placeable import call_graph
    from placer.sources.target import load_step

    extraction = extract(load_step("model.py:build", training=False))
    graph = call_graph(extraction).graph if device == "cpu" else extraction.graph
    return dict.fromkeys(graph, device)


RUNS = [
    "machine --cache",
    "machine --completion bash",
    "show placement.json",
    "show placement.json --html page.html --target graph.json --cluster cluster.toml",
    "extract graph.json",
    "extract model.py:build --inference --costs none --out extracted.json",
    "evaluate graph.json --cluster cluster.toml --placement placement.json",
    "optimize graph.json --cluster cluster.toml --budget 20e --report report.html",
    "export of_model.json model.py:build --format device-map",
    "export of_model.json model.py:build --format device-map --inference --out map.json",
    "run model.py:build --placement here.json --steps 3",
]
MEASURING = ["machine --devices core:0 --out of_here.toml"]


@pytest.mark.slow
@pytest.mark.usefixtures("model")
@pytest.mark.parametrize("runs", [RUNS, pytest.param(MEASURING, marks=pytest.mark.slow)])
def test_json_is_all_there_is_on_stdout_and_quiet_leaves_nothing_else(
    runs: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    for run in runs:
        assert main([*run.split(), "--json", "--quiet"]) == 0, run
        printed = capfd.readouterr()
        assert printed.err == "", run
        assert json.loads(printed.out), run  # a second JSON value would fail


def test_quiet_prints_the_last_line_and_no_table(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    assert main(OPTIMIZE) == 0
    loud = capfd.readouterr()
    assert re.search(r"; took .+ s; seed 0\n$", loud.err)
    assert main([*OPTIMIZE, "--quiet"]) == 0
    quiet = capfd.readouterr()
    assert quiet.err == ""
    [line] = quiet.out.splitlines()
    assert line.startswith("Best: ")
    assert " ".join(loud.out.split()).endswith(line)
    assert main(["show", "placement.json", "--quiet"]) == 0
    [line] = capfd.readouterr().out.splitlines()
    assert re.fullmatch("40 ops of graph .+, by .+, budget 20e, seed 0", line)


def test_the_ops_of_a_placement_are_counted_by_module_and_device(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(*name: str) -> dict[str, dict[str, dict[str, int]]]:
        capsys.readouterr()
        assert main(["show", "placement.json", *name, "--json"]) == 0
        content: dict[str, dict[str, dict[str, int]]] = json.loads(capsys.readouterr().out)
        return content

    devices = json.loads(Path("placement.json").read_text())["devices"]
    count = sum(map(Counter, shown()["modules"].values()), Counter[str]())
    assert count == Counter(devices.values())
    op_id, device = next(iter(devices.items()))
    assert shown(op_id) == {"name": op_id, "device": device, "devices": {device: {"forward": 1}}}
    module = next(name for name in map(module_of, devices) if name)
    by_device = shown(module)["devices"]
    assert sum(sum(by_phase.values()) for by_phase in by_device.values()) == sum(
        module_of(op) == module or module_of(op).startswith(f"{module}.") for op in devices
    )


def printed(
    command: Sequence[str], folder: Path, *, terminal: bool, environment: Mapping[str, str]
) -> str:
    """Return stdout and stderr of a command on a terminal of 100 columns or a pipe."""
    variables = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    variables |= {"TERM": "xterm-256color", "COLUMNS": "100", **environment}
    if not terminal:
        done = subprocess.run(
            command, cwd=folder, env=variables, capture_output=True, text=True, check=True
        )
        return done.stdout + done.stderr
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command, cwd=folder, env=variables, stdin=theirs, stdout=theirs, stderr=theirs
    ) as running:
        os.close(theirs)
        read = b""
        with contextlib.suppress(OSError):  # how a terminal ends
            while chunk := os.read(ours, 65536):
                read += chunk
        os.close(ours)
    assert running.returncode == 0
    return read.decode()


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("terminal", "environment", "coloured"),
    [
        (True, {}, True),
        (True, {"NO_COLOR": "1"}, False),
        (False, {}, False),
        (False, {"FORCE_COLOR": "1"}, True),
    ],
)
def test_colours_are_for_terminals_that_want_them(
    tmp_path: Path, terminal: bool, environment: dict[str, str], coloured: bool
) -> None:
    command = [sys.executable, "-c", TALK]
    text = printed(command, tmp_path, terminal=terminal, environment=environment)
    assert "the best row" in text
    assert "a stage" in text
    assert bool(COLOUR.search(text)) == coloured
    if not (terminal or environment):
        assert "\x1b" not in text


@pytest.mark.slow
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


def test_a_placement_without_recorded_times_is_shown_as_json(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads(Path("placement.json").read_text())
    Path("bare.json").write_text(json.dumps({k: content[k] for k in ("format", "devices")}))
    words = ["--target", "graph.json", "--cluster", "cluster.toml"]
    capsys.readouterr()
    assert main(["show", "bare.json", "--html", "bare.html", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step_s"] is None
    assert found["candidates"][0]["predicted_step_s"] > 0


def test_a_command_runs_with_standard_output_closed(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text('{"format": "placer-placement/1", "devices": {"a": "x"}}')
    words = [sys.executable, "-m", "placer.cli.main", "show", str(path)]
    shell = ["sh", "-c", '"$@" >&-', "sh", *words]
    assert subprocess.run(shell, stderr=subprocess.PIPE, check=True).stderr == b""


@pytest.mark.slow
def test_a_command_runs_with_standard_error_closed(folder: Path) -> None:
    words = [sys.executable, "-m", "placer.cli.main", *OPTIMIZE, "--json"]
    shown = subprocess.run(
        ["sh", "-c", '"$@" 2>&-', "sh", *words], stdout=subprocess.PIPE, check=True
    )
    assert json.loads(shown.stdout)["step_s"] > 0
