"""Completion scripts: executed by bash; for zsh and fish only the syntax is checked."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from placer.cli.commands import COMMANDS, build_parser
from placer.cli.completion import SHELLS, completion_script
from placer.cli.main import main
from placer.search.registry import listings

ASK = """
source {script}
COMP_WORDS=({words})
COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
{function}
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "placer.bash"
    path.write_text(completion_script("bash"))
    return path


def completions(script: Path, folder: Path, *words: str) -> set[str]:
    """Return bash's completions of the last word; the function is found as in a user's shell."""
    told = ["bash", "-c", f"source {shlex.quote(str(script))}; complete -p placer"]
    said = subprocess.run(told, capture_output=True, text=True, check=True).stdout.split()
    ask = ASK.format(
        script=shlex.quote(str(script)),
        words=shlex.join(words),
        function=said[said.index("-F") + 1],
    )
    done = subprocess.run(
        ["bash", "-c", ask], cwd=folder, capture_output=True, text=True, check=True
    )
    assert "syntax error" not in done.stderr
    return set(done.stdout.split())


def test_bash_completes_every_command(script: Path, tmp_path: Path) -> None:
    found = completions(script, tmp_path, "placer", "")
    assert found == {module.__name__.rpartition(".")[2].replace("_", "-") for module in COMMANDS}
    assert completions(script, tmp_path, "placer", "opt") == {"optimize"}


def test_bash_completes_the_options_of_a_command(script: Path, tmp_path: Path) -> None:
    found = completions(script, tmp_path, "placer", "simulate", "graph.json", "--")
    assert {"--cluster", "--placement", "--micro-batches", "--json", "--quiet"} <= found
    assert "--budget" not in found


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["optimize", "m.py:f", "--objective"], {"latency", "throughput", "max-load"}),
        (["optimize", "m.py:f", "--json", "--placer"], {item.name for item in listings()}),
        (["export", "p.json", "m.py:f", "--quiet", "--reduction"], set()),
        (["completion"], set(SHELLS)),
    ],
)
def test_bash_completes_choices(
    script: Path, tmp_path: Path, words: list[str], expected: set[str]
) -> None:
    assert completions(script, tmp_path, "placer", *words, "") == expected


@pytest.mark.parametrize(
    "words", [["optimize"], ["optimize", "m.py:f", "--objective", "latency", "--out"]]
)
def test_bash_completes_files(script: Path, tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "model.py").touch()
    (tmp_path / "models").mkdir()
    assert completions(script, tmp_path, "placer", *words, "mo") == {"model.py", "models"}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_of_every_shell_knows_commands_choices_and_placers(
    shell: str, tmp_path: Path
) -> None:
    script = completion_script(shell)
    for word in ("evaluate-policy", "max-load", "single-device", "generalist"):
        assert word in script
    if shutil.which(shell) is not None:
        path = tmp_path / "script"
        path.write_text(script)
        subprocess.run([shell, "-n", str(path)], check=True, capture_output=True)


def test_the_command_prints_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == completion_script("bash")
    assert main(["completion", "fish", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["shell"] == "fish"


def test_a_script_leaves_the_command_line_as_it_was() -> None:
    completion_script("bash")
    parsed = build_parser().parse_args(["optimize", "graph.json", "--placer", "of-a-plug-in"])
    assert parsed.placer == "of-a-plug-in"
