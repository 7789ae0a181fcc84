"""Options: their values, and mistyped ones."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from envs.replication import Replication
from placer.cli.export import renamings
from placer.cli.main import build_parser, main
from placer.cli.optimize import replication
from placer.cli.run import sync_overrides

HEAVY = ("torch", "numpy", "networkx", "gymnasium", "numba", "rich")


def test_the_module_that_torchrun_starts_is_the_command_run() -> None:
    command = [sys.executable, "-m", "placer.run", "--help"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert printed.startswith("usage: placer run ")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from placer.cli.main import build_parser, main\n"
        "build_parser().format_help()\n"
        "try: main(['run', '--help'])\n"
        "except SystemExit: pass\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert out.splitlines()[-1] == "[]"


def test_devices_are_renamed_once_each() -> None:
    assert renamings("core:0=cuda:0,core:1=cpu") == {"core:0": "cuda:0", "core:1": "cpu"}
    with pytest.raises(argparse.ArgumentTypeError, match="renames a device twice"):
        renamings("core:0=cuda:0,core:0=cpu")


def test_memory_limits_of_several_options_add_up() -> None:
    words = ["optimize", "m.py:f", "--memory", "core:0=1kB", "--memory", "core:1=2kB,core:0=1kB"]
    assert build_parser().parse_args(words).memory == {"core:0": 1000, "core:1": 2000}
    assert build_parser().parse_args(["optimize", "m.py:f"]).memory == {}


def test_settings_of_replicas_are_fields_of_a_replication() -> None:
    assert replication("auto") == Replication()
    text = "4,batch=global,payload=fp16,accumulate=2,coding-bytes-per-s=1e12"
    assert replication(text) == Replication(
        replicas=4, batch="global", payload="fp16", accumulate=2, coding_bytes_per_s=1e12
    )


def test_settings_of_a_method_override_its_defaults() -> None:
    assert sync_overrides("bmuf,period=16,block-momentum=0.9") == {
        "method": "bmuf",
        "period": 16,
        "block_momentum": 0.9,
    }
    assert sync_overrides("hierarchical,levels=4x2")["levels"] == (4, 2)
    assert sync_overrides("accumulate=2") == {"accumulate": 2}


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("optimize m.py:f --data-parallel 2,bacth=global", "did you mean batch?"),
        ("optimize m.py:f --data-parallel 2,batch", "batch has no value: write batch=VALUE"),
        ("optimize m.py:f --data-parallel 2,accumulate=", "accumulate has no value"),
        ("train --out ./", "'./' is a folder: add the name of the policy, as in mine"),
        ("train --out none/", "'none/' is a folder: add the name of the policy, as in none/mine"),
        ("train --out /dev", "'/dev' is a folder"),
        ("", "usage: placer "),
        ("optimize m.py:f --data-parallel 2,groups=4", "there is no setting 'groups'"),
        ("optimize m.py:f --data-parallel 2,accumulate=x", "accumulate is 'x', not a number"),
        ("optimize m.py:f --data-parallel 2,samples=4,samples=8", "samples is set twice"),
        ("optimize m.py:f --memory core:0=1GB --memory core:0=2GB", "core:0 is given twice"),
        ("optimize m.py:f --data-parallel many", "'many' is not a whole number"),
        ("optimize m.py:f --data-parallel 2,average-every=4,payload=1-bit", "full precision"),
        ("run m.py:f --placement p --steps 1 --sync fp16,period=4", "takes no period"),
        ("run m.py:f --placement p --steps 1 --sync bmuff", "did you mean bmuf"),
        ("optimize m.py:f --pin =core:0", "NAME=DEVICE"),
        ("extract m.py:f --dtype fp16", "not for CPUs"),
        ("optimize m.py:f --memory core:0=much", "much"),
        ("optimize m.py:f --seed=-1", "'-1' is no seed"),
        (f"train --out=x --first-seed={2**32}", f"'{2**32}' is no seed"),
        ("evaluate g.json --placement p --micro-batches 0", "'0' is not a whole number"),
        ("optimize g.json --objective latncy", "did you mean latency?"),
        ("optimize m.py:f --data-parallel 2,reduction=rign", "did you mean ring?"),
        ("optimize m.py:f --data-parallel 2,payload=fp61", "did you mean fp16?"),
    ],
)
def test_a_value_that_means_nothing_is_refused(
    option: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(option.split())
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["optimize", "m.py:f", "--devices", ""], "--devices"),
        (["optimize", "m.py:f", "--devices="], "--devices"),
        (["optimize", "m.py:f", "--devices", " "], "--devices"),
        (["optimize", "m.py:f", "--out", ""], "--out"),
        (["optimize", "m.py:f", "--pin", ""], "--pin"),
        (["optimize", "m.py:f", "--keep-together", ""], "--keep-together"),
        (["optimize", "m.py:f", "--policy", ""], "--policy"),
        (["extract", "m.py:f", "--summary", "--devices", ""], "--devices"),
        (["evaluate", "m.py:f", "--placement", "p.json", "--devices", ""], "--devices"),
        (["machine", "--devices", ""], "--devices"),
        (["machine", "--clear-cache", ""], "--clear-cache"),
        (["train", "--out", "x", "--families", "layered", ""], "--families"),
    ],
)
def test_an_empty_value_is_not_the_default(
    words: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    error, _ = capsys.readouterr().err.splitlines()
    assert f"argument {option}: the value is empty: give one, or leave it out" in error


@pytest.mark.parametrize("command", ["optimize m.py:f", "train --out x"])
def test_workers_are_a_number_or_a_cluster(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = build_parser()
    for value in ("ray", "ray://node:6379"):
        assert parser.parse_args([*command.split(), "--workers", value]).workers == value
    assert parser.parse_args([*command.split(), "--workers", "3"]).workers == 3
    for wrong, reason in (("0", "from 1"), ("rays", "'ray'"), ("ray://node", "'ray'")):
        with pytest.raises(SystemExit):
            parser.parse_args([*command.split(), "--workers", wrong])
        assert reason in capsys.readouterr().err


def test_an_option_without_its_optional_value_has_no_empty_one() -> None:
    parsed = build_parser().parse_args(["machine", "--clear-cache"])
    assert parsed.clear_cache


@pytest.mark.parametrize(
    ("program", "words", "text"),
    [
        ("placer optimize", "m.py:f --raport r.html", "did you mean --report?"),
        ("placer optimize", "--bugdet 5s", "did you mean --budget?"),  # and no target
        ("placer show", "p.json embed -q", "unrecognized arguments: -q"),
        ("placer", "optimise m.py:f", "did you mean optimize?"),
        ("placer", "--vresion", "did you mean --version?"),
        ("placer", "--budget 5s optimize m.py:f", "options follow the name of their command"),
    ],
)
def test_a_mistyped_word_is_named_with_the_one_that_is_meant(
    program: str, words: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(f"{program} {words}".split()[1:])
    assert stopped.value.code == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith(f"{program}: error: ")
    assert error.endswith(text)
    assert hint == f"see {program} --help"


def test_words_behind_two_dashes_are_no_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--", "--raport"]) == 2
    assert "there is no file --raport" in capsys.readouterr().err
