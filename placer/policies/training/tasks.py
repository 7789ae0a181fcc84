"""Learning tasks: weights of the list scheduler, or devices op by op."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.vec_env import DummyVecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvStepReturn

from envs.placement_env import PlacementEnv
from graphs.files import write_whole
from placer.policies.decoders import Decoders, InProcess, Processes
from placer.policies.network import (
    FORMAT,
    SEQUENTIAL_FORMAT,
    WEIGHTS,
    Policy,
    file_of,
    load,
    write_card,
)
from placer.policies.pool import CANNOT_RUN, Exercise
from placer.policies.rewards import Rewards, relative_rewards
from placer.policies.scheduler_env import SchedulerBatch
from placer.policies.training.config import TrainingConfig
from placer.policies.training.curriculum import Curriculum
from placer.policies.training.imitation import evolved_actions, imitate
from placer.policies.training.learner import Learner, exported, imported
from placer.policies.training.scores import SAMPLES, baselines, scores

Ratios: TypeAlias = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Ratios to the reference, (B,): of one placement each, and of the best of 16."""


class Task(Protocol):
    """A task that a policy learns, and how it is scored."""

    format: str
    keeps: int
    """Maximum number of seeds' policies that :meth:`save` writes."""

    def learner(self, seed: int, tell: Callable[[float, str], None]) -> Learner:
        """Return a new learner, after imitation if configured; ``tell`` gets its progress."""
        ...

    def blank(self, seed: int) -> Learner:
        """Return a learner to be restored."""
        ...

    def tensors(self, network: BasePolicy) -> dict[str, NDArray[Any]]:
        """Return the tensors of the trained policy."""
        ...

    def scores(self, network: BasePolicy, pool: Sequence[Exercise]) -> Ratios:
        """Return the scores of a network."""
        ...

    def baselines(self, pool: Sequence[Exercise]) -> dict[str, float]:
        """Return the scores of heuristics and of untrained scheduler weights."""
        ...

    def together(
        self, tensors: Sequence[Mapping[str, Any]], pool: Sequence[Exercise]
    ) -> Ratios | None:
        """Return the scores of policies combined in one file, or None if that is impossible."""
        ...

    def save(
        self, path: Path, card: Mapping[str, Any], tensors: Sequence[Mapping[str, Any]]
    ) -> None:
        """Write ``path``.safetensors and ``path``.json, from the best policy and others."""
        ...

    def close(self) -> None:
        """Release processes and connections."""
        ...


