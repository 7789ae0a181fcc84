"""Trains one policy per seed, and keeps the best with those that complement it.

    placer train --config trained_policies/generalist.toml --out trained_policies/generalist

Seeds vary as much as training gains, so every seed's scores go into the card, beside those of an
untrained control: the best of sixteen random weights around HEFT. An interrupted training continues
from its checkpoint, with the same result as without interruption if steps are simulated.
"""

from __future__ import annotations

import hashlib
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import stable_baselines3
import torch

from envs.hardware.discover import available_memory_bytes
from envs.hardware.torch_devices import one_thread
from graphs.strict_json import number, text, whole
from graphs.strict_json import table as as_table
from placer.policies.network import FORMAT, path_of
from placer.policies.records import differences
from placer.policies.training.config import MEASURED as MEASURED_CONFIG
from placer.policies.training.config import SIMULATED, TrainingConfig
from placer.policies.training.learner import Learner, Saved
from placer.policies.training.log import Log
from placer.policies.training.scores import MEANING, MEASURED, mean, table
from placer.policies.training.task import Curriculum, Task
from placer.progress import Silent
from placer.startup import VERSION
from placer.state_file import StateFileError, read_state, write_state

if TYPE_CHECKING:
    from envs.hardware.cluster import Cluster
    from graphs.extract import Workload
    from placer.policies.measured_decoders import MeasuredDecoders

CHECKPOINT_FORMAT: Final = "placer-checkpoint/6"
RATIOS: Final = "ratios"
"""Ratios of one decode on every validation graph: in checkpoints, not in cards."""


def train(
    out: Path,
    config: TrainingConfig | None = None,
    *,
    measured: tuple[Workload, Cluster] | None = None,
    progress: Callable[[float, str], None] | None = None,
    fresh: bool = False,
) -> Mapping[str, Any]:
    """Train one policy per seed and write them, the best first, to ``out``.safetensors and .json.

    ``out``.csv logs every rollout. ``out``.checkpoint exists until the end, and the training goes
    on from it unless it is ``fresh``. ``measured`` is a step to measure and devices of this
    machine. Returns the card; its name is the last part of ``out``.
    """
    config = config or (SIMULATED if measured is None else MEASURED_CONFIG)
    _check(config, has_model=measured is not None)
    report = progress or Silent().advance
    out.parent.mkdir(parents=True, exist_ok=True)
    path = out.with_name(f"{out.name}.checkpoint")
    checkpoint = None
    if path.exists() and not fresh:
        checkpoint = read_checkpoint(path, config.essence())
    with ExitStack() as stack:
        decoders: MeasuredDecoders | None = None
        if measured is None:
            stack.enter_context(one_thread())  # measured models use all
            report(0.0, "drawing graphs")
            curriculum = Curriculum.drawn(config)
        else:
            from placer.policies.measured_decoders import MeasuredDecoders

            decoders = MeasuredDecoders.of(
                *measured,
                lambda text: report(0.0, text),
                config.ray_address,
                config.ppo.environments,
            )
            stack.enter_context(closing(decoders))
            curriculum = Curriculum.of_one(decoders.item)
        if checkpoint is not None and checkpoint.graphs != _digest(config, curriculum):
            raise ValueError(
                f"{path}: the training that began had other graphs: give --fresh to begin anew"
            )
        task = stack.enter_context(closing(Task(config, curriculum, decoders)))
        log = stack.enter_context(Log(out, keep_bytes=checkpoint.log_bytes if checkpoint else 0))
        finished = _Run(config, curriculum, task, log, path, report).seeds(checkpoint)
        kept = most_helpful([saved.data for saved in finished], config.keep)
        together = task.together([finished[i].tensors for i in kept], curriculum.tests)
        card = _card(out.name, config, curriculum, task, [finished[i].data for i in kept], finished)
    card["together"] = table(curriculum.tests, *together)
    if decoders is not None and config.ray_address is not None:
        card["measured_on"] = dict(decoders.measured)
    task.save(out, card, [finished[i].tensors for i in kept])
    path.unlink(missing_ok=True)
    return card


