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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn

from envs.executors.cores.placed_model import PlacedModel
from graphs.files import write_whole
from graphs.strict_json import fields, load_checked, table, text, whole
from placer.parallel.data import Batch, Batches, numbers_of
from placer.parallel.methods.sync import Sync
from placer.parallel.processes import check_same
from placer.state_file import StateFileError, read_state, write_state

FORMAT: Final = "placer-run/1"
STATE_FORMAT: Final = "placer-rank/2"
_KEYS: Final = frozenset({"format", "step", "ranks", "essence"})


class Replica:
    """The placed model of one rank: on torch devices of this process, or on workers."""

    def __init__(self, placed: nn.Module | PlacedModel) -> None:
        self._workers = placed if isinstance(placed, PlacedModel) else None
        self.module: nn.Module = placed.model if isinstance(placed, PlacedModel) else placed

    def backward(self, passes: Sequence[Batch]) -> float:
        """Add the mean gradients of some batches to the existing ones; return the mean loss.

        Workers deliver gradients after each pass; with several passes gradients must be zero or
        None before.
        """
        total, count = 0.0, len(passes)
        if self._workers is None:
            losses: list[torch.Tensor] = []
            for inputs, keywords in passes:
                loss: torch.Tensor = self.module(*inputs, **keywords) / count
                torch.autograd.backward(loss)
                losses.append(loss.detach())
            return sum(loss.item() for loss in losses)  # here, since each waits for its device
        for inputs, keywords in passes:
            total += self._workers.step(*inputs, **keywords).item()
        for parameter in self.module.parameters() if count > 1 else ():
            if parameter.grad is not None:
                parameter.grad.div_(count)
        return total / count

    def random_state(self) -> list[torch.Tensor]:
        """Return the states of random generators outside this process."""
        return [] if self._workers is None else self._workers.random_state()

    def load_random_state(self, states: Sequence[torch.Tensor]) -> None:
        """Restore what :meth:`random_state` returned on this rank."""
        if self._workers is not None:
            self._workers.load_random_state(states)

    def close(self) -> None:
        """End the workers."""
        if self._workers is not None:
            self._workers.close()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Path of the checkpoint of a run, and the settings that a run must match to resume from it.

    ``settings`` is {readable name: required value}.
    """

    path: Path
    settings: Mapping[str, str]

    def write(self, step: int, state: Mapping[str, Any]) -> None:
        """Write the state of this rank after ``step`` steps; every rank calls it."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        write_state(self._state_path(step, rank), state, STATE_FORMAT)
        dist.barrier()
        if rank == 0:
            content = {
                "format": FORMAT,
                "step": step,
                "ranks": ranks,
                "essence": dict(self.settings),
            }
            write_whole(self.path, json.dumps(content, indent=1) + "\n", private=True)
        dist.barrier()
        # The step is digits only: ``FILE.big.6.0`` belongs to another run, that of ``FILE.big``.
        form = re.compile(rf"{re.escape(self.path.name)}\.[0-9]+\.{rank}")
        for path in self.path.parent.iterdir():
            if form.fullmatch(path.name) and path != self._state_path(step, rank):
                path.unlink()

    def read(self) -> tuple[int, dict[str, Any]] | None:
        """Return the completed steps and the state of this rank; None if there is no file."""
        exists = self.path.exists()
        check_same(f"the existence of {self.path}", str(exists))
        if not exists:
            return None
        content = load_checked(self.path, lambda data: fields(data, "", _KEYS, required=_KEYS))
        if content["format"] != FORMAT:
            raise ValueError(f"{self.path}: format is {content['format']!r}, not {FORMAT!r}")
        step, ranks = whole(content["step"], "step"), whole(content["ranks"], "ranks")
        if ranks != dist.get_world_size():
            raise ValueError(
                f"{self.path} is of a run with {ranks} ranks, this one has {dist.get_world_size()}"
            )
        saved = table(content["essence"], "essence")
        for name in dict.fromkeys((*saved, *self.settings)):
            before = text(saved[name], name) if name in saved else None
            if before != (now := self.settings.get(name)):
                raise ValueError(
                    f"{self.path} is of a run with {name} {before}, this one has {now}"
                )
        try:
            return step, read_state(self._state_path(step, dist.get_rank()), STATE_FORMAT)
        except StateFileError as error:
            raise ValueError(f"{error}: start anew instead of resuming") from error

    def _state_path(self, step: int, rank: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{step}.{rank}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Result of a run on this rank; ``losses`` includes the steps before a checkpoint."""

    losses: tuple[float, ...]
    first_step: int
    step_s: float | None  # median over the steps of this run, without loading their batches
    report: Mapping[str, Any]


def train(
    replica: Replica,
    sync: Sync,
    batches: Batches,
    *,
    steps: int,
    accumulate: int = 1,
    checkpoint: Checkpoint | None = None,
    checkpoint_every: int | None = None,
    resume: bool = False,
    save: Path | None = None,
    reached: Callable[[int], None] = lambda step: None,
    progress: Callable[[int, float], None] = lambda step, loss: None,
) -> Trained:
    """Train up to ``steps`` steps in all; afterwards the replica is the result.

    ``steps`` includes those before a checkpoint; each takes ``accumulate`` batches per rank.
    Checkpoints are also written at the end. Rank 0 writes the resulting model to ``save``.
    ``reached`` is called with each step that begins, ``progress`` with each step and its loss.
    """
    losses: list[float] = []
    resumed = checkpoint.read() if resume and checkpoint is not None else None
    if resumed is not None:
        step, state = resumed
        losses = _restored(state, replica, sync)
        if step > steps:
            raise ValueError(f"the checkpoint is of step {step}, beyond the {steps} to do")
    first, rank, ranks = len(losses), dist.get_rank(), dist.get_world_size()
    seconds: list[float] = []
    for step in range(first, steps):
        reached(step)
        numbers = numbers_of(step, rank, ranks, accumulate)
        passes = [batches(number) for number in numbers]
        start_s = time.perf_counter()
        sync.zero_grad()
        losses.append(replica.backward(passes))
        sync.step()
        seconds.append(time.perf_counter() - start_s)
        progress(step, losses[-1])
        is_due = step + 1 == steps or (
            checkpoint_every is not None and (step + 1) % checkpoint_every == 0
        )
        if checkpoint is not None and is_due:
            checkpoint.write(step + 1, _state(replica, sync, losses))
    sync.finish()
    if save is not None and rank == 0:
        write_model(save, replica.module)
    dist.barrier()  # ranks that still send would take one that leaves earlier for dead
    return Trained(
        losses=tuple(losses),
        first_step=first,
        step_s=statistics.median(seconds) if seconds else None,
        report=sync.report(),
    )


def _state(replica: Replica, sync: Sync, losses: list[float]) -> dict[str, Any]:
    return {
        "module": dict(replica.module.state_dict()),
        "buffers": _unsaved_buffers(replica.module),
        "sync": sync.state_dict(),
        "random": {
            "cpu": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "replica": replica.random_state(),
        },
        "losses": losses,
    }


def _unsaved_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that are not in the state of a module."""
    saved = module.state_dict()
    return {name: buffer for name, buffer in module.named_buffers() if name not in saved}


@torch.no_grad()
def _restored(state: Mapping[str, Any], replica: Replica, sync: Sync) -> list[float]:
    # Restores the replica and its sync; returns the losses so far.
    for name, tensor in {**state["module"], **state["buffers"]}.items():
        owner, _, last = name.rpartition(".")
        buffers = replica.module.get_submodule(owner)._buffers
        if last in buffers and buffers[last] is None:  # until the model has run
            buffers[last] = tensor.clone()
    replica.module.load_state_dict(state["module"])  # in place: others hold the tensors
    for name, tensor in _unsaved_buffers(replica.module).items():
        tensor.copy_(state["buffers"][name])
    sync.load_state_dict(state["sync"])
    torch.set_rng_state(state["random"]["cpu"])
    replica.load_random_state(state["random"]["replica"])
    if state["random"]["cuda"]:
        torch.cuda.set_rng_state_all(state["random"]["cuda"])
    return list(state["losses"])


def write_model(path: Path, module: nn.Module) -> None:
    """Write the tensors of ``state_dict`` by name; the file is complete or absent.

    Tied weights are written once, under the first of their names, as
    ``safetensors.torch.load_model`` expects.
    """
    name_of: dict[int, str] = {}  # by id of the tensor
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and name_of.setdefault(id(tensor), name) == name:
            tensors[name] = tensor.detach().cpu().contiguous().clone()
    write_whole(path, safetensors.torch.save(tensors, {"format": "pt"}))
