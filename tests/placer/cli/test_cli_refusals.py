"""Arguments that the command line refuses: one sentence, exit code 2, before any work."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from placer.cli.main import main
from tests.helpers.tiny_cluster import CLUSTER

MODEL = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Linear(4, 4), (torch.randn(2, 4), torch.randn(2, 4)), nn.functional.mse_loss

def no_loss():
    return nn.Linear(4, 4), torch.randn(2, 4)

def nonsense():
    return 7

def broken():
    raise RuntimeError("no such data set")

def leaves():
    raise SystemExit(3)
"""

NET = """
raise RuntimeError("only read, not run")

def tower(width):
    return width

def _hidden():
    return 1

def main():
    print(build())

def build(seed=0):
    return tower(7), seed
"""


@pytest.mark.parametrize(
    ("target", "code", "words"),
    [
        ("{dir}/modle.py:build", 2, ["no file", "did you mean", "model.py"]),
        ("{dir}/model.py:biuld", 2, ["no function 'biuld'", "did you mean build?"]),
        ("model", 2, ["path/to/model.py:function"]),
        ("{dir}/net.py", 2, ["says no function", "did you mean {dir}/net.py:build?"]),
        ("{dir}/model.py:nonsense", 2, ["must return (model, inputs)", "int"]),
        ("{dir}/model.py:broken", 2, ["no such data set"]),
        ("{dir}/model.py:leaves", 2, ["model.py:leaves called sys.exit(3)"]),
        ("{dir}/script.py:build", 2, ["script.py called sys.exit()", "__main__"]),
        ("{dir}/model.py:no_loss", 1, ["scalar loss", "(2, 4)"]),
    ],
)
def test_bad_targets_get_a_sentence(
    target: str, code: int, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "script.py").write_text("import sys\nsys.exit()\n")
    (tmp_path / "net.py").write_text(NET)
    arguments = ["optimize", target.format(dir=tmp_path), "--out", str(tmp_path / "p.json")]
    assert main([*arguments, "--devices", "core:0"]) == code
    told = capsys.readouterr().err
    for word in words:
        assert word.format(dir=tmp_path) in told
    assert "Traceback" not in told
    assert not (tmp_path / "p.json").exists()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--devices", "core:999"], ["core:999", "may run on cores"]),
        (["--devices", "cuda:0"], ["cuda:0"]),
        (["--budget", "fast"], ["fast", "20s"]),
        (["--cluster", "no.toml"], ["there is no file no.toml"]),
        (["--timeline", "never/loaded.py"], ["no folder"]),
        (["--out", "/dev/null"], ["/dev/null cannot be written", "no regular file"]),
        (["--out", "/no/such/folder/p.json"], ["cannot be written", "/no/such/folder"]),
        (["--out", "/proc/p.json"], ["cannot be written", "/proc/p.json"]),
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
    assert "never/loaded.py:build" not in told
    assert "Errno" not in told


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["gpu9", "core:0"], ["no device 'gpu9'", "core:N"]),
        (["core:0", "core:0-0"], ["overlap in core 0"]),
    ],
)
def test_a_model_cannot_be_placed_on_devices_that_are_not_here(
    names: list[str], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = tmp_path / "cluster.toml"
    text = CLUSTER.format(memory=1)
    for old, new in zip("ab", names, strict=True):
        text = text.replace(f'"{old}"', f'"{new}"')
    cluster.write_text(text)
    arguments = ["optimize", "never/loaded.py:build", "--cluster", str(cluster)]
    assert main([*arguments, "--out", str(tmp_path / "p.json")]) == 2
    told = capsys.readouterr().err
    for word in [*words, str(cluster)]:
        assert word in told
    assert "never/loaded" not in told


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        (["--out", "same.json", "--timeline", "./same.json"], ["--timeline and --out"]),
        (["--out", "link.json"], ["--out and target", "link.json"]),
        (["--timeline", "cluster.toml"], ["--timeline and --cluster"]),
    ],
)
def test_results_never_replace_each_other_or_what_was_given(
    outputs: list[str],
    words: list[str],
    files: Callable[..., tuple[Path, Path]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    graph, cluster = files()
    monkeypatch.chdir(graph.parent)
    Path("link.json").symlink_to(graph)
    before = graph.read_text(), cluster.read_text()
    assert main(["optimize", "graph.json", "--cluster", "cluster.toml", *outputs]) == 2
    told = capsys.readouterr().err
    for word in words:
        assert word in told
    assert (graph.read_text(), cluster.read_text()) == before


def test_a_pipe_is_no_place_for_results(
    files: Callable[..., tuple[Path, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph, cluster = files()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert main(["optimize", str(graph), "--cluster", str(cluster), "--out", str(pipe)]) == 2
    assert "no regular file" in capsys.readouterr().err
    assert pipe.is_fifo()


@pytest.mark.parametrize(
    "options",
    ["--inference", "--fresh", "--no-measure", "--extractor export", "--dtype bf16"],
)
def test_options_of_models_are_refused_for_a_graph_file(
    options: str,
    files: Callable[..., tuple[Path, Path]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    graph, cluster = files()
    out = tmp_path / "p.json"
    arguments = ["optimize", str(graph), "--cluster", str(cluster), "--out", str(out)]
    assert main([*arguments, *options.split()]) == 2
    told = capsys.readouterr().err
    assert options.split(maxsplit=1)[0] in told
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("optimize m.py:f --raport r.html", "did you mean --report?"),
        ("optimize --bugdet 5s", "did you mean --budget?"),  # and no target
        ("show p.json embed -q", "unrecognized arguments: -q"),
    ],
)
def test_a_mistyped_option_is_told_by_its_own_command(
    words: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = words.partition(" ")[0]
    with pytest.raises(SystemExit) as stopped:
        main(words.split())
    assert stopped.value.code == 2
    what, where = capsys.readouterr().err.splitlines()
    assert what.startswith(f"placer {command}: error: ")
    assert what.endswith(told)
    assert where == f"see placer {command} --help"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("optimise m.py:f", "did you mean optimize?"),
        ("--vresion", "did you mean --version?"),
        ("--budget 5s optimize m.py:f", "placer optimize --budget"),
    ],
)
def test_a_mistyped_command_is_told_with_the_one_that_is_meant(
    words: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words.split())
    assert stopped.value.code == 2
    what, where = capsys.readouterr().err.splitlines()
    assert told in what
    assert where == "see placer --help"


def test_without_a_command_the_usage_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("usage: placer ")


def test_options_of_every_command_may_stand_before_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quiet", "--json", "placers"]) == 0
    first = capsys.readouterr().out
    assert main(["placers", "--quiet", "--json"]) == 0
    assert first == capsys.readouterr().out
    assert json.loads(first)


def test_what_stands_behind_two_dashes_is_no_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--", "--raport"]) == 2
    assert "there is no file --raport" in capsys.readouterr().err


@pytest.mark.parametrize("seed", ["-1", str(2**32)])
@pytest.mark.parametrize(
    "command",
    [["optimize", "never/loaded.py:build", "--seed"], ["train", "--out=x", "--first-seed"]],
)
def test_a_seed_is_a_whole_number_that_every_generator_takes(
    command: list[str], seed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*command[:-1], f"{command[-1]}={seed}"])
    assert stopped.value.code == 2
    assert f"'{seed}' is no seed" in capsys.readouterr().err


def test_a_file_that_is_missing_is_told_with_its_neighbour(
    files: Callable[..., tuple[Path, Path]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    graph, cluster = files()
    monkeypatch.chdir(graph.parent)
    meant = "; did you mean graph.json?"
    for arguments, told in (
        (["show", "grph.json"], f"there is no file grph.json{meant}"),
        (["show", "."], ".: is a directory"),
        (["optimize", "grph.json", "--cluster", cluster.name], f"no file grph.json{meant}"),
        (["optimize", "none.py:build"], "there is no file none.py"),
        (["optimize", "none.onnx?batch=2", "--inference"], "there is no file none.onnx"),
        (
            ["optimize", graph.name, "--cluster", "clutser.toml"],
            "no file clutser.toml; did you mean cluster.toml?",
        ),
    ):
        assert main(arguments) == 2
        message = capsys.readouterr().err
        assert told in message
        assert "Errno" not in message
        assert "This takes" not in message  # it has no options


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{}", "the file lacks format, devices"),
        (
            '{"format": "placer-placement/1", "devices": {"a": "x"}, "predicted": {"step_s": "1"}}',
            "predicted.step_s is '1', not a number",
        ),
        ('{"format": "placer-placement/1", "devices": {}}', "at least one op"),
    ],
)
def test_what_is_no_placement_is_not_shown(
    content: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.json"
    path.write_text(content)
    assert main(["show", str(path)]) == 2
    told = capsys.readouterr()
    assert f"{path}: " in told.err
    assert words in told.err
    assert told.out == ""


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
