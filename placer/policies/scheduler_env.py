"""The scheduler's weights as the action of a one-step environment, and of a VecEnv for training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvStepReturn

from envs.costs.roofline import cluster_of
from envs.hardware.cluster import Cluster
from envs.partial_schedule import PartialSchedule, schedule_chart
from envs.placement_env import problem_of
from envs.problem import toy_problem
from envs.runtime import BACKENDS, costed_problem, extraction_for, runtime_for
from envs.simulator import Simulator
from graphs.text import suggestion
from placer.policies.decoders import Decoders, InProcess
from placer.policies.network import ACTION_SCALE, FARTHEST, normalised
from placer.policies.pool import Exercise, exercise
from placer.policies.rewards import TOGETHER, Rewards, added_to_best, plain_rewards
from placer.policies.summary import FEATURES
from placer.search.list_scheduler.decoder import HEFT, WEIGHT_COUNT

if TYPE_CHECKING:
    import networkx as nx

    from graphs.extract import Workload


class SchedulerEnv(gym.Env[NDArray[np.float32], NDArray[np.float32]]):
    """Set the weights of the list scheduler for a problem; an episode has one step.

    Observation: (F,) float32 in -2 .. 2: the summary of a problem drawn from the pool, normalised
                 by the pool's mean and standard deviation.
    Action:      (K,) float32 in -1 .. 1; scheduler weights = HEFT + 2 * action.
    Reward:      -10 log(step / reference), the reference being the best of single device, HEFT and
                 ETF; not below -20. Higher is better, 0 equals the best heuristic.
    Info:        ``step_ns``, ``reference_ns`` and ``family``.
    Rendering:   mode "ansi": the simulated schedule of the last step as text.

    Steps are simulated, or measured beside the reference with ``backend="measured"``; then close
    the environment to end the workers.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 4}  # noqa: RUF012 - declared so by Gymnasium

    def __init__(
        self,
        *,
        workload: Workload | None = None,
        graph: nx.DiGraph[str] | str | Path | None = None,
        cluster: Cluster | str | Path = "auto",
        backend: str = "simulated",
        pool: Sequence[Exercise] | None = None,
        memory: Mapping[str, int] | None = None,
        render_mode: str | None = None,
    ) -> None:
        """Place a workload, a graph with known costs, or (default) two towers on three devices.

        Args:
            workload: a model with its inputs. Its ops are timed on the devices, whatever the
                backend.
            graph: a graph with known costs, or a graph.json file.
            cluster: a cluster, a cluster.toml file, or names of devices of this machine.
            backend: ``"simulated"``, or ``"measured"``, which runs the workload on its devices.
            pool: problems, of which every episode draws one; with simulated reward.
            memory: {device name: bytes} that placements may use, if the cluster is given by names.
            render_mode: "ansi" or None.

        Raises:
            ValueError: several of workload, graph and pool are given, or memory without a
                workload; the pool is empty; the backend does not exist, is your own, or needs a
                workload; or there is no such device.
            ExtractionError: the model cannot be extracted.
            WorkerError: workers do not start, or cannot run the model.
        """
        if sum(source is not None for source in (workload, graph, pool)) > 1:
            raise ValueError("give one of workload, graph and pool")
        if workload is None and memory:
            raise ValueError("memory is that of a workload: leave it out")
        if not isinstance(backend, str):
            raise ValueError(
                "a backend of your own is for placer/Placement-v0: here steps are simulated or "
                "measured"
            )
        if backend not in BACKENDS:
            hint = suggestion(backend, BACKENDS)
            raise ValueError(
                f"there is no backend {backend!r}, there are {', '.join(BACKENDS)}{hint}"
            )
        if backend == "measured":
            if workload is None:
                raise ValueError('backend "measured" runs a model: give a workload')
            from placer.policies.measured_decoders import MeasuredDecoders

            measured = MeasuredDecoders.of(workload, cluster_of(cluster, memory))
            self.decoders: Decoders = measured
            self.pool = [measured.item]
        else:
            if workload is not None:
                devices = cluster_of(cluster, memory)
                runtime = runtime_for(extraction_for(workload, devices.names), devices)
                pool = [exercise(costed_problem(runtime, devices))]
            elif graph is not None:
                pool = [exercise(problem_of(graph, cluster))]
            self.pool = [exercise(toy_problem(), "two-towers")] if pool is None else list(pool)
            if not self.pool:
                raise ValueError("the pool is empty: give at least one exercise, or leave it out")
            self.decoders = InProcess([item.evaluator for item in self.pool])
        self.feature_mean, self.feature_deviation = pool_scale(self.pool)
        self.observation_space = observation_space()
        self.action_space = action_space()
        self.render_mode = render_mode
        self._number = 0
        self._weights: NDArray[np.float64] | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Draw a problem."""
        super().reset(seed=seed)
        self._number = int(self.np_random.integers(len(self.pool)))
        self._weights = None
        return self._observe(), {}

    def step(
        self, action: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Schedule with these weights; the episode ends."""
        item = self.pool[self._number]
        self._weights = weights_of(action[None])
        cost = int(self.decoders.costs(np.array([self._number]), self._weights)[0])
        info = {"step_ns": cost, "reference_ns": item.reference_ns, "family": item.family}
        ratio = np.array([item.ratio(max(cost, 1))])
        reward = plain_rewards(1).of(np.zeros(1, np.int64), ratio)[0]
        return self._observe(), float(reward), True, False, info

    def render(self) -> str | None:
        """Return the simulated schedule of the last step as text, in mode "ansi"."""
        if self.render_mode != "ansi":
            return None
        evaluator = self.pool[self._number].evaluator
        if self._weights is None:
            return str(PartialSchedule(evaluator.problem))
        devices, priority, _ = evaluator.decode(self._weights)
        schedule = Simulator(evaluator.problem, memory=False).run(devices[0], priority[0])
        return schedule_chart(evaluator.problem, devices[0], schedule.start_ns, schedule.end_ns)

    def close(self) -> None:
        """End what was started to run the model."""
        self.decoders.close()

    def _observe(self) -> NDArray[np.float32]:
        summary = self.pool[self._number].summary
        return normalised(summary, self.feature_mean, self.feature_deviation)


