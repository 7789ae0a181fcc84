"""Arguments that the command line refuses: one sentence, exit code 2, before any work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from placer.cli.main import main

Files = Callable[..., tuple[Path, Path]]

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


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("modle.py:build", "modle.py; did you mean model.py?"),
        ("model.py:biuld", "did you mean build?"),
        ("model", "path/to/model.py:function"),
        ("net.py", "did you mean {dir}/net.py:build?"),
        ("model.py:nonsense", "must return (model, inputs)"),
        ("model.py:broken", "no such data set"),
        ("model.py:leaves", "model.py:leaves called sys.exit(3)"),
        ("script.py:build", "script.py called sys.exit()"),
        ("model.py:no_loss", "scalar loss"),
    ],
)
def test_bad_targets_get_a_sentence(
    target: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "script.py").write_text("import sys\nsys.exit()\n")
    (tmp_path / "net.py").write_text(NET)
    arguments = ["optimize", f"{tmp_path}/{target}", "--out", str(tmp_path / "p.json")]
    assert main([*arguments, "--devices", "core:0"]) == 2
    error = capsys.readouterr().err
    assert words.format(dir=tmp_path) in error
    assert "Traceback" not in error
    assert not (tmp_path / "p.json").exists()


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("optimize never/loaded.py:f --devices core:0,core:0", "overlap in core 0"),
        ("optimize never/loaded.py:f --devices core:0-1,core:0", "core:0 and core:0-1 overlap"),
        ("optimize never/loaded.py:f --devices core:5-3", "write the lower core first"),
        ("optimize never/loaded.py:f --devices core:0-1-1", "there is no device 'core:0-1-1'"),
        ("optimize never/loaded.py:f --devices core:0+0", "core:0+0 names a core twice"),
        ("optimize never/loaded.py:f --devices n1:core:0-1", "no device 'n1:core:0-1'"),
        ("optimize never/loaded.py:f --devices core:0 --cluster c.toml", "give --devices"),
        ("optimize never/loaded.py:f --memory core:0=1GB --cluster c.toml", "file has devices"),
        ("optimize never/loaded.py:f --budget fast", "20s"),
        ("optimize never/loaded.py:f --report no_folder/loaded.html", "no folder"),
        ("optimize never/loaded.py:f --policy generalissimo", "generalist"),
        ("optimize never/loaded.py:f --pin x=a --pin x=b", "is given with a and with b"),
        ("optimize never/loaded.py:f --inference --optimizer sgd", "has no gradients for"),
        ("optimize {graph} --cluster {cluster} --inference", "--inference can only be given"),
        ("optimize {graph} --cluster {cluster} --no-measure", "--no-measure can only be given"),
        ("optimize never/loaded.py:f --no-measure --measure-budget 5s", "nothing is run with"),
        ("optimize never/loaded.py:f --measure-budget 50e", "runs take wall time"),
        ("optimize {graph} --cluster {cluster} --extractor export", "--extractor can only"),
        ("optimize {graph} --cluster {cluster} --dtype bf16", "--dtype can only be given"),
        ("optimize {graph}", "give --cluster"),
        ("optimize {graph} --cluster {cluster} --out {graph}", "are the same file"),
        ("optimize {graph} --cluster {cluster} --pin op3=c", "pinned to 'c'"),
        ("optimize never/loaded.py:f --devices core0", "did you mean core:0?"),
        ("optimize never/loaded.py:f --devices gpu:1", "did you mean cuda:1?"),
        ("optimize never/loaded.py:f --devices core:0 --memory core:o=1GB", "mean core:0?"),
        ("optimize {graph} --cluster {graph}", "not TOML: "),
        ("evaluate {graph} --cluster {cluster} --placement {graph}", "'placer-placement/1'"),
        ("optimize {graph} --cluster {cluster} --data-parallel 3", "need a device each"),
        (
            "optimize {graph} --cluster {cluster} --data-parallel 2,batch=global,samples=3",
            "3 samples cannot be cut into 2 equal parts",
        ),
        ("optimize {graph} --cluster {cluster} --pin nothing=a", "'nothing' matches no op"),
        ("optimize {graph} --cluster {cluster} --keep-together nothing", "'nothing' matches no"),
        ("optimize {graph} --cluster {cluster} --pin *=a --pin ?*=b", "overlap"),
        ("extract {graph} --summary --costs measured", "extracted already"),
        ("extract {graph} --summary --optimizer sgd", "--optimizer can only be given for"),
        ("extract {graph}", "give --out graph.json, --summary or --json"),
        ("extract x.py:f --summary --costs none --devices core:0", "--costs none contradicts"),
        ("extract x.py:f --summary --cluster {cluster}", "peak_flop_per_s = "),
        ("evaluate {graph} --placement p.json", "give --cluster"),
        ("evaluate {graph} --cluster {cluster} --placement p.json --backend measured", "p.json"),
        ("export p.json {graph} --format pipeline", "a graph file has no modules"),
        ("run x.py:f --placement p.json --steps 1", "there is no file p.json"),
        ("show p.json --target {graph}", "give --html"),
        ("show grph.json", "there is no file grph.json; did you mean graph.json?"),
        ("show .", ".: is a directory"),
        ("optimize grph.json --cluster {cluster}", "no file grph.json; did you mean graph.json?"),
        ("optimize none.py:build", "there is no file none.py"),
        ("optimize none.onnx?batch=2 --inference", "there is no file none.onnx"),
        ("optimize {graph} --cluster clutser.toml", "did you mean cluster.toml?"),
        ("train", "give --out"),
        ("train --out x --policy generalist", "--policy needs --evaluate"),
        ("train --evaluate families", "takes --policy NAME"),
        ("train --out x --target m.py:f", "--target needs --backend measured"),
        ("train --evaluate small --policy p --first-seed 2", "--first-seed is for training"),
        ("machine --cache --out x.toml", "--out has no effect beside --cache"),
        ("machine --cache --clear-cache", "--cache has no effect beside --clear-cache"),
        ("machine --completion bash --out x.toml", "--out has no effect beside --completion"),
        ("export p.json x.py:f --format pipeline --main-device cpu", "is for device-map"),
        ("export p.json x.py:f --format pipeline --out x.py", "target are the same file"),
        ("export p.json x.onnx?n=2 --format pipeline --out x.onnx", "target are the same file"),
    ],
)
def test_options_that_cannot_be_used_are_refused_before_any_work(
    command: str,
    words: str,
    files: Files,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert words in refusal(command, 2, files, monkeypatch, capsys)


def test_an_input_whose_name_contains_a_colon_is_not_replaced(
    files: Files,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for target in ("a:1.json", "a:1.pt2", "a:1.onnx"):
        (tmp_path / target).write_text("its content")
        command = f"export p.json {target} --format pipeline --out {target}"
        assert "target are the same file" in refusal(command, 2, files, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ("core:999", "may run on cores"),
        ("core:0-65000", "no device core:0-65000"),
        ("cuda:999", "no device cuda:999"),
        ("cpu --memory cpu=900TiB", "cpu cannot have 989560464998400 bytes of memory"),
    ],
)
def test_what_this_machine_lacks_ends_a_right_command_before_any_work(
    devices: str,
    words: str,
    files: Files,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = f"optimize never/loaded.py:f --devices {devices}"
    assert words in refusal(command, 1, files, monkeypatch, capsys)


def refusal(
    command: str,
    code: int,
    files: Files,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> str:
    """Return what a command prints that ends with this exit code and leaves all files alone."""
    graph, cluster = files()
    monkeypatch.chdir(graph.parent)
    before = {path.name: path.read_bytes() for path in Path().iterdir()}
    filled = [word.format(graph=graph, cluster=cluster) for word in command.split()]
    filled += ["--out", "p.json"] if filled[0] == "optimize" and "--out" not in filled else []
    assert main(filled) == code
    error = capsys.readouterr().err
    assert "never/loaded.py" not in error
    assert "Errno" not in error
    assert {path.name: path.read_bytes() for path in Path().iterdir()} == before
    return error


@pytest.mark.parametrize(
    "command",
    [
        "optimize {graph} --cluster none.toml",
        "optimize {graph} --cluster {cluster} --objective latncy",
        "extract none.py:build --costs none",
        "evaluate {graph} --cluster {cluster} --placement {graph}",
        "export {graph} none.py:build --format pipeline",
        "show {graph}",
        "run none.py:build --placement {graph} --steps 1",
        "train --evaluate none --policy generalist",
        "machine --devices core:0,core:0",
    ],
)
def test_after_an_error_there_is_no_json(
    command: str, files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph, cluster = files()
    words = [word.format(graph=graph, cluster=cluster) for word in command.split()]
    words += ["--out", str(tmp_path / "out.json")] if words[0] == "optimize" else []
    try:
        code = main([*words, "--json"])
    except SystemExit as stopped:  # of argparse
        code = cast(int, stopped.code)
    printed = capsys.readouterr()
    assert code == 2
    assert printed.out == ""
    assert "error" in printed.err or "placer: " in printed.err


CLUSTER = """
format = "placer-cluster/1"
device = [
    {{name = "{one}", kind = "cpu", memory_bytes = 1}},
    {{name = "{other}", kind = "cpu", memory_bytes = 1}},
]
host = [{hosts}]
"""


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("one", "other", "hosts", "words"),
    [
        ("core:0-1", "core:0", "", "devices core:0 and core:0-1 overlap in core 0"),
        ("n1:core:0-3", "n1:core:2", "", "devices n1:core:0-3 and n1:core:2 overlap in core 2"),
        ("n1:core:5-3", "n1:core:0", "", "device n1:core:5-3 is empty"),
        ("core:0+0", "core:1", "", "device core:0+0 names a core twice"),
        ("core:0-1-1", "core:2", "", "there is no device 'core:0-1-1'"),
        ("cuda:0", "cpu", '{devices = ["cpx"]}', "names device 'cpx'; there are cuda:0, cpu"),
        ("cuda:0", "cpu", '{devices = ["cpu", "cpu"]}', "name device 'cpu' 2 times"),
        ("cuda:0", "cpu", "{devices = []}", "a host names no devices"),
        ("cuda:0", "cpu", '{devices = "cpu"}', "host[0].devices is 'cpu', not a list"),
        ("n1:core:0", "cpu", '{devices = ["n1:core:0"]}', "leave cores out of [[host]]"),
    ],
)
def test_bad_sets_and_hosts_of_clusters_are_refused(
    one: str,
    other: str,
    hosts: str,
    words: str,
    files: Files,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    graph, cluster = files()
    cluster.write_text(CLUSTER.format(one=one, other=other, hosts=hosts))
    out = str(tmp_path / "p.json")
    assert main(["optimize", str(graph), "--cluster", str(cluster), "--out", out]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"placer: {cluster}: ")
    assert words in error


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"devices": {"a": "core:0-1", "b": "core:0"}}, "core:0 and core:0-1 overlap in core 0"),
        ({"devices": {"a": "core:5-3"}}, "device core:5-3 is empty"),
        ({"devices": {"a": "core:0"}, "device_order": ["core:0", "core:0-1"]}, "overlap in core 0"),
        (
            {"devices": {"a": "core:0"}, "replicas": {"groups": [["core:0"], ["core:0-1"]]}},
            "core:0",
        ),
        ({"devices": {"a": "core:0"}, "replicas": {"groups": [[]]}}, "groups of equally many"),
    ],
)
def test_bad_sets_of_placements_are_refused(
    content: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "placement.json"
    file.write_text(json.dumps({"format": "placer-placement/1"} | content))
    for command in (
        ["show", str(file)],
        ["run", "never/loaded.py:f", "--placement", str(file), "--steps", "1"],
    ):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"placer: {file}: ")
        assert words in error


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"": "core:0"}, "a device map has no micro-batches"),
        ({"format": "placer-placement/1", "devices": {"a": "core:0"}}, "whole steps are run"),
    ],
)
def test_micro_batches_that_would_not_be_run_are_refused_before_any_work(
    content: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "placement.json"
    file.write_text(json.dumps(content))
    command = ["evaluate", "never/loaded.py:f", "--placement", str(file), "--micro-batches", "2"]
    assert main(command) == 2
    assert words in capsys.readouterr().err


def test_a_placement_of_another_graph_is_refused(
    files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph, cluster = files()
    out = tmp_path / "placement.json"
    arguments = [str(graph), "--cluster", str(cluster)]
    assert main(["optimize", *arguments, "--budget", "50e", "--out", str(out)]) == 0
    placement = json.loads(out.read_text())
    out.write_text(json.dumps(placement | {"graph": "0" * 64}))
    capsys.readouterr()
    assert main(["evaluate", *arguments, "--placement", str(out)]) == 2
    assert "made for graph 000000000000" in capsys.readouterr().err
    assert main(["show", str(out), "no.such.module"]) == 2
    assert "no.such.module" in capsys.readouterr().err
