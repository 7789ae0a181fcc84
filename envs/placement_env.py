"""A Gymnasium environment that places a graph op by op."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from envs.backend import Backend, StepResult, check_protocol, evaluated
from envs.costs.roofline import cluster_of
from envs.hardware.cluster import Cluster
from envs.partial_schedule import DEVICE_FEATURES, OP_FEATURES, PartialSchedule
from envs.placement import Placement
from envs.problem import Problem, toy_problem
from envs.runtime import backend_named, costed_problem, extraction_for, runtime_for
from envs.simulator import Simulated
from graphs.graph import GraphArrays
from graphs.graph_file import completed, load_graph

if TYPE_CHECKING:
    import networkx as nx

    from graphs.extract import Workload

LARGEST_FEATURE: Final = 50.0
"""Upper bound of the observation space, above the logarithm of any time or size."""
INVALID_REWARD: Final = -5.0
"""Reward of a masked action or an infeasible placement: a step 150 times the baseline."""
SHORTEST_S: Final = 1e-9
"""Steps without any time count as so long, the resolution of the simulator."""


class PlacementEnv(gym.Env[NDArray[np.float32], np.int64]):
    """Place one op, or one whole co-location group, on a device per step, in topological order.

    Observation: (8 + 8 D,) float32: OP_FEATURES of the op to be placed, then DEVICE_FEATURES of
                 device 0, 1, ..; log1p of times in units of the mean op cost, of bytes in units of
                 the mean edge, and of counts; shares 0 .. 1. With a pool, D is the largest number
                 of devices; features of devices that a problem lacks are 0.
    Action:      index of a device, D of them; ``action_masks()`` (D,) bool: allowed, linked to the
                 devices of all inputs, and with room for the memory known to stay there.
    Reward:      0 until the last op, then log(baseline_s / step_s); higher is better. The baseline
                 is the best single device, or the sum of the cheapest op costs if none is feasible.
    End:         after the last op. A masked action ends the episode at once with INVALID_REWARD;
                 an infeasible final placement gets INVALID_REWARD, too.
    Info:        in the last step ``step_s``, ``baseline_s``, ``feasible``, ``why``, ``parts`` of
                 the backend, and ``placement``.
    Rendering:   mode "ansi": the partial schedule as text.

    Priorities are bottom levels (upward ranks). The features of a partial placement come from a
    list schedule without link queues; the reward comes from ``backend`` alone, a simulator or real
    devices::

        gymnasium.make(
            "placer/Placement-v0", workload=workload, cluster="core:0,core:1", backend="measured"
        )

    On real devices every episode runs its placement; the baseline is measured once, and rewards are
    as noisy as the machine (``parts`` in the info). Close the environment to end the workers.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 4}  # noqa: RUF012 - declared so by Gymnasium

    def __init__(
        self,
        *,
        workload: Workload | None = None,
        graph: nx.DiGraph[str] | str | Path | None = None,
        cluster: Cluster | str | Path = "auto",
        backend: Backend | str = "simulated",
        pool: Sequence[Problem] | None = None,
        most_devices: int | None = None,
        memory: Mapping[str, int] | None = None,
        rounds: int = 5,
        overlap: bool = False,
        render_mode: str | None = None,
    ) -> None:
        """Place a workload, a graph with known costs, or (default) two towers on three devices.

        Args:
            workload: a model with its inputs. Its ops are timed on the devices, whatever the
                backend.
            graph: a graph with known costs, or a graph.json file.
            cluster: a cluster, a cluster.toml file, or names of devices of this machine.
            backend: evaluates placements: ``"simulated"``; ``"measured"``, which runs the workload
                on its devices; or your own.
            pool: problems, of which every episode draws one; with simulated reward.
            most_devices: size of the action space with a pool (default: most devices in it).
            memory: {device name: bytes} that placements may use, if the cluster is given by names.
            rounds: number of runs per measured placement.
            overlap: run with copies that overlap with compute, on torch devices.
            render_mode: "ansi" or None.

        Raises:
            ValueError: there is no such backend, or it needs a workload; several of workload, graph
                and pool are given, or none with memory or overlap; the pool is empty or has
                problems of more devices than ``most_devices``; there is no such device; or copies
                cannot overlap.
            TypeError: your own backend cannot evaluate.
            ExtractionError: the model cannot be extracted, or no placement of it can be run.
            WorkerError: workers do not start, or cannot run the model.
        """
        given = [own for own in (workload, graph, pool) if own is not None]
        if len(given) > 1:
            raise ValueError("give one of workload, graph and pool")
        if workload is None and (memory or overlap):
            raise ValueError("memory and overlap are those of a workload: leave them out")
        runtime = None
        if workload is not None:
            devices = cluster_of(cluster, memory)
            extraction = extraction_for(workload, devices.names)
            runtime = runtime_for(extraction, devices, overlap=overlap)
            if backend == "measured" and not runtime.places:
                from graphs.workload import ExtractionError  # imports torch

                raise ExtractionError(f"no placement can be run: {extraction.core_refusal}")
            pool = [costed_problem(runtime, devices)]
        elif graph is not None:
            pool = [problem_of(graph, cluster)]
        self.pool = [toy_problem()] if pool is None else list(pool)
        if not self.pool:
            raise ValueError("the pool is empty: give at least one problem, or leave it out")
        if len(self.pool) > 1 and backend != "simulated":
            raise ValueError('steps of a pool are simulated: leave backend="simulated"')
        self._started = ExitStack()
        self._backend: Backend | None = None  # None: each problem has a simulator
        if not isinstance(backend, str):
            check_protocol(backend)
            self._backend = backend
        elif backend != "simulated":
            self._backend = backend_named(
                backend,
                self.pool[0],
                runtime,
                rounds=rounds,
                until_closed=self._started,
            )
        self.render_mode = render_mode
        needed = max(problem.device_count for problem in self.pool)
        self._device_count = count = needed if most_devices is None else most_devices
        if count < needed:
            raise ValueError(f"most_devices is {count}, but a problem has {needed} devices")
        shape = (len(OP_FEATURES) + count * len(DEVICE_FEATURES),)
        self.observation_space = spaces.Box(0.0, LARGEST_FEATURE, shape, np.float32)
        self.action_space = spaces.Discrete(count)
        self._evaluators: dict[int, _Evaluator] = {}
        self._begin(0)

    @property
    def problem(self) -> Problem:
        """The problem of the current episode."""
        return self._schedule.problem

    @property
    def backend(self) -> Backend:
        """The backend that evaluates the placement of the current episode."""
        return self._evaluator.backend

    def close(self) -> None:
        """End what was started to run the model; a backend that was passed in stays open."""
        self._schedule.current = -1
        self._started.close()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start an episode with no op placed, of a drawn problem or number ``options["number"]``.

        The info has the ``number`` of the problem in the pool. A ValueError says that there is none
        of the number in ``options``.
        """
        super().reset(seed=seed)
        number = (options or {}).get("number")
        if number is None:
            number = self.np_random.integers(len(self.pool))
        if number not in range(len(self.pool)):
            last = len(self.pool) - 1
            raise ValueError(f"number is {number!r}: problems have numbers from 0 to {last}")
        return self._begin(int(number)), {"number": int(number)}

    def step(
        self, action: np.int64 | int
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Put the current op and its group on device ``action``.

        Raises:
            RuntimeError: the episode has ended; call :meth:`reset` first.
        """
        schedule = self._schedule
        if schedule.current < 0:
            raise RuntimeError("the episode has ended: call reset() before step()")
        device = int(action)
        if not (0 <= device < self.problem.device_count and schedule.mask()[device]):
            why = f"device {device} is masked for op {self.problem.graph.ids[schedule.current]!r}"
            schedule.current = -1
            return self._observe(), INVALID_REWARD, True, False, {"feasible": False, "why": why}
        schedule.place(device)
        if schedule.current >= 0:
            return self._observe(), 0.0, False, False, {}
        placement = self._evaluator.placement(schedule.devices)
        [result] = self._evaluator.results([placement])
        reward, baseline_s = INVALID_REWARD, self._evaluator.baseline_s()
        if result.feasible:
            reward = math.log(max(baseline_s, SHORTEST_S) / max(result.step_s, SHORTEST_S))
        info = {
            "number": self._number,
            "step_s": result.step_s,
            "baseline_s": baseline_s,
            "feasible": result.feasible,
            "why": result.why,
            "parts": dict(result.parts),
            "placement": placement,
        }
        return self._observe(), reward, True, False, info

    def action_masks(self) -> NDArray[np.bool_]:
        """Return which devices are valid, (D,); see :meth:`PartialSchedule.mask`."""
        mask = self._schedule.mask()
        return np.concatenate([mask, np.zeros(self._device_count - len(mask), np.bool_)])

    def render(self) -> str | None:
        """Return the schedule of the ops placed so far as text, in mode "ansi"."""
        return str(self._schedule) if self.render_mode == "ansi" else None

    def _begin(self, number: int) -> NDArray[np.float32]:
        if number not in self._evaluators:
            problem = self.pool[number]
            self._evaluators[number] = _Evaluator(problem, self._backend or Simulated(problem))
        self._number, self._evaluator = number, self._evaluators[number]
        self._schedule = self._evaluator.schedule
        self._schedule.clear()
        return self._observe()

    def _observe(self) -> NDArray[np.float32]:
        padded = np.zeros(self.observation_space.shape or (), np.float32)
        features = self._schedule.features()
        padded[: len(features)] = features
        return padded


