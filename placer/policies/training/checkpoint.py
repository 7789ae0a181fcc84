"""Checkpoints: one safetensors file with a JSON header; nothing is pickled.

``NAME.checkpoint`` is replaced atomically, so that a process killed while writing leaves the
previous one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from graphs.strict_json import brief, number, parse_json, table, text, whole
from graphs.whole_file import checksum, write_whole
from placer.policies.records import differences
from placer.policies.training.learner import Saved

FORMAT: Final = "placer-checkpoint/2"


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
        """Write the checkpoint, completely or not at all.

        Raises:
            OSError: it cannot be written.
        """
        parts = {f"finished.{i}": own for i, own in enumerate(self.finished)}
        parts["learner"] = self.learner
        tensors = {
            f"{part}/{key}": np.ascontiguousarray(value)
            for part, own in parts.items()
            for key, value in own.tensors.items()
        }
        header = {
            "format": FORMAT,
            "essence": self.essence,
            "graphs": self.graphs,
            "data": {part: own.data for part, own in parts.items()},
            "rollouts": self.rollouts,
            "spent_s": self.spent_s,
            "log_bytes": self.log_bytes,
        }
        content = json.dumps(header)
        metadata = {"placer": content, "sha256": _checksum(content, tensors)}
        write_whole(path, save(tensors, metadata), private=True)


def read_checkpoint(path: Path, essence: Mapping[str, Any]) -> Checkpoint:
    """Read the checkpoint of a training with this configuration.

    Raises:
        ValueError: it is no checkpoint, is damaged, or has another configuration: says what
            differs.
        OSError: it cannot be read.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no dict
        content = metadata["placer"]
        if metadata.get("sha256") != _checksum(content, tensors):
            raise ValueError("it is damaged; give --fresh to begin anew")
        header = parse_json(content, _header)
        if header["format"] != FORMAT:
            raise ValueError(f"the format is {header['format']!r}, this version reads {FORMAT!r}")
        if changed := differences(table(header["essence"], "essence"), essence):
            raise ValueError(
                f"it is of another training: {'; '.join(changed)}. Train with what it was, or give "
                "--fresh to begin anew"
            )
        data = table(header["data"], "data")
        parts = {part: _part(tensors, part, table(data[part], part)) for part in data}
        learner = parts.pop("learner")
        return Checkpoint(
            essence=essence,
            graphs=text(header["graphs"], "graphs"),
            finished=[parts[f"finished.{i}"] for i in range(len(parts))],
            learner=learner,
            rollouts=whole(header["rollouts"], "rollouts"),
            spent_s=number(header["spent_s"], "spent_s"),
            log_bytes=whole(header["log_bytes"], "log_bytes"),
        )
    except (KeyError, TypeError, SafetensorError, ValueError) as error:
        why = f"not a checkpoint: {error!r}" if not isinstance(error, ValueError) else error
        raise ValueError(f"{path}: {brief(str(why))}") from error


def _checksum(content: str, tensors: Mapping[str, NDArray[Any]]) -> str:
    parts = {f"{k} {v.dtype} {v.shape}": memoryview(v.tobytes()) for k, v in tensors.items()}
    return checksum(content, parts)


def _header(content: object) -> dict[str, Any]:
    return table(content, "")


def _part(tensors: Mapping[str, NDArray[Any]], part: str, data: Mapping[str, Any]) -> Saved:
    prefix = f"{part}/"
    own = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    return Saved(own, data)
