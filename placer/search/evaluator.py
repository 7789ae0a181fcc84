"""Evaluation of placements by the simulator."""

from __future__ import annotations

import copy
import threading
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from envs.problem import Floats, Ints, Longs, Problem
from envs.simulator import (
    IGNORE_MEMORY,
    INFEASIBLE_NS,
    NO_LIMIT_NS,
    OVERFULL_NS,
    RANK_EXCESS,
    ProblemArrays,
    Workspace,
    arrays_of,
    simulate_batch,
    workspace_for,
)
from envs.simulator.schedule import run_order
from placer.search.candidate import Candidate, Kind
from placer.search.list_scheduler.arrays import SchedulingArrays, scheduling_arrays
from placer.search.list_scheduler.decoder import WEIGHT_COUNT, decode_batch
from placer.search.list_scheduler.partial_schedule import PartialSchedule, empty_schedule
from placer.search.list_scheduler.sight import Sight, see, sight_of


class Evaluator:
    """Evaluates placements of one problem. Use one instance per thread.

    A cost is the simulated step time in nanoseconds; OVERFULL_NS or more, ranked by the excess, if
    memory does not suffice; INFEASIBLE_NS if an op is on a device that is not allowed or cannot be
    reached.
    """

    evaluations: ClassVar[int] = 0
    """Evaluations of all evaluators of this process so far, moves of annealing included."""
    _counting: ClassVar = threading.Lock()

    def __init__(self, problem: Problem) -> None:
        """Prepare the problem for list scheduling and simulation."""
        self.problem = problem
        self.scheduling = scheduling_arrays(problem)
        self.arrays: ProblemArrays = arrays_of(problem)
        self.work: Workspace = workspace_for(problem)
        self.memory = RANK_EXCESS if self.scheduling.memory_matters else IGNORE_MEMORY

    @classmethod
    def count(cls, evaluations: int) -> None:
        """Add to the evaluations of this process, from any thread."""
        with cls._counting:
            Evaluator.evaluations += evaluations

    def twin(self) -> Evaluator:
        """Return an evaluator for another thread, which sees the plans that this one looks at."""
        twin = copy.copy(self)
        twin.work = workspace_for(self.problem)
        twin._schedule = empty_schedule(self.scheduling)
        near, through = self.sight.near.copy(), self.sight.through.copy()
        twin.sight = self.sight._replace(near=near, through=through)
        return twin

    @cached_property
    def loaded_scheduling(self) -> SchedulingArrays | None:
        """Arrays for list scheduling with costs under load; None where there are no such costs."""
        return None if self.problem.load is None else scheduling_arrays(self.problem, loaded=True)

    @cached_property
    def _schedule(self) -> PartialSchedule:
        return empty_schedule(self.scheduling)

    def costs(self, devices: Ints, priority: Floats) -> Longs:
        """Return costs (B,) of the placements ``devices`` (B, N) with ``priority`` (B, N)."""
        costs = np.empty(len(devices), np.int64)
        Evaluator.count(len(costs))
        devices = np.array(devices, np.int32, order="C")
        priority = np.array(priority, np.float64, order="C")
        first = 0
        while first < len(costs):
            rows = slice(first, None)
            beyond = simulate_batch(
                self.arrays,
                self.work,
                devices[rows],
                priority[rows],
                NO_LIMIT_NS,
                self.memory,
                costs[rows],
            )
            first = len(costs) if beyond < 0 else first + beyond + 1
        return costs

    @cached_property
    def sight(self) -> Sight:
        """Return the plan that decodes see; there is none before :meth:`look_at` is called."""
        return sight_of(self.problem, self.scheduling)

    def look_at(self, plan: Candidate) -> None:
        """Show a feasible plan to the following decodes; this costs an evaluation."""
        self.costs(plan.devices[None], plan.priority[None])
        start_ns = self.work.start_ns[: len(plan.devices)]
        end_ns = start_ns + self.problem.cost_ns[np.arange(len(start_ns)), plan.devices]
        order = np.array(run_order(self.problem, start_ns, end_ns), np.int32)
        see(self.sight, self.scheduling, plan.devices, start_ns.astype(np.float64), order)

    def decode(self, weights: NDArray[np.floating[Any]]) -> tuple[Ints, Floats, Longs]:
        """Decode weights (B, 21) to devices (B, N) and priorities (B, N) with their costs (B,).

        With 29 weights, the last are those of the sight.
        """
        sight = self.sight if weights.shape[1] > WEIGHT_COUNT else None
        devices, priority = decode_batch(self.scheduling, weights, self._schedule, sight)
        return devices, priority, self.costs(devices, priority)

    def candidate(
        self,
        kind: Kind,
        devices: Ints,
        priority: Floats,
        cost: int | None = None,
        *,
        name: str = "",
    ) -> Candidate:
        """Return one placement, (N,) each, as a candidate with read-only copies of the arrays.

        A known ``cost`` is not computed again. Otherwise, with hosts, the fastest order of issue
        counts (:meth:`_orders`). ``name`` is displayed, by default that of the kind.
        """
        if cost is None:
            orders = [priority] if kind is Kind.WARM_START else self._orders(devices, priority)
            costs = self.costs(np.stack([devices] * len(orders)), np.stack(orders))
            best = int(costs.argmin())
            cost, priority = int(costs[best]), orders[best]
        own_devices, own_priority = devices.astype(np.int32), priority.astype(np.float64)
        own_devices.setflags(write=False)
        own_priority.setflags(write=False)
        return Candidate(
            kind=kind,
            name=name or kind.value,
            devices=own_devices,
            priority=own_priority,
            step_ns=cost if cost < OVERFULL_NS else INFEASIBLE_NS,
            cost=cost,
        )

    def _orders(self, devices: Ints, priority: Floats) -> list[Floats]:
        """Return priorities to try with these devices: others than the given ones with hosts only.

        Ranks of list schedulers take devices for independent, but an op of the CPU delays launches,
        so the second priorities order ops of synchronous devices after all others that are ready.
        With autograd the backward pass has the reverse order, whatever its ranks are; the last
        priorities are the order of the graph.
        """
        hosts = self.problem.hosts
        if hosts is None:
            return [priority]
        launches_first = priority + ~hosts.synchronous[devices] * (np.ptp(priority) + 1.0)
        orders = [priority, np.asarray(launches_first)]
        if hosts.autograd:
            in_order = np.empty(len(devices))
            in_order[self.problem.graph.topological] = -np.arange(len(devices))
            orders.append(in_order)
        return orders