class SchedulerWeights:
    """Learn scheduler weights for a problem: PPO, where an episode is one decode.

    ``decoders`` hold the training graphs; with measured steps also those to score on.
    """

    format = FORMAT

    def __init__(self, config: TrainingConfig, curriculum: Curriculum, decoders: Decoders) -> None:
        self.keeps = config.keep
        self.config = config
        self.curriculum = curriculum
        self.decoders = decoders
        self.start = load(config.start) if config.start else None
        self.scale = curriculum.scale()
        if self.start is not None:
            self.scale = self.start.feature_mean, self.start.feature_deviation
        self._scored = decoders if config.backend == "measured" else None
        self._relative: Rewards | None = None
        self._imitated: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None

    def blank(self, seed: int) -> Learner:
        """See :class:`Task`."""
        return Learner(self.config, seed, self._batch(seed))

    def learner(self, seed: int, tell: Callable[[float, str], None]) -> Learner:
        """See :class:`Task`; the imitated actions are the same for all seeds, and computed once."""
        batch, imitation = self._batch(seed), self.config.imitation
        learner = Learner(self.config, seed, batch)
        if self.start is not None:
            imported(learner.model.policy, self.start)
        if imitation.graphs:
            if self._imitated is None:
                numbers = self.curriculum.in_turn(imitation.graphs)
                first = self.config.first_seed
                actions = evolved_actions(
                    self.decoders,
                    numbers,
                    imitation,
                    first,
                    lambda share: tell(share, f"evolving weights for {len(numbers)} graphs"),
                )
                self._imitated = (numbers, actions)
            numbers, actions = self._imitated
            seen = batch.observations(numbers)
            left = imitate(learner.model, seen, actions, imitation, seed)
            tell(1.0, f"imitated, squared error {left:.3f}")
        return learner

    def _batch(self, seed: int) -> SchedulerBatch:
        if self._relative is None and self.config.ppo.reward == "relative":
            references = np.array([item.reference_ns for item in self.curriculum.pool], np.int64)
            deviation = math.exp(self.config.ppo.log_std)
            self._relative = relative_rewards(self.decoders, references, deviation)
        return SchedulerBatch(
            self.curriculum.pool,
            self.config.ppo.environments,
            seed,
            self.decoders,
            scale=self.scale,
            rewards=self._relative,
        )

    def tensors(self, network: BasePolicy) -> dict[str, NDArray[Any]]:
        """See :class:`Task`."""
        return exported(network, "", *self.scale).tensors()

    def scores(self, network: BasePolicy, pool: Sequence[Exercise]) -> Ratios:
        """See :class:`Task`."""
        return scores(exported(network, "", *self.scale), pool, decoders=self._scored)

    def baselines(self, pool: Sequence[Exercise]) -> dict[str, float]:
        """See :class:`Task`."""
        return baselines(math.exp(self.config.ppo.log_std), pool, self._scored)

    def together(
        self, tensors: Sequence[Mapping[str, Any]], pool: Sequence[Exercise]
    ) -> Ratios | None:
        """See :class:`Task`."""
        return scores(_joined("", {}, tensors), pool, decoders=self._scored)

    def save(
        self, path: Path, card: Mapping[str, Any], tensors: Sequence[Mapping[str, Any]]
    ) -> None:
        """See :class:`Task`."""
        _joined(path.name, card, tensors).save(path)

    def close(self) -> None:
        """See :class:`Task`."""
        self.decoders.close()


class PlacementBatch(DummyVecEnv):
    """VecEnv of :class:`PlacementEnv` in one thread; the last info of an episode has its ratio."""

    envs: list[PlacementEnv]  # type: ignore[assignment]  # narrower than the base's

    def __init__(self, pool: Sequence[Exercise], count: int, most_devices: int) -> None:
        """Create ``count`` environments that draw from one pool."""
        self.pool = pool
        problems = [item.evaluator.problem for item in pool]
        made = partial(PlacementEnv, pool=problems, most_devices=most_devices)
        super().__init__([made] * count)

    def step_wait(self) -> VecEnvStepReturn:
        """Step all environments."""
        observations, rewards, ended, infos = super().step_wait()
        for info in infos:
            if info.get("feasible"):
                info["ratio"] = ratio_of(self.pool, info)
        return observations, rewards, ended, infos

    def choose(self, numbers: NDArray[np.int64]) -> None:
        """Restrict drawing to the problems ``numbers`` of the pool from now on."""
        for environment in self.envs:
            environment.chosen = numbers

    def state(self) -> dict[str, Any]:
        """Return the state of all episodes, JSON compatible."""
        return {"episodes": [environment.state() for environment in self.envs]}

    def restore(self, state: Mapping[str, Any]) -> NDArray[np.float32]:
        """Continue from :meth:`state`; return the last observations (count, 8 + 8 M)."""
        return np.stack(
            [
                environment.restore(own)
                for environment, own in zip(self.envs, state["episodes"], strict=True)
            ]
        )


