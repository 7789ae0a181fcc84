from __future__ import annotations

from pathlib import Path

from placer.parallel.training import Checkpoint
from tests.helpers.ranks import on_ranks


def written_in_turn(folder: Path, *writes: tuple[str, int]) -> list[str]:
    """Let runs of these names write these steps and return the files in the folder."""
    for name, step in writes:
        Checkpoint(folder / name, {"run": name}).write(step, {"step": step})
    return sorted(path.name for path in folder.iterdir())


def test_a_run_leaves_the_states_of_others_whose_names_begin_as_its_own(tmp_path: Path) -> None:
    writes = (("exp.big", 6), ("exp", 3), ("exp", 4))
    [found] = on_ranks(1, written_in_turn, tmp_path, *writes)
    assert found == ["exp", "exp.4.0", "exp.big", "exp.big.6.0"]


def test_a_name_with_the_signs_of_a_pattern_is_only_a_name(tmp_path: Path) -> None:
    [found] = on_ranks(1, written_in_turn, tmp_path, ("exp[1]*", 3), ("exp[1]*", 4))
    assert found == ["exp[1]*", "exp[1]*.4.0"]
