"""A Gymnasium environment that places a graph op by op."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from envs.backend import Backend
from envs.backends import backend_named
from envs.cluster import Cluster
from envs.discover import discover
from envs.levels import levels
from envs.placement import Placement
from envs.problem import Problem
from envs.toy_problem import toy_problem
from graphs.optimizer import Optimizer
from graphs.precision import FULL

if TYPE_CHECKING:
    from torch import Tensor, nn

OP_FEATURES: Final = (
    "cost",
    "output_transfer",
    "head_share",
    "tail_share",
    "in_degree",
    "out_degree",
    "group_size",
    "placed_share",
)
DEVICE_FEATURES: Final = (
    "cost_here",
    "load",
    "free_at",
    "inputs_at",
    "finish_at",
    "transfer_bytes",
    "memory_left_share",
    "allowed",
)
LARGEST_FEATURE: Final = 50.0
"""Upper bound of the observation space, above the logarithm of any time or size."""
INVALID_REWARD: Final = -5.0
"""Reward of a masked action or an infeasible placement: a step 150 times the baseline."""


class PlacementEnv(gym.Env[NDArray[np.float32], np.int64]):
    """Place one op, or one whole co-location group, on a device per step, in topological order.

    Observation: (8 + 8 D,) float32: OP_FEATURES of the op to be placed, then DEVICE_FEATURES of
                 device 0, 1, ..; log1p of times in units of the mean op cost, of bytes in units of
                 the mean edge, and of counts; shares 0 .. 1.
    Action:      index of a device, D of them; ``action_masks()`` (D,) bool: allowed, linked to the
                 devices of all inputs, and with room for the memory known to stay there.
    Reward:      0 until the last op, then log(baseline_s / step_s); higher is better. The baseline
                 is the best single device, or the sum of the cheapest op costs if none is feasible.
    End:         after the last op. A masked action ends the episode at once with INVALID_REWARD;
                 an infeasible final placement gets INVALID_REWARD, too.
    Info:        in the last step ``step_s``, ``baseline_s``, ``feasible``, ``why``, ``parts`` of
                 the backend, and ``placement``.

    Priorities are bottom levels (upward ranks). The features of a partial placement come from a
    list schedule without link queues; the reward comes from ``backend`` alone, a simulator or real
    devices::

        gymnasium.make(
            "placer/Placement-v0",
            backend="measured",
            model=model,
            inputs=(images, labels),
            loss=torch.nn.functional.cross_entropy,
            devices="core:0,core:1",
        )

    On real devices every episode runs its placement; the baseline is measured once, and rewards are
    as noisy as the machine (``parts`` in the info). Close the environment to end the workers.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - declared so by Gymnasium

    def __init__(
        self,
        problem: Problem | None = None,
        backend: Backend | str = "simulated",
        *,
        model: nn.Module | None = None,
        inputs: Any = None,
        loss: Callable[[Any, Any], Tensor] | None = None,
        training: bool = True,
        optimizer: str | Optimizer | None = None,
        dtype: str = FULL,
        devices: str | Cluster = "auto",
        memory: Mapping[str, int] | None = None,
        rounds: int = 5,
        overlap: bool = False,
    ) -> None:
        """Place a problem (default: two towers on three devices) or the ops of a model.

        Args:
            problem: the placement problem, if no model is given.
            backend: evaluates placements: ``"simulated"``; ``"measured"``, which runs the model on
                its devices; or your own, such as ``Simulated(problem, threads=N)``, which evaluates
                several placements at once.
            model: the model to place. Its ops are timed on the devices, whatever the backend.
            inputs: its example inputs, the target of the loss last.
            loss: called with the model's output and the target, returns a scalar.
            training: whether a step is forward and backward, or inference only.
            optimizer: include parameter updates in a training step: ``"sgd"``, ``"momentum"``,
                ``"adam"`` or ``"adamw"``.
            dtype: ``"bf16"`` puts forward pass and loss under ``torch.autocast``.
            devices: devices of this machine, by name or as a cluster.
            memory: {device name: bytes} that placements may use on each device.
            rounds: number of runs per measured placement.
            overlap: run with copies that overlap with compute, on torch devices.

        Raises:
            ValueError: there is no such backend, or it needs a model; both a problem and a model
                are given; there is no such device, optimizer or dtype; or copies cannot overlap.
            ExtractionError: the model cannot be extracted.
            WorkerError: workers do not start, or cannot run the model.
        """
        if model is not None and problem is not None:
            raise ValueError("give either a problem or a model, which makes one")
        runtime = None
        if model is not None:
            from envs.runtime import problem_of, runtime_for
            from graphs.extract import Step, extract

            step = Step.of(
                model,
                inputs,
                loss,
                training=training,
                optimizer=Optimizer.of(optimizer),
                dtype=dtype,
            )
            cluster = devices if isinstance(devices, Cluster) else discover(devices, memory)
            runtime = runtime_for(extract(step), cluster, overlap=overlap)
            problem = problem_of(runtime, cluster)
        self.problem = problem or toy_problem()
        self._started = ExitStack()
        if isinstance(backend, str):
            backend = backend_named(
                backend,
                self.problem,
                runtime,
                rounds=rounds,
                until_closed=self._started,
            )
        self.backend = backend
        count = self.problem.device_count
        shape = (len(OP_FEATURES) + count * len(DEVICE_FEATURES),)
        self.observation_space = spaces.Box(0.0, LARGEST_FEATURE, shape, np.float32)
        self.action_space = spaces.Discrete(count)
        self._baseline_s: float | None = None
        self._current = -1
        self._prepare()
        self._start()

    def close(self) -> None:
        """End what was started to run the model; a backend that was passed in stays open."""
        self._current = -1
        self._started.close()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start a new episode with no op placed. Episodes contain no randomness."""
        super().reset(seed=seed)
        self._start()
        return self._observe(), {}

    def step(
        self, action: np.int64 | int
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Put the current op and its group on device ``action``.

        Raises:
            RuntimeError: the episode has ended; call :meth:`reset` first.
        """
        if self._current < 0:
            raise RuntimeError("the episode has ended: call reset() before step()")
        device = int(action)
        if not (0 <= device < self.problem.device_count and self.action_masks()[device]):
            why = f"device {device} is masked for op {self.problem.graph.ids[self._current]!r}"
            self._current = -1
            return self._observe(), INVALID_REWARD, True, False, {"feasible": False, "why": why}
        members = self._members[self._current]
        self._devices[members] = device
        self._room_bytes[device] -= self._stays_bytes[self._current]
        self._advance()
        if self._current >= 0:
            return self._observe(), 0.0, False, False, {}
        placement = Placement.of(
            self.problem.graph, self.problem.cluster, self._devices, self._priority
        )
        result = self.backend.evaluate([placement])[0]
        reward = INVALID_REWARD
        if result.feasible and result.step_s > 0:
            reward = math.log(self.baseline_s() / result.step_s)
        info = {
            "step_s": result.step_s,
            "baseline_s": self.baseline_s(),
            "feasible": result.feasible,
            "why": result.why,
            "parts": dict(result.parts),
            "placement": placement,
        }
        return self._observe(), reward, True, False, info

    def action_masks(self) -> NDArray[np.bool_]:
        """Return the devices that may be chosen, (D,); if none is left, all allowed ones."""
        if self._current < 0:
            return np.ones(self.problem.device_count, np.bool_)
        allowed = self.problem.allowed[self._current]
        mask = allowed & (self._room_bytes >= self._stays_bytes[self._current])
        for op in self._members[self._current]:
            for source in self._inputs(op):
                if self._devices[source] >= 0:
                    mask &= self.problem.connected[self._devices[source]]
        return np.asarray(mask if mask.any() else allowed)

    def baseline_s(self) -> float:
        """Return the step time of the best single device, evaluated once."""
        if self._baseline_s is None:
            everywhere = np.flatnonzero(self.problem.allowed.all(axis=0))
            single = [
                Placement.of(
                    self.problem.graph,
                    self.problem.cluster,
                    np.full(self.problem.op_count, device),
                    self._priority,
                )
                for device in everywhere
            ]
            steps = [r.step_s for r in self.backend.evaluate(single) if r.feasible]
            self._baseline_s = min(steps, default=float(self._cheapest_ns.sum()) / 1e9)
        return self._baseline_s

    def _prepare(self) -> None:
        # Everything that stays the same across episodes.
        problem, graph = self.problem, self.problem.graph
        count = problem.op_count
        allowed_ns = np.where(problem.allowed, problem.cost_ns, 0).sum(axis=1)
        mean_ns = allowed_ns / problem.allowed.sum(axis=1)
        self._cheapest_ns = np.where(problem.allowed, problem.cost_ns, np.iinfo(np.int64).max).min(
            axis=1
        )
        self._scale_ns = max(float(self._cheapest_ns.mean()), 1.0)
        pairs = problem.connected & ~np.eye(problem.device_count, dtype=np.bool_)
        latency_ns = problem.latency_s[pairs].mean() * 1e9 if pairs.any() else 0.0
        ns_per_byte = (1e9 / problem.bandwidth_bytes_per_s[pairs]).mean() if pairs.any() else 0.0
        edge_ns = latency_ns + graph.edge_bytes[graph.predecessor_edge] * ns_per_byte
        head, tail = levels(
            np.array(graph.topological),
            np.array(graph.predecessor_start),
            np.array(graph.predecessors),
            edge_ns,
            mean_ns,
        )
        self._priority = tail
        path_ns = max(float((head + tail).max()), 1.0)
        self._members = [np.array([op]) for op in range(count)]
        for group in range(int(graph.group.max(initial=-1)) + 1):
            together = np.flatnonzero(graph.group == group)
            for op in together:
                self._members[op] = together
        self._mean_bytes = max(float(graph.edge_bytes.mean()) if graph.edge_count else 0.0, 1.0)
        stays = graph.resident_bytes + problem.held_bytes
        self._stays_bytes = np.array([stays[members].sum() for members in self._members])
        self._unit_ns = np.array(
            [problem.cost_ns[members].sum(axis=0) for members in self._members]
        )
        self._op_features = np.stack(
            [
                np.log1p(mean_ns / self._scale_ns),
                np.log1p((latency_ns + graph.output_bytes * ns_per_byte) / self._scale_ns),
                head / path_ns,
                tail / path_ns,
                np.log1p(np.diff(graph.predecessor_start)),
                np.log1p(np.diff(graph.successor_start)),
                np.log1p([len(members) for members in self._members]),
            ],
            axis=1,
        )

    def _start(self) -> None:
        devices = self.problem.device_count
        self._devices = np.full(self.problem.op_count, -1, np.int32)
        self._finish_ns = np.zeros(self.problem.op_count)
        self._free_ns = np.zeros(devices)
        self._load_ns = np.zeros(devices)
        self._room_bytes = np.array(self.problem.memory_bytes)
        self._position = 0
        self._current = -1
        self._advance()

    def _advance(self) -> None:
        # Schedules ops that have a device; the next one without becomes the current op.
        order = self.problem.graph.topological
        while self._position < len(order) and self._devices[order[self._position]] >= 0:
            op = int(order[self._position])
            device = self._devices[op]
            begin = max(self._free_ns[device], self._inputs_at_ns(op)[0][device])
            cost = self.problem.cost_ns[op, device]
            self._finish_ns[op] = self._free_ns[device] = begin + cost
            self._load_ns[device] += cost
            self._position += 1
        self._current = int(order[self._position]) if self._position < len(order) else -1

    def _inputs(self, op: int) -> NDArray[np.int32]:
        graph = self.problem.graph
        return graph.predecessors[graph.predecessor_start[op] : graph.predecessor_start[op + 1]]

    def _inputs_at_ns(self, op: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        # Earliest time of all inputs on each device, (D,), and the bytes to transfer there, (D,).
        problem, graph = self.problem, self.problem.graph
        arrival = np.zeros(problem.device_count)
        bring = np.zeros(problem.device_count)
        span = slice(graph.predecessor_start[op], graph.predecessor_start[op + 1])
        for source, edge in zip(
            graph.predecessors[span], graph.predecessor_edge[span], strict=True
        ):
            home = self._devices[source]
            size = float(graph.edge_bytes[edge])
            away = np.arange(problem.device_count) != home
            transfer = problem.latency_s[home] + size / problem.bandwidth_bytes_per_s[home]
            arrival = np.maximum(arrival, self._finish_ns[source] + away * transfer * 1e9)
            bring += size * away
        return arrival, bring

    def _observe(self) -> NDArray[np.float32]:
        if self._current < 0:
            return np.zeros(self.observation_space.shape or (), np.float32)
        op = self._current
        inputs_at, bring = self._inputs_at_ns(op)
        now = float(self._free_ns.min())
        begin = np.maximum(inputs_at, self._free_ns)
        times = (
            self._unit_ns[op],
            self._load_ns - self._load_ns.min(),
            self._free_ns - now,
            np.maximum(inputs_at - now, 0.0),
            begin - now + self._unit_ns[op],
        )
        room = np.clip(self._room_bytes / np.maximum(self.problem.memory_bytes, 1), 0.0, 1.0)
        devices = np.stack(
            [
                *(np.log1p(ns / self._scale_ns) for ns in times),
                np.log1p(bring / self._mean_bytes),
                room,
                self.action_masks(),
            ],
            axis=1,
        )
        own = np.append(self._op_features[op], self._position / self.problem.op_count)
        return np.concatenate([own, devices.ravel()]).astype(np.float32)
