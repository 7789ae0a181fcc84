"""Output streams: results to stdout, messages to stderr, colours only to terminals."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from envs.placement import module_of
from placer.cli.commands import build_parser
from placer.cli.main import main

COLOUR = re.compile(r"\x1b\[[0-9;]*\b(3[0-7]|38|4[0-7]|48|9[0-7])[;m]")
TALK = """
import sys
from placer.report.console import stdout_console
from placer.progress import progress_for

with progress_for(sys.stderr.isatty()) as progress:
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


def commands() -> dict[str, Any]:
    [action] = [a for a in build_parser()._actions if isinstance(a.choices, dict)]
    assert isinstance(action.choices, dict)
    return action.choices


@pytest.fixture
def folder(files: Callable[..., tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with graph.json, cluster.toml, model.py and a placement of each."""
    graph, _ = files()
    monkeypatch.chdir(graph.parent)
    assert main(OPTIMIZE) == 0
    Path("model.py").write_text(MODEL)
    content = {"format": "placer-placement/1", "devices": ops_of_model("cuda:0")}
    Path("of_model.json").write_text(json.dumps(content))
    return graph.parent


def ops_of_model(device: str) -> dict[str, str]:
    from graphs.extract import extract
    from placer.sources.target import load_step

    step = load_step("model.py:build", training=False)
    return dict.fromkeys(extract(step).graph, device)


RUNS = [
    "placers",
    "cache",
    "completion bash",
    "show placement.json",
    "extract graph.json",
    "extract model.py:build --inference --costs none --out extracted.json",
    "simulate graph.json --cluster cluster.toml --placement placement.json",
    "optimize graph.json --cluster cluster.toml --budget 20e --report report.html",
    "report placement.json graph.json --cluster cluster.toml",
    "export of_model.json model.py:build --format device-map --inference",
    "export of_model.json model.py:build --format device-map --inference --out map.json",
]
MEASURING = ["devices --devices core:0 --out of_here.toml", "doctor --devices core:0"]


def test_every_command_has_json_and_quiet() -> None:
    for name, parser in commands().items():
        assert {"--json", "--quiet"} <= parser._option_string_actions.keys(), name


@pytest.mark.parametrize("runs", [RUNS, pytest.param(MEASURING, marks=pytest.mark.slow)])
def test_json_is_all_there_is_on_stdout_and_quiet_leaves_nothing_else(
    runs: list[str], folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    for run in runs:
        assert main([*run.split(), "--json", "--quiet"]) == 0, run
        told = capfd.readouterr()
        assert told.err == "", run
        assert json.loads(told.out), run  # a second JSON value would fail


def test_the_quiet_get_the_last_line_and_no_table(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    assert main(OPTIMIZE) == 0
    loud = capfd.readouterr()
    assert main([*OPTIMIZE, "--quiet"]) == 0
    quiet = capfd.readouterr()
    assert quiet.err == ""
    [line] = quiet.out.splitlines()
    assert line.startswith("Best: ")
    assert " ".join(loud.out.split()).endswith(line)


def test_how_long_it_takes_is_told_before_and_after(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    assert main([*OPTIMIZE[:-1], "0.3s"]) == 0
    first, *_, last = capfd.readouterr().err.splitlines()
    assert "0.3 s" in first
    assert re.search(r"; took .+ s: .*searching placements .+ s.*; seed 0$", last)
    assert main([*OPTIMIZE, "--json", "--quiet"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["measuring_s"] == 0
    assert found["total_s"] >= found["search_s"] > 0


def test_remarks_are_no_result(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = ["optimize", "model.py:build", "--devices", "core:0", "--inference", "--no-measure"]
    run += ["--extractor", "modules", "--budget", "5e"]
    capfd.readouterr()
    assert main(run) == 0
    assert "This is a graph of modules" in capfd.readouterr().out
    assert main([*run, "--quiet"]) == 0
    told = capfd.readouterr()
    assert told.err == ""
    assert "This is a graph of modules" not in told.out
    assert "Best: " in told.out


def test_errors_are_told_to_the_quiet_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(tmp_path / "none.json"), "--quiet", "--json"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("placer: ")
    assert told.err.count("\n") == 1


def test_the_json_of_a_placement_is_what_the_table_says(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["show", "placement.json", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    devices = json.loads(Path("placement.json").read_text())["devices"]
    counted: dict[str, int] = {}
    for count in told["modules"].values():
        for device, ops in count.items():
            counted[device] = counted.get(device, 0) + ops
    assert counted == {name: [*devices.values()].count(name) for name in set(devices.values())}
    op_id, device = next(iter(devices.items()))
    assert main(["show", "placement.json", op_id, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["name"], told["device"], list(told["devices"])) == (op_id, device, [device])
    module = next(name for name in map(module_of, devices) if name)
    assert main(["show", "placement.json", module, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert sum(count for own in told["devices"].values() for count in own.values()) == sum(
        module_of(op) == module or module_of(op).startswith(f"{module}.") for op in devices
    )
    assert main(["show", "placement.json", module]) == 0
    assert capsys.readouterr().out.startswith(f"{module}: ")


def test_rates_that_are_not_finite_are_null(tmp_path: Path) -> None:
    from envs.hardware.cluster import Cluster, Device, Link
    from placer.cli.devices import cluster_to_dict

    found = cluster_to_dict(
        Cluster(
            name="free",
            devices=tuple(Device(name=n, kind="k", memory_bytes=1) for n in "ab"),
            links=(Link(between=("a", "b"), latency_s=0.0, bandwidth_bytes_per_s=float("inf")),),
        )
    )
    json.dumps(found, allow_nan=False)
    assert found["links"][0]["bandwidth_bytes_per_s"] is None
    assert found["devices"][0]["peak_flop_per_s"] is None
    assert found["devices"][0]["memory_bytes"] == 1


def printed(
    command: Sequence[str], folder: Path, *, terminal: bool, environment: Mapping[str, str]
) -> str:
    """Return stdout and stderr of a command on a terminal of 100 columns or a pipe."""
    given = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    given |= {"TERM": "xterm-256color", "COLUMNS": "100", **environment}
    if not terminal:
        done = subprocess.run(
            command, cwd=folder, env=given, capture_output=True, text=True, check=True
        )
        return done.stdout + done.stderr
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command, cwd=folder, env=given, stdin=theirs, stdout=theirs, stderr=theirs
    ) as running:
        os.close(theirs)
        read = b""
        with contextlib.suppress(OSError):  # how a terminal ends
            while chunk := os.read(ours, 65536):
                read += chunk
        os.close(ours)
    assert running.returncode == 0
    return read.decode()


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
def test_a_terminal_of_eighty_columns_shows_bars_and_the_result(
    files: Callable[..., tuple[Path, Path]],
) -> None:
    graph, _ = files()
    command = [sys.executable, "-m", "placer.cli.main", *OPTIMIZE[:-1], "2s"]
    text = printed(command, graph.parent, terminal=True, environment={"COLUMNS": "80"})
    assert "\u2501" * 20 in text  # a full bar
    assert "Best: " in text
    assert COLOUR.search(text)
