"""The runtime of pinned cores: worker processes run the joint graph op by op.

A graph of modules is run by the model's own code, in one thread of this process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Final

import networkx as nx

from envs.backend import ProgressCallback
from envs.core_runtime.executor import (
    CoreExecutor,
    alone,
    is_joined,
    joined_device,
    modules_placed,
    runs_unplaced,
    unplaced,
)
from envs.costs.cached_costs import MeasuredCosts, OpCosts, StepCosts, first_of_kinds
from envs.costs.factors import Factors
from envs.costs.hand_over import hand_over_costs
from envs.costs.ops import core_costs
from envs.costs.roofline import SOURCE, check_cluster, roofline_costs
from envs.executors.cores.instruction_lists import device_lists, priority_order
from envs.executors.cores.memory import WorkerMemory
from envs.executors.cores.placed_model import PlacedModel
from envs.executors.modules_on_cores import moving_s
from envs.executors.unplaced import UnplacedModel
from envs.hardware.cluster import Cluster, Device
from envs.hardware.discover import cores_of, is_local_core_set, present
from envs.hardware.host import Host
from envs.measured import FEWEST_ROUNDS, Measured, turn_s
from envs.placement import Placement
from envs.problem import Problem, without_hand_over
from envs.simulator.schedule import Schedule, issue_order
from graphs.extract import Extraction
from graphs.extract.placeable import gradient_makers, module_map
from graphs.graph import GraphArrays

MEASURED_S: Final = 0.5
MOST_ROUNDS: Final = 7
FINAL_S: Final = 6.0
FEWEST_FINAL_ROUNDS: Final = 5
MOST_FINAL_ROUNDS: Final = 21
HELD: Final = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "saved_bytes")
"""Sizes of ops that add up in the memory of a device that runs all of them."""


class CoreRuntime:
    """The runtime of pinned cores: every op can be placed, or none, see ``core_refusal``.

    A step whose ops cannot be placed runs unplaced only. Of a module graph, every module can be
    placed. It also simulates clusters with devices that are not on this machine.
    """

    def __init__(self, extraction: Extraction, cluster: Cluster) -> None:
        self.extraction = extraction
        self._by_modules = extraction.step_program is None
        self.graph = module_map(extraction).graph if self._by_modules else extraction.graph
        self.places = not extraction.core_refusal
        self.limits: Mapping[str, int] = {
            device.name: device.memory_bytes for device in cluster.devices
        }

    def costs(
        self, cluster: Cluster, *, fresh: bool = False, progress: ProgressCallback | None = None
    ) -> StepCosts:
        """Return the costs of ops and of the hand-over, measured by the workers or cached."""
        ops = self.op_costs(cluster, fresh=fresh, progress=progress)
        handed, first = self._hand_over(cluster), first_of_kinds(cluster.devices[:1])
        one = {} if handed is None else handed.costs(first, fresh=fresh)
        return StepCosts(ops=ops, hand_over_s=_hand_over_s(one))

    def op_costs(
        self, cluster: Cluster, *, fresh: bool = False, progress: ProgressCallback | None = None
    ) -> dict[str, OpCosts]:
        """Return the costs of ops, {device kind: costs}, measured in context or cached.

        Kinds without a core set on this machine get a roofline estimate from their rates.
        """
        check_cluster(cluster)
        here = first_of_kinds([one for one in cluster.devices if is_local_core_set(one.name)])
        described = [device for device in cluster.devices if device.kind not in here]
        unplaced = is_joined(cluster.names)
        beside = self._at_once(cluster)
        known = core_costs(self.extraction, progress, beside=beside, unplaced=unplaced)
        costs = known.costs(here, fresh=fresh) if here else {}
        for kind, cost_s in roofline_costs(self.graph, described).items():
            costs[kind] = OpCosts.of_one_source(cost_s, SOURCE)
        return costs

    def known_costs(self, cluster: Cluster, *, unplaced: bool = False) -> StepCosts | None:
        """Return the cached costs on cores of this machine, None unless all are cached."""
        beside, unplaced = self._at_once(cluster), unplaced or is_joined(cluster.names)
        costs = core_costs(self.extraction, beside=beside, unplaced=unplaced)
        ops = costs.known(first_of_kinds(cluster.devices))
        handed, first = self._hand_over(cluster), first_of_kinds(cluster.devices[:1])
        one = {} if handed is None else handed.known(first)
        if ops is None or one is None:
            return None
        return StepCosts(ops=ops, hand_over_s=_hand_over_s(one))

    def keep_factors(self, cluster: Cluster, factors: Factors, *, unplaced: bool = False) -> None:
        """Keep factors of costs on cores of this machine, or of the unplaced model there."""
        unplaced = unplaced or is_joined(cluster.names)
        costs = core_costs(self.extraction, unplaced=unplaced)
        costs.keep_factors(first_of_kinds(cluster.devices), factors)

    def _at_once(self, cluster: Cluster) -> list[Device]:
        """Return the single cores of this machine, none if the step may not fit on each of them."""
        here = [device for device in cluster.devices if is_local_core_set(device.name)]
        cores = [device for device in here if len(cores_of(device.name)) == 1]
        nodes = self.graph.nodes.values()
        held_bytes = sum(node[name] for node in nodes for name in HELD)
        held_bytes += max(node["output_bytes"] + node["workspace_bytes"] for node in nodes)
        return cores if all(held_bytes <= core.memory_bytes for core in cores) else []

    def _hand_over(self, cluster: Cluster) -> MeasuredCosts | None:
        """Return the cost of handing over a step; None where workers do not run it."""
        handed = self._has_workers and all(map(is_local_core_set, cluster.names))
        if not handed or is_joined(cluster.names):
            return None
        return hand_over_costs(self.extraction)

    def planned(self, cluster: Cluster) -> Cluster:
        """Return the cluster without the memory that workers hold before their first step.

        Modules are run by one thread, which is the host of all cores and moves between them.
        """
        if self._by_modules and not is_joined(cluster.names):
            hosts = (Host(devices=cluster.names, autograd=True),)
            links = (
                replace(link, latency_s=max(link.latency_s, moving_s())) for link in cluster.links
            )
            return replace(cluster, hosts=hosts, links=tuple(links))
        if not self._has_workers or is_joined(cluster.names):
            return cluster
        held_bytes = self._memory.held_bytes()
        devices = tuple(
            replace(device, memory_bytes=max(device.memory_bytes - held_bytes, 0))
            if is_local_core_set(device.name)
            else device
            for device in cluster.devices
        )
        return replace(cluster, devices=devices)

    def gradient_makers(self) -> Mapping[str, Sequence[str]]:
        """Return the ops that compute the gradients of each op's parameters."""
        return gradient_makers(self.extraction)

    def order(self, problem: Problem, schedule: Schedule) -> list[int]:
        """Return ops by start time, of modules as they are issued."""
        return issue_order(problem, schedule)

    def peak_memory_bytes(
        self, placement: Placement, order: Sequence[int]
    ) -> Mapping[str, int] | None:
        """Return the memory of the workers; None if they cannot run the placement here."""
        names = placement.device_names
        is_run = self._has_workers and placement.micro_batches == 1
        if not is_run or runs_unplaced(placement) or not all(map(is_local_core_set, names)):
            return None
        lists = device_lists(self.extraction.program, placement.devices, order, len(names))
        peaks_bytes = [self._memory.peak_bytes(instructions) for instructions in lists]
        return dict(zip(names, peaks_bytes, strict=True))

    @property
    def _has_workers(self) -> bool:
        return self.places and not self._by_modules

    @cached_property
    def _memory(self) -> WorkerMemory:
        return WorkerMemory(self.extraction.program)

    def backend(
        self,
        problem: Problem,
        predicted_s: Sequence[float] = (),
        *,
        rounds: int | None = None,
        seconds: float = math.inf,
    ) -> Measured:
        """Return a backend of worker processes, or of the model's own code in this one."""
        executor = CoreExecutor(
            self.extraction,
            problem,
            limits=self.limits,
            latency_s=max((link.latency_s for link in problem.cluster.links), default=0.0),
            step_timeout_s=60.0 + 100.0 * max(predicted_s, default=0.0),
        )
        rounds = rounds or rounds_for(predicted_s[0] if predicted_s else 0.0)
        return Measured(executor, rounds=rounds, seconds=seconds)

    def final_rounds(self, step_s: Sequence[float]) -> int:
        """Return how many rounds take ``FINAL_S``, 5 to 21."""
        rounds = FINAL_S / max(sum(map(turn_s, step_s)), 1e-9)
        return int(min(max(rounds, FEWEST_FINAL_ROUNDS), MOST_FINAL_ROUNDS))

    def joined(self, cluster: Cluster) -> Cluster | None:
        """Return the set of all cores as the one device of a cluster."""
        device = joined_device(cluster.devices) if len(cluster) > 1 else None
        return None if device is None else alone(device)

    def unplaced_problems(
        self, problem: Problem, graph: nx.DiGraph[str], progress: ProgressCallback | None = None
    ) -> list[Problem]:
        """Return the problems of the model on all cores together, and on one of the devices.

        The costs of the first are measured, those of the second are the problem's.
        """
        if self.places and is_joined(problem.cluster.names):
            return []
        alone, costs = problem, self.known_costs(problem.cluster, unplaced=True)
        if costs is not None:
            alone = Problem.of(GraphArrays.from_graph(costs.added_to(graph)), problem.cluster)
        alone = without_hand_over(alone)
        if (cluster := self.joined(problem.cluster)) is None:
            return [alone]
        costed = self.costs(cluster, progress=progress).added_to(graph)
        return [Problem.of(GraphArrays.from_graph(costed), cluster), alone]

    def apply(self, placement: Placement) -> PlacedModel | UnplacedModel:
        """Return the placed model, whose workers run until it is closed, or its own code."""
        cluster = present(placement.device_names)
        fitting = placement.aligned(GraphArrays.from_graph(self.graph), cluster)
        if runs_unplaced(placement):
            return unplaced(placement)(self.extraction)
        if self._by_modules:
            return modules_placed(fitting)(self.extraction)
        order = priority_order(self.extraction.program, fitting.priority)
        return PlacedModel(self.extraction, cluster, fitting.devices, order)


def _hand_over_s(costs: Mapping[str, OpCosts]) -> float:
    """Return the seconds of a hand-over to workers; 0 without costs."""
    return sum(float(each.cost_s[0]) for each in costs.values())


def rounds_for(step_s: float) -> int:
    """Return the number of turns of a placement that take about half a second, 3 to 7."""
    return int(min(max(MEASURED_S / turn_s(step_s), FEWEST_ROUNDS), MOST_ROUNDS))
