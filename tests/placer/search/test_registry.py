"""Placers by name: built-in ones, plug-ins, and the commands that use them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import placer
from placer.cli.main import main
from placer.policies import load
from placer.search import registry
from placer.search.heuristics import RoundRobin
from placer.search.registry import listings, placer_named
from placer.search.request import LATENCY, STEP_OBJECTIVES
from tests.helpers.replica_plans import rated

NAMES = [listing.name for listing in registry.BUILT_IN]
Files = Callable[..., tuple[Path, Path]]


@pytest.fixture
def command(files: Files, tmp_path: Path) -> list[str]:
    """Return a command that places a small graph with a small budget."""
    graph, cluster = map(str, files())
    arguments = ["optimize", graph, "--cluster", cluster, "--budget", "20e"]
    return [*arguments, "--out", str(tmp_path / "placement.json")]


def test_a_missing_module_is_refused_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "placer.search.exact", raising=False)
    monkeypatch.setitem(sys.modules, "ortools", None)
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(ValueError, match=r"needs ortools: pip install 'device-placer\[bench\]'"):
        placer_named("exact")


def plugged(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    points = [EntryPoint(name, value, registry.GROUP) for name, value in values.items()]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)


def test_a_plug_in_is_listed_and_used_but_replaces_nothing(
    monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    plugged(monkeypatch, mine=f"{__name__}:RoundRobin", heft=f"{__name__}:RoundRobin")
    monkeypatch.setattr(registry, "_REGISTERED", {})
    assert [listing.name for listing in listings()] == [*NAMES, "mine"]
    assert type(placer_named("mine")) is RoundRobin
    assert type(placer_named("heft")) is not RoundRobin
    assert main([*command, "--placer", "mine"]) == 0


class Demanding(RoundRobin):
    """Cannot be made without arguments."""

    def __init__(self, patience: int) -> None:
        self.patience = patience


class Text:
    """Has a string instead of a list of objectives."""

    objectives: ClassVar[str] = LATENCY


class Idle:
    """Has no method ``place``."""

    objectives: ClassVar[tuple[str, ...]] = STEP_OBJECTIVES


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (f"{__name__}:nn", "no class of placers"),
        (f"{__name__}:Text", "no class of placers"),
        ("no_such_module:Mine", "No module named"),
        (f"{__name__}:Nobody", "Nobody"),
        (f"{__name__}:Demanding", "TypeError: .*patience"),
        (f"{__name__}:Idle", "no method place"),
    ],
)
def test_a_plug_in_that_is_no_placer_is_refused(
    value: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugged(monkeypatch, mine=value)
    with pytest.raises(ValueError, match=f"'mine' of a plug-in cannot be loaded: .*{reason}"):
        placer_named("mine")


def test_placers_of_an_installed_package_are_listed_and_nothing_heavy_is_loaded(
    tmp_path: Path,
) -> None:
    metadata = tmp_path / "my_package-0.1.dist-info"
    metadata.mkdir()
    text = "Metadata-Version: 2.1\nName: my-package\nVersion: 0.1\nSummary: Placers of mine\n"
    (metadata / "METADATA").write_text(text)
    (metadata / "entry_points.txt").write_text("[placer.placers]\nmine = no_such_module:Mine\n")
    code = (
        "import sys\nfrom placer.cli.optimize import epilog\nprint(epilog())\n"
        "print(sorted({'torch', 'numpy', 'numba', 'rich', 'ortools'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    *lines, mine, _, heavy = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[-len(NAMES) :]] == NAMES
    assert mine.split() == ["mine", *["Placers", "of", "mine", "(from", "my-package)"]]
    assert heavy == "[]"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--placer", "anealing"], "portfolio, "),
        (["--placer", "anealing"], "annealing"),
        (["--placer", "policy", "--policy", "none"], "without a trained policy"),
        (["--placer", "heft", "--objective", "max-load"], "'portfolio' serves all"),
        (["--placer", "heft", "--policy", "generalist"], "policy"),
        (["--objective", "max-load", "--policy", "generalist"], "policy"),
    ],
)
def test_the_command_refuses_placers_and_policies_that_it_cannot_use(
    options: list[str], message: str, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, *options]) == 2
    assert message in capsys.readouterr().err


def test_a_policy_is_only_loaded_for_placers_that_use_it(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []

    def load_and_note(name: str) -> Any:
        names.append(name)
        return load(name)

    monkeypatch.setattr("placer.job.load", load_and_note)
    for more in (["--placer", "heft"], ["--objective", "max-load"], ["--policy", "none"]):
        assert main([*command, *more]) == 0
    assert names == []
    for more in ([], ["--placer", "policy"], ["--policy", "synthetic-only"]):
        assert main([*command, *more]) == 0
    assert names == ["generalist", "generalist", "synthetic-only"]


def test_a_model_is_placed_by_the_placer_that_is_named() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def place(**search: Any) -> placer.Result:
        return placer.optimize(
            model,
            torch.ones(2, 8),
            training=False,
            devices=rated(2),
            search=placer.SearchConfig(budget="20e", **search),
            progress=False,
        )

    candidates = {candidate.name for candidate in place(placer="evolution").candidates}
    assert {"evolution", "single n0:g0", "HEFT"} <= candidates
    assert not {"annealing", "policy"} & candidates
    by_name, by_object = place(placer="heft"), place(placer=placer_named("heft"))
    assert by_object.placement == by_name.placement
    with pytest.raises(ValueError, match="'Heft'"):
        place(placer=placer_named("heft"), policy="mine")
