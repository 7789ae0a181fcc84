"""Checkpoints of a run: a state file for every rank, and a file that names the matching ones.

``FILE`` is JSON and is replaced atomically, after all ranks have written ``FILE.STEP.RANK``: a run
killed at any time keeps its previous checkpoint. Ranks on several hosts need a shared folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from graphs.strict_json import fields, load_checked, table, text, whole
from graphs.whole_file import write_whole
from placer.parallel.groups import check_same
from placer.parallel.state_file import read_state, write_state

FORMAT: Final = "placer-run/1"
_KEYS: Final = frozenset({"format", "step", "ranks", "essence"})


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Path of the checkpoint of a run, and the settings that a run must match to resume from it.

    ``essence`` is {readable name of a setting: required value}.
    """

    path: Path
    essence: Mapping[str, str]

    def write(self, step: int, state: Mapping[str, Any]) -> None:
        """Write the state of this rank after ``step`` steps; every rank calls it.

        Raises:
            OSError: a file cannot be written.
        """
        rank, ranks = dist.get_rank(), dist.get_world_size()
        write_state(self._of_rank(step, rank), state)
        dist.barrier()
        if rank == 0:
            content = {
                "format": FORMAT,
                "step": step,
                "ranks": ranks,
                "essence": dict(self.essence),
            }
            write_whole(self.path, json.dumps(content, indent=1) + "\n", private=True)
        dist.barrier()
        for old in self._all_of_rank(rank):
            if old != self._of_rank(step, rank):
                old.unlink()

    def read(self) -> tuple[int, dict[str, Any]] | None:
        """Return the completed steps and the state of this rank; None if there is no file.

        Raises:
            ValueError: it is not a checkpoint, is of another run (says what differs), or only some
                of the ranks find it.
            OSError: it cannot be read.
        """
        is_there = self.path.exists()
        check_same(f"what ranks find at {self.path}", str(is_there))
        if not is_there:
            return None
        content = load_checked(self.path, lambda data: fields(data, "", _KEYS, required=_KEYS))
        if content["format"] != FORMAT:
            raise ValueError(f"{self.path}: format is {content['format']!r}, not {FORMAT!r}")
        step, ranks = whole(content["step"], "step"), whole(content["ranks"], "ranks")
        if ranks != dist.get_world_size():
            raise ValueError(
                f"{self.path} is of a run with {ranks} ranks, this one has {dist.get_world_size()}"
            )
        essence = table(content["essence"], "essence")
        for name in dict.fromkeys((*essence, *self.essence)):
            now = self.essence.get(name)
            given = text(essence[name], name) if name in essence else None
            if given != now:
                raise ValueError(f"{self.path} is of a run with {name} {given}, this one has {now}")
        return step, read_state(self._of_rank(step, dist.get_rank()))

    def _all_of_rank(self, rank: int) -> list[Path]:
        # The step is digits only: ``FILE.big.6.0`` belongs to another run, that of ``FILE.big``.
        form = re.compile(rf"{re.escape(self.path.name)}\.[0-9]+\.{rank}")
        return [path for path in self.path.parent.iterdir() if form.fullmatch(path.name)]

    def _of_rank(self, step: int, rank: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{step}.{rank}")