def _check(config: TrainingConfig, *, has_model: bool) -> None:
    """Raise ValueError if this machine or the arguments do not suit the configuration."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError('device is "cuda", but torch sees no such device here: use "cpu"')
    if has_model != (config.backend == "measured"):
        needs = "needs a model" if config.backend == "measured" else "draws graphs, not a model"
        raise ValueError(f"a training with backend {config.backend} {needs}")
    if config.start:
        path_of(config.start)
    needed, free = config.graph_bytes, available_memory_bytes()
    if needed > free:
        raise ValueError(
            f"the graphs need {needed / 1e9:.1f} GB, but {free / 1e9:.1f} GB are "
            "free: draw fewer graphs, or smaller ones"
        )


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
        write_state(path, state, CHECKPOINT_FORMAT)


def read_checkpoint(path: Path, essence: Mapping[str, Any]) -> Checkpoint:
    """Read the checkpoint of a training with this configuration."""
    try:
        state = read_state(path, CHECKPOINT_FORMAT)
        if changed := differences(as_table(state["essence"], "essence"), essence):
            raise ValueError(
                f"{path}: it is of another training: {'; '.join(changed)}. Train with what it was, "
                "or give --fresh to begin anew"
            )
        parts = {part: Saved(*saved) for part, saved in as_table(state["parts"], "parts").items()}
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


class _Run:
    """A running training."""

    def __init__(
        self,
        config: TrainingConfig,
        curriculum: Curriculum,
        task: Task,
        log: Log,
        path: Path,
        report: Callable[[float, str], None],
    ) -> None:
        self.config = config
        self.curriculum = curriculum
        self.task = task
        self.log = log
        self.path = path
        self.report = report
        self.finished: list[Saved] = []
        self.graphs = _digest(config, curriculum)

    def seeds(self, checkpoint: Checkpoint | None) -> list[Saved]:
        """Train all seeds; return their networks, each with its row of the card."""
        if checkpoint is not None:
            self.finished = list(checkpoint.finished)
        while len(self.finished) < self.config.seeds:
            seed = self.config.first_seed + len(self.finished)
            learner, spent_s = self._learnt(seed, checkpoint)
            checkpoint = None
            self._report(1.0, f"seed {seed}: scoring")
            row = self._row(seed, learner, spent_s)
            self.finished.append(Saved(self.task.tensors(learner.policy), row))
            self._report(0.0, f"seed {seed}: {row['validation']}")
        return self.finished

    def _learnt(self, seed: int, checkpoint: Checkpoint | None) -> tuple[Learner, float]:
        """Train a seed, from its checkpoint if given; return the learner and the time spent."""
        config, rollouts, spent_s = self.config, 0, 0.0
        # Processor time if this process does all the work: others may use the machine, too.
        alone = config.workers == 0 and config.backend == "simulated"
        clock = time.process_time if alone else time.perf_counter
        began = clock()
        if checkpoint is None:
            learner = self.task.learner(seed)
        else:
            learner = self.task.blank(seed)
            learner.restore(checkpoint.learner)
            rollouts, spent_s = checkpoint.rollouts, checkpoint.spent_s
        began -= spent_s
        while (share := config.length.share(learner.decodes, spent_s)) < 1.0:
            stage = config.stage_at(share)
            learner.batch.choose(self.curriculum.stages[stage])
            learner.learning_rate = config.ppo.learning_rate_at(share)
            row = learner.rollout()
            rollouts, spent_s = rollouts + 1, clock() - began
            numbers = {"seed": seed, "rollout": rollouts, "stage": stage, "spent_s": spent_s}
            self.log.write({**numbers, **row})
            if rollouts % config.checkpoint_rollouts == 0:
                self._checkpoint(learner, rollouts, spent_s)
            share = config.length.share(learner.decodes, spent_s)
            done = f"{learner.decodes} decodes{_ratio(row)}{_failures(learner.failed)}"
            self._report(share, f"seed {seed}, {done}")
        return learner, spent_s

    def _checkpoint(self, learner: Learner, rollouts: int, spent_s: float) -> None:
        Checkpoint(
            essence=self.config.essence(),
            graphs=self.graphs,
            finished=self.finished,
            learner=learner.save(),
            rollouts=rollouts,
            spent_s=spent_s,
            log_bytes=self.log.kept_bytes(),
        ).write(self.path)

    def _row(self, seed: int, learner: Learner, spent_s: float) -> dict[str, Any]:
        alone, sampled = self.task.scores(learner.policy, self.curriculum.validation)
        tests = self.curriculum.tests
        return {
            "seed": seed,
            "decodes": learner.decodes,
            "failed": learner.failed,
            "spent_s": round(spent_s, 1),
            "validation": {"mean": mean(alone), "best_of_16": mean(sampled)},
            "test": table(tests, *self.task.scores(learner.policy, tests)),
            RATIOS: alone.round(6).tolist(),
        }

    def _report(self, share: float, text: str) -> None:
        done = len(self.finished) + min(share, 1.0)
        self.report(min(done / self.config.seeds, 1.0), text)


def most_helpful(rows: Sequence[Mapping[str, Any]], count: int) -> list[int]:
    """Return the seeds to keep, at most ``count``: the best, then greedily those that add most.

    A seed adds what it lowers the mean, over the validation graphs, of the logarithm of the best
    ratio.
    """
    kept = [min(range(len(rows)), key=lambda i: sum(rows[i]["validation"].values()))]
    logs = np.log([row[RATIOS] for row in rows])
    while len(kept) < min(count, len(rows)):
        best = logs[kept].min(axis=0)
        left = [i for i in range(len(rows)) if i not in kept]
        kept.append(min(left, key=lambda i: float(np.minimum(best, logs[i]).mean())))
    return kept


def _card(
    name: str,
    config: TrainingConfig,
    curriculum: Curriculum,
    task: Task,
    kept: Sequence[Mapping[str, Any]],
    finished: Sequence[Saved],
) -> dict[str, Any]:
    rows = [{k: v for k, v in saved.data.items() if k != RATIOS} for saved in finished]
    return {
        "format": FORMAT,
        "name": name,
        "trained_on": _trained_on(config, curriculum),
        "config": config.essence(),
        "seed": kept[0]["seed"],
        "others": [row["seed"] for row in kept[1:]],
        "selected_by": "lowest sum of both validation scores; others by what they add to it",
        "scores_are": MEANING if config.backend == "simulated" else MEASURED,
        "seeds": rows,
        "baselines": task.baselines(curriculum.tests),
        "versions": {
            "placer": VERSION,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "torch": torch.__version__,
            "stable_baselines3": stable_baselines3.__version__,
        },
    }


def _trained_on(config: TrainingConfig, curriculum: Curriculum) -> dict[str, Any]:
    problems = [item.evaluator.problem for item in curriculum.pool]
    if config.backend == "measured":
        [problem] = problems
        names = problem.cluster.names
        source: dict[str, Any] = {"graph": problem.graph.name, "devices": list(names)}
    else:
        families = dict.fromkeys(family for stage in config.stage for family in stage.families)
        devices = sorted({count for stage in config.stage for count in stage.clusters.devices})
        source = {"families": list(families), "devices": devices}
    largest = max(problem.op_count for problem in problems)
    return {**source, "graphs": len(problems), "largest_ops": largest}


def _digest(config: TrainingConfig, curriculum: Curriculum) -> str:
    """Return a hash of the training graphs; of a measured model without its costs."""
    if config.backend == "measured":
        [problem] = [item.evaluator.problem for item in curriculum.pool]
        return ",".join([problem.graph.hash, *problem.cluster.names])
    summaries = np.stack([item.summary for item in curriculum.pool])
    return hashlib.sha256(summaries.round(6).tobytes()).hexdigest()


def _failures(count: int) -> str:
    """Return the count of decodes whose placements cannot be run, as the end of a sentence."""
    return f", {count} failed" if count else ""


def _ratio(row: Mapping[str, float]) -> str:
    return f", ratio {row['mean_ratio']:.3f}" if math.isfinite(row["mean_ratio"]) else ""