class SchedulerBatch(VecEnv):
    """VecEnv of :class:`SchedulerEnv`; problems differ from episode to episode.

    The info of every step has the ``ratio`` of the cost to the reference.
    """

    def __init__(
        self,
        pool: Sequence[Exercise],
        count: int,
        seed: int,
        decoders: Decoders | None = None,
        scale: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None,
        rewards: Rewards | None = None,
        best_of: int = 1,
    ) -> None:
        """Create ``count`` environments that draw from one pool; ``decoders`` hold its problems.

        Observations are in units of ``scale``, by default the pool's own. ``rewards`` default to
        those of the plain environment. With ``best_of`` above 1, TOGETHER environments in a row
        have the same problem and are rewarded by what they add to the best of so many.
        """
        super().__init__(count, observation_space(), action_space())
        self.pool = list(pool)
        self.decoders = decoders or InProcess([item.evaluator for item in self.pool])
        self.rewards = rewards or plain_rewards(len(self.pool))
        self.best_of = best_of
        self.chosen = np.arange(len(self.pool))
        self._random = np.random.default_rng(seed)
        mean, deviation = scale or pool_scale(self.pool)
        self._observations = np.stack(
            [normalised(item.summary, mean, deviation) for item in self.pool]
        )
        self._current = np.zeros(count, np.int64)
        self._actions = np.zeros((count, WEIGHT_COUNT), np.float32)

    def reset(self) -> NDArray[np.float32]:
        """Draw problems; return their observations (count, F)."""
        together = TOGETHER if self.best_of > 1 else 1
        drawn = self._random.integers(len(self.chosen), size=self.num_envs // together)
        self._current = np.repeat(self.chosen[drawn], together)
        return self._observations[self._current]

    def step_async(self, actions: NDArray[np.float32]) -> None:
        """Store the actions (count, K)."""
        self._actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        """Decode all actions, and draw the next problems."""
        costs = self.decoders.costs(self._current, weights_of(self._actions))
        items = [self.pool[number] for number in self._current]
        ratios = [
            item.ratio(max(cost, 1)) for item, cost in zip(items, costs.tolist(), strict=True)
        ]
        rewards = self.rewards.of(self._current, np.array(ratios))
        if self.best_of > 1:
            rewards = added_to_best(rewards.reshape(-1, TOGETHER), self.best_of).reshape(-1)
        infos: list[dict[str, Any]] = [
            {"terminal_observation": self._observations[number], "ratio": ratio}
            for number, ratio in zip(self._current, ratios, strict=True)
        ]
        return self.reset(), rewards, np.ones(self.num_envs, np.bool_), infos

    def choose(self, numbers: NDArray[np.int64]) -> None:
        """Restrict drawing to the problems ``numbers`` of the pool from now on."""
        self.chosen = numbers

    def state(self) -> dict[str, Any]:
        """Return the random state and the current problems, JSON compatible."""
        return {"random": self._random.bit_generator.state, "current": self._current.tolist()}

    def restore(self, state: Mapping[str, Any]) -> NDArray[np.float32]:
        """Continue from :meth:`state`; return the last observations (count, F)."""
        self._random.bit_generator.state = state["random"]
        self._current = np.array(state["current"], np.int64)
        return self._observations[self._current]

    def close(self) -> None:
        """Do nothing."""

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """Return an attribute, once for each of the environments."""
        return [getattr(self, attr_name, None) for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Set an attribute of the batch, which all environments share."""
        setattr(self, attr_name, value)

    def env_method(
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **kwargs: Any
    ) -> list[Any]:
        """Call a method, once for each of the environments."""
        method = getattr(self, method_name)
        return [method(*method_args, **kwargs) for _ in self._get_indices(indices)]

    def env_is_wrapped(
        self, wrapper_class: type[gym.Wrapper[Any, Any, Any, Any]], indices: VecEnvIndices = None
    ) -> list[bool]:
        """Return False for each of the environments."""
        return [False for _ in self._get_indices(indices)]


def observation_space() -> gym.Space[NDArray[np.float32]]:
    """Return the space of normalised summaries (F,)."""
    return spaces.Box(-FARTHEST, FARTHEST, (len(FEATURES),), np.float32)


def action_space() -> gym.Space[NDArray[np.float32]]:
    """Return the space of offsets from HEFT (K,), in units of ACTION_SCALE."""
    return spaces.Box(-1.0, 1.0, (WEIGHT_COUNT,), np.float32)


def pool_scale(pool: Sequence[Exercise]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return mean and standard deviation (F,) of the summaries of a pool; 1 if all are equal."""
    summaries = np.stack([item.summary for item in pool])
    deviation = summaries.std(axis=0)
    return (
        summaries.mean(axis=0).astype(np.float32),
        np.where(deviation > 1e-6, deviation, 1.0).astype(np.float32),
    )


def weights_of(actions: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return scheduler weights (B, K) of actions (B, K)."""
    return np.asarray(HEFT + ACTION_SCALE * np.clip(actions.astype(np.float64), -1.0, 1.0))
