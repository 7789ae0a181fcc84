from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from placer.cli.main import main
from placer.policies import load
from placer.policies.evaluation import (
    ALL,
    BEST,
    ONE,
    UNTRAINED,
    Suite,
    evaluate,
    load_suites,
    write_into_card,
)
from placer.policies.network import FORMAT
from placer.policies.training import train
from tests.helpers.tiny_training import TINY

TINY_SUITE = Suite(name="tiny", families=("layered", "grid"), graphs=4, max_ops=80)
SUITES = """
format = "placer-suites/1"
[[suite]]
name = "tiny"
families = ["layered", "grid"]
graphs = 4
max_ops = 80
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("policies") / "tiny"
    train(out, TINY)
    return out


def test_the_suites_that_ship_are_read() -> None:
    assert {"families", "held-out", "many-devices", "communication"} <= set(load_suites())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("format = 'placer-suites/1'\n[[suite]]\nnam = 'x'", r"suite\[0\].nam; did you mean name"),
        ("format = 'placer-suites/1'\n[[suite]]\ngraphs = 3", r"suite\[0\] lacks name"),
        ("format = 'placer-suites/1'\n[[suite]]\nname = 'x'\ngraphs = 0", r"\[0\].graphs is 0"),
        (SUITES + SUITES.partition("\n[[")[1] + SUITES.partition("\n[[")[2], "one name"),
    ],
)
def test_suites_with_a_fault_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "suites.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_suites(path)


@pytest.mark.slow
def test_an_evaluation_compares_every_family_with_heuristics_and_untrained_weights(
    trained: Path,
) -> None:
    found = evaluate(load(str(trained)), TINY_SUITE, seeds=3)
    table = found["table"]
    assert set(table) == {ALL, "layered", "grid"}
    assert table[ALL]["graphs"] == 4
    both = [table[family][ONE] for family in ("layered", "grid")]
    assert min(both) - 1e-4 <= table[ALL][ONE] <= max(both) + 1e-4
    assert [row["seed"] for row in found["seeds"]] == [0, 1, 2]
    assert found == evaluate(load(str(trained)), TINY_SUITE, seeds=3)


def test_a_policy_that_says_nothing_new_is_as_good_as_untrained(trained: Path) -> None:
    policy = load(str(trained))
    silent = tuple((0 * matrix, 0 * bias) for matrix, bias in policy.layers)
    first = np.full_like(policy.log_std, TINY.ppo.log_std)
    found = evaluate(replace(policy, layers=silent, log_std=first), TINY_SUITE, seeds=2)
    for row in found["table"].values():
        assert row[BEST] == row[UNTRAINED]
        assert row[ONE] == row["HEFT"]


def test_scores_are_written_into_the_card_beside_those_of_other_suites(trained: Path) -> None:
    policy = load(str(trained))
    for name in ("tiny", "other", "tiny"):
        write_into_card(trained, evaluate(policy, replace(TINY_SUITE, name=name), seeds=1))
    card = load(str(trained)).card
    assert set(card["evaluations"]) == {"tiny", "other"}
    assert card["seeds"] == policy.card["seeds"]


@pytest.fixture
def command(trained: Path, tmp_path: Path) -> list[str]:
    """Return a command that evaluates the trained policy."""
    suites = tmp_path / "suites.toml"
    suites.write_text(SUITES)
    evaluated = ["--evaluate", "tiny", "--suites", str(suites), "--seeds", "1"]
    return ["train", "--policy", str(trained), *evaluated]


def test_the_command_writes_the_card_and_prints_json(
    trained: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["policy"] == "tiny"
    assert load(str(trained)).card["evaluations"]["tiny"]["table"] == printed["table"]
    assert main([*command, "--no-card"]) == 0
    assert "layered" in capsys.readouterr().out


def test_scores_are_printed_where_the_card_cannot_be_written(
    trained: Path,
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("placer.policies.evaluation.write_into_card", refuse)
    assert main(command) == 1
    printed = capsys.readouterr()
    assert "layered" in printed.out
    assert f"{trained}.json cannot be written: read-only file system" in printed.err


def test_a_card_that_cannot_be_written_or_is_damaged_is_an_error_before_the_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Suite, "drawn", lambda _: pytest.fail("it was evaluated"))
    path = tmp_path / "mine"
    card = {"format": FORMAT, "config": {"ppo": {"log_std": 9}}}
    replace(load("generalist"), card=card).save(path)
    assert main(["train", "--evaluate", "families", "--policy", str(path)]) == 2
    assert "log_std is 9" in capsys.readouterr().err
    monkeypatch.setattr("os.access", lambda *_: False)
    assert main(["train", "--evaluate", "families", "--policy", str(path)]) == 2
    assert "mine.json cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("policy", "suite", "message"),
    [
        ("generalist", "familys", "did you mean families"),
        ("generalst", "families", "generalist"),
    ],
)
def test_what_does_not_exist_is_named(
    policy: str, suite: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--policy", policy, "--evaluate", suite]) == 2
    assert message in capsys.readouterr().err
