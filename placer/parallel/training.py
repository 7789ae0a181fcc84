"""Train a replica on its share of the data, with checkpoints.

A checkpoint ``FILE`` is JSON and is replaced atomically, after all ranks have written their state
files ``FILE.STEP.RANK``: a run killed at any time keeps its previous checkpoint. Ranks on several
hosts need a shared folder.
"""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import nn

from graphs.files import write_whole
from graphs.strict_json import fields, load_checked, table, text, whole
from placer.parallel.data import Batches, numbers_of
from placer.parallel.groups import check_same
from placer.parallel.methods.sync import Sync
from placer.parallel.replica import Replica
from placer.state_file import StateFileError, read_state, write_state

FORMAT: Final = "placer-run/1"
STATE_FORMAT: Final = "placer-rank/1"
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
        write_state(self._of_rank(step, rank), state, STATE_FORMAT)
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
        try:
            return step, read_state(self._of_rank(step, dist.get_rank()), STATE_FORMAT)
        except StateFileError as error:
            raise ValueError(f"{error}; without --resume the run begins anew") from error

    def _all_of_rank(self, rank: int) -> list[Path]:
        # The step is digits only: ``FILE.big.6.0`` belongs to another run, that of ``FILE.big``.
        form = re.compile(rf"{re.escape(self.path.name)}\.[0-9]+\.{rank}")
        return [path for path in self.path.parent.iterdir() if form.fullmatch(path.name)]

    def _of_rank(self, step: int, rank: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{step}.{rank}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """Length of a run, and where it is saved.

    Attributes:
        steps: total steps, those before a checkpoint included.
        checkpoint: where to write checkpoints, also at the end of the run; None for nowhere.
        checkpoint_every: steps between checkpoints, None for the end alone.
        resume: whether to resume from the checkpoint, if there is one.
        accumulate: batches per step of each rank, whose gradients are averaged.
        save: where rank 0 writes the resulting model, None for nowhere.
    """

    steps: int
    checkpoint: Checkpoint | None = None
    checkpoint_every: int | None = None
    resume: bool = False
    accumulate: int = 1
    save: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Result of a run on this rank; ``losses`` includes the steps before a checkpoint."""

    losses: tuple[float, ...]
    first_step: int
    step_s: float | None  # median over the steps of this run
    report: Mapping[str, Any]


def train(
    replica: Replica,
    sync: Sync,
    batches: Batches,
    plan: TrainingPlan,
    reached: Callable[[int], None] = lambda step: None,
    progress: Callable[[int, float], None] = lambda step, loss: None,
) -> Trained:
    """Train for the remaining steps; afterwards the replica is the result.

    Args:
        replica: the replica of this rank.
        sync: keeps it in sync with the others.
        batches: the data of all ranks.
        plan: length of the run and checkpoints.
        reached: called with each step that begins.
        progress: called with each step and its loss.

    Raises:
        RuntimeError: another rank is gone.
        ValueError: the checkpoint is of another run.
        OSError: a checkpoint cannot be read or written, or the model cannot be saved.
    """
    losses: list[float] = []
    kept = plan.checkpoint.read() if plan.resume and plan.checkpoint is not None else None
    if kept is not None:
        step, state = kept
        losses = _take_up(state, replica, sync)
        if step > plan.steps:
            raise ValueError(f"the checkpoint is of step {step}, beyond the {plan.steps} to do")
    first, rank, ranks = len(losses), dist.get_rank(), dist.get_world_size()
    seconds: list[float] = []
    for step in range(first, plan.steps):
        start_s = time.perf_counter()
        reached(step)
        sync.zero_grad()
        numbers = numbers_of(step, rank, ranks, plan.accumulate)
        losses.append(replica.backward([batches(number) for number in numbers]))
        sync.step()
        seconds.append(time.perf_counter() - start_s)
        progress(step, losses[-1])
        if plan.checkpoint is not None and _is_due(plan, step + 1):
            plan.checkpoint.write(step + 1, _state(replica, sync, losses))
    sync.finish()
    if plan.save is not None and rank == 0:
        write_model(plan.save, replica.module)
    dist.barrier()  # ranks that still send would take one that leaves earlier for dead
    return Trained(
        losses=tuple(losses),
        first_step=first,
        step_s=statistics.median(seconds) if seconds else None,
        report=sync.report(),
    )


def _is_due(plan: TrainingPlan, done: int) -> bool:
    every = plan.checkpoint_every
    return done == plan.steps or (every is not None and done % every == 0)


def _state(replica: Replica, sync: Sync, losses: list[float]) -> dict[str, Any]:
    return {
        "module": dict(replica.module.state_dict()),
        "sync": sync.state_dict(),
        "random": {
            "cpu": torch.get_rng_state(),
            "cuda": _cuda_random(),
            "replica": replica.random_state(),
        },
        "losses": losses,
    }


@torch.no_grad()
def _take_up(state: Mapping[str, Any], replica: Replica, sync: Sync) -> list[float]:
    # Restores the replica and its sync; returns the losses so far.
    for name, tensor in replica.module.state_dict().items():
        tensor.copy_(state["module"][name])  # in place: optimizers and placements hold them
    sync.load_state_dict(state["sync"])
    torch.set_rng_state(state["random"]["cpu"])
    replica.load_random_state(state["random"]["replica"])
    if state["random"]["cuda"]:
        torch.cuda.set_rng_state_all(state["random"]["cuda"])
    return list(state["losses"])


def _cuda_random() -> list[torch.Tensor]:
    return torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []


def write_model(path: Path, module: nn.Module) -> None:
    """Write the tensors of ``state_dict`` by name; the file is complete or absent.

    Tied weights are written once, under the first of their names, as
    ``safetensors.torch.load_model`` expects.

    Raises:
        OSError: it cannot be written.
    """
    name_of: dict[int, str] = {}  # by id of the tensor
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and name_of.setdefault(id(tensor), name) == name:
            tensors[name] = tensor.detach().cpu().contiguous().clone()
    write_whole(path, save(tensors, {"format": "pt"}))
