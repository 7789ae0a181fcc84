"""Checkpoints of a training, as state files.

``NAME.checkpoint`` is replaced atomically, so that a process killed while writing leaves the
previous one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from graphs.strict_json import number, table, text, whole
from placer.policies.records import differences
from placer.policies.training.learner import Saved
from placer.state_file import StateFileError, read_state, write_state

FORMAT: Final = "placer-checkpoint/3"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """State of a training in the middle of a seed."""

    essence: Mapping[str, Any]  # of its configuration, see TrainingConfig.essence
    graphs: str  # digest of the training graphs
    finished: Sequence[Saved]  # networks of finished seeds, with their rows of the card
    learner: Saved  # of the running seed
    rollouts: int  # of the running seed so far
    spent_s: float
    log_bytes: int  # length of the log at this point

    def write(self, path: Path) -> None:
        """Write the checkpoint, completely or not at all."""
        parts = {f"finished.{i}": saved for i, saved in enumerate(self.finished)}
        parts["learner"] = self.learner
        state = {
            "essence": self.essence,
            "graphs": self.graphs,
            "parts": {part: [dict(saved.tensors), saved.data] for part, saved in parts.items()},
            "rollouts": self.rollouts,
            "spent_s": self.spent_s,
            "log_bytes": self.log_bytes,
        }
        write_state(path, state, FORMAT)


def read_checkpoint(path: Path, essence: Mapping[str, Any]) -> Checkpoint:
    """Read the checkpoint of a training with this configuration."""
    try:
        state = read_state(path, FORMAT)
        if changed := differences(table(state["essence"], "essence"), essence):
            raise ValueError(
                f"{path}: it is of another training: {'; '.join(changed)}. Train with what it was, "
                "or give --fresh to begin anew"
            )
        parts = {part: Saved(*saved) for part, saved in table(state["parts"], "parts").items()}
        return Checkpoint(
            essence=essence,
            graphs=text(state["graphs"], "graphs"),
            learner=parts.pop("learner"),
            finished=[parts[f"finished.{i}"] for i in range(len(parts))],
            rollouts=whole(state["rollouts"], "rollouts"),
            spent_s=number(state["spent_s"], "spent_s"),
            log_bytes=whole(state["log_bytes"], "log_bytes"),
        )
    except StateFileError as error:
        raise ValueError(f"{error}; give --fresh to begin anew") from error
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a checkpoint: {error!r}") from error