class OpByOp:
    """Learn to choose devices op by op: MaskablePPO, the plain formulation."""

    format = SEQUENTIAL_FORMAT
    keeps = 1

    def __init__(self, config: TrainingConfig, curriculum: Curriculum) -> None:
        self.config = config
        self.curriculum = curriculum
        clusters = [stage.clusters for stage in config.stage] + [config.test.clusters]
        self.devices = max(max(own.devices) for own in clusters)

    def blank(self, seed: int) -> Learner:
        """See :class:`Task`."""
        count = self.config.ppo.environments
        return Learner(self.config, seed, PlacementBatch(self.curriculum.pool, count, self.devices))

    def learner(self, seed: int, tell: Callable[[float, str], None]) -> Learner:
        """See :class:`Task`; nothing is imitated."""
        return self.blank(seed)

    def tensors(self, network: BasePolicy) -> dict[str, NDArray[Any]]:
        """See :class:`Task`: the network with the names of stable-baselines3."""
        return {
            key: np.ascontiguousarray(value.detach().cpu().numpy())
            for key, value in network.state_dict().items()
        }

    def scores(self, network: BasePolicy, pool: Sequence[Exercise]) -> Ratios:
        """See :class:`Task`."""
        alone, sampled = [], []
        for number, item in enumerate(pool):
            torch.manual_seed(number)
            ratios = _episodes(network, item, self.devices)
            alone.append(ratios[0])
            sampled.append(min(ratios))
        return np.array(alone), np.array(sampled)

    def baselines(self, pool: Sequence[Exercise]) -> dict[str, float]:
        """See :class:`Task`."""
        return baselines(math.exp(self.config.ppo.log_std), pool)

    def together(
        self, tensors: Sequence[Mapping[str, Any]], pool: Sequence[Exercise]
    ) -> Ratios | None:
        """See :class:`Task`: only the best is kept."""
        return None

    def save(
        self, path: Path, card: Mapping[str, Any], tensors: Sequence[Mapping[str, Any]]
    ) -> None:
        """See :class:`Task`."""
        write_whole(file_of(path, WEIGHTS), save(dict(tensors[0])))
        write_card(path, card)

    def close(self) -> None:
        """See :class:`Task`."""


def task_for(
    config: TrainingConfig, curriculum: Curriculum, decoders: Decoders | None = None
) -> Task:
    """Return the task of an algorithm; ``decoders`` of the training graphs are closed with it."""
    if config.algorithm == "maskable-ppo":
        return OpByOp(config, curriculum)
    return SchedulerWeights(config, curriculum, decoders or _decoders(config, curriculum))


def _joined(name: str, card: Mapping[str, Any], tensors: Sequence[Mapping[str, Any]]) -> Policy:
    first, *others = (Policy.of(name, card, own) for own in tensors)
    return replace(first, others=tuple(others))


def _decoders(config: TrainingConfig, curriculum: Curriculum) -> Decoders:
    evaluators = [item.evaluator for item in curriculum.pool]
    if config.workers == "ray":
        from placer.policies.ray_decoders import RayTasks

        return RayTasks(evaluators, config.ray_address)
    return Processes(evaluators, config.workers) if config.workers else InProcess(evaluators)


def ratio_of(pool: Sequence[Exercise], info: Mapping[str, Any]) -> float:
    """Return the step time of an episode that ended, relative to the reference of its problem."""
    return pool[int(info["number"])].ratio(round(info["step_s"] * 1e9))


def _episodes(network: Any, item: Exercise, devices: int) -> list[float]:
    """Return ratios of an episode with the likeliest actions and of 15 with sampled ones."""
    problem = item.evaluator.problem
    environments = [PlacementEnv(pool=[problem], most_devices=devices) for _ in range(1 + SAMPLES)]
    seen = np.stack([environment.reset()[0] for environment in environments])
    ratios = [np.nan] * len(environments)
    while np.isnan(ratios).any():
        masks = np.stack([environment.action_masks() for environment in environments])
        actions = network.predict(seen, action_masks=masks)[0]
        actions[0] = network.predict(seen[:1], action_masks=masks[:1], deterministic=True)[0][0]
        for i, environment in enumerate(environments):
            if np.isnan(ratios[i]):
                seen[i], _, ended, _, info = environment.step(actions[i])
                if ended:
                    ratios[i] = ratio_of([item], info) if info["feasible"] else CANNOT_RUN
    return ratios