class _Evaluator:
    """A problem of the pool with its schedule, its backend and the step time of its baseline."""

    def __init__(self, problem: Problem, backend: Backend) -> None:
        self.schedule = PartialSchedule(problem)
        self.backend = backend
        self._baseline_s: float | None = None

    def placement(self, devices: NDArray[np.int32]) -> Placement:
        problem = self.schedule.problem
        return Placement.of(problem.graph, problem.cluster, devices, self.schedule.priority)

    def baseline_s(self) -> float:
        """Return the step time of the best single device, evaluated once."""
        if self._baseline_s is None:
            problem = self.schedule.problem
            everywhere = np.flatnonzero(problem.allowed.all(axis=0))
            single = [
                self.placement(np.full(problem.op_count, device, np.int32)) for device in everywhere
            ]
            steps = [r.step_s for r in self.results(single) if r.feasible]
            self._baseline_s = min(steps, default=float(self.schedule.cheapest_ns.sum()) / 1e9)
        return self._baseline_s

    def results(self, placements: Sequence[Placement]) -> list[StepResult]:
        """Return the backend's results; Ctrl-C, at which a measuring one only stops, is raised."""
        results = evaluated(self.backend, placements)
        if getattr(self.backend, "interrupted", False):
            raise KeyboardInterrupt
        return results


def problem_of(graph: nx.DiGraph[str] | str | Path, cluster: Cluster | str | Path) -> Problem:
    """Return the problem of placing a graph with known costs on a cluster; both may be files."""
    known = load_graph(Path(graph)) if isinstance(graph, str | Path) else completed(graph)
    return Problem.of(GraphArrays.from_graph(known), cluster_of(cluster, has_costs=True))
