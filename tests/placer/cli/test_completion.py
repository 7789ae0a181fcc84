"""Completion scripts: executed by bash; for zsh and fish only the syntax is checked."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from placer.cli.completion import PLACES, completion_script
from placer.cli.main import build_parser, main
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
    path.write_text(completion_script(build_parser(), "bash"))
    return path


def completions(script: Path, folder: Path, *words: str) -> set[str]:
    """Return bash's completions of the last word; the function is found as in a user's shell."""
    complete = ["bash", "-c", f"source {shlex.quote(str(script))}; complete -p placer"]
    answer = subprocess.run(complete, capture_output=True, text=True, check=True).stdout.split()
    ask = ASK.format(
        script=shlex.quote(str(script)),
        words=shlex.join(words),
        function=answer[answer.index("-F") + 1],
    )
    done = subprocess.run(
        ["bash", "-c", ask], cwd=folder, capture_output=True, text=True, check=True
    )
    assert "syntax error" not in done.stderr
    return set(done.stdout.split())


def test_bash_completes_commands_and_options(script: Path, tmp_path: Path) -> None:
    commands = {"optimize", "extract", "evaluate", "export", "run", "show", "train", "machine"}
    assert completions(script, tmp_path, "placer", "") == commands
    options = completions(script, tmp_path, "placer", "evaluate", "graph.json", "--")
    assert {"--cluster", "--placement", "--micro-batches", "--json", "--quiet"} <= options
    assert "--budget" not in options


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["optimize", "m.py:f", "--objective", ""], {"latency", "throughput", "max-load"}),
        (["optimize", "m.py:f", "--json", "--placer", ""], {item.name for item in listings()}),
        (["machine", "--completion", ""], set(PLACES)),
        (["optimize", "mo"], {"model.py", "models"}),
        (["optimize", "m.py:f", "--objective", "latency", "--out", "mo"], {"model.py", "models"}),
    ],
)
def test_bash_completes_choices_and_files(
    script: Path, tmp_path: Path, words: list[str], expected: set[str]
) -> None:
    (tmp_path / "model.py").touch()
    (tmp_path / "models").mkdir()
    assert expected <= completions(script, tmp_path, "placer", *words)


@pytest.mark.parametrize("shell", PLACES)
def test_the_command_prints_a_script_for_every_shell(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["machine", "--completion", shell, "--json"]) == 0
    script = json.loads(capsys.readouterr().out)["script"]
    for word in ("evaluate", "max-load", "single-device", "generalist"):
        assert word in script
    if shutil.which(shell) is not None:
        path = tmp_path / "script"
        path.write_text(script)
        subprocess.run([shell, "-n", str(path)], check=True, capture_output=True)
