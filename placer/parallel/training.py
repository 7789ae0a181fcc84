"""Train a replica on its share of the data, with checkpoints."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from placer.parallel.checkpoint import Checkpoint
from placer.parallel.data import Batches, numbers_of
from placer.parallel.model_file import write_model
from placer.parallel.replica import Replica
from placer.parallel.sync import Sync


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
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
    course: Course,
    reached: Callable[[int], None] = lambda step: None,
    progress: Callable[[int, float], None] = lambda step, loss: None,
) -> Trained:
    """Train for the remaining steps; afterwards the replica is the result.

    Args:
        replica: the replica of this rank.
        sync: keeps it in sync with the others.
        batches: the data of all ranks.
        course: length of the run and checkpoints.
        reached: called with each step that begins.
        progress: called with each step and its loss.

    Raises:
        RuntimeError: another rank is gone.
        ValueError: the checkpoint is of another run.
        OSError: a checkpoint cannot be read or written, or the model cannot be saved.
    """
    losses: list[float] = []
    kept = course.checkpoint.read() if course.resume and course.checkpoint is not None else None
    if kept is not None:
        step, state = kept
        losses = _take_up(state, replica, sync)
        if step > course.steps:
            raise ValueError(f"the checkpoint is of step {step}, beyond the {course.steps} to do")
    first, rank, ranks = len(losses), dist.get_rank(), dist.get_world_size()
    seconds: list[float] = []
    for step in range(first, course.steps):
        start_s = time.perf_counter()
        reached(step)
        sync.zero_grad()
        numbers = numbers_of(step, rank, ranks, course.accumulate)
        losses.append(replica.backward([batches(number) for number in numbers]))
        sync.step()
        seconds.append(time.perf_counter() - start_s)
        progress(step, losses[-1])
        if course.checkpoint is not None and _is_due(course, step + 1):
            course.checkpoint.write(step + 1, _state(replica, sync, losses))
    sync.finish()
    if course.save is not None and rank == 0:
        write_model(course.save, replica.module)
    dist.barrier()  # ranks that still send would take one that leaves earlier for dead
    return Trained(
        losses=tuple(losses),
        first_step=first,
        step_s=statistics.median(seconds) if seconds else None,
        report=sync.report(),
    )


def _is_due(course: Course, done: int) -> bool:
    every = course.checkpoint_every
    return done == course.steps or (every is not None and done % every == 0)


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
