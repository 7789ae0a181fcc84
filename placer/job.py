"""Jobs: what is placed, on which devices, how it is searched, and what a placement must keep to.

The command line and :func:`placer.optimize` build a :class:`Job` by the same functions. All values
are checked when they are made, and not again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import networkx as nx

from envs.backend import Backend, check_protocol
from envs.costs.roofline import cluster_of
from envs.hardware.cluster import Cluster
from envs.hardware.discover import is_here, physical_cores
from envs.hardware.units import parse_bytes
from envs.replication import Replication
from graphs.extract import AUTO
from graphs.graph_file import completed
from graphs.selection import ConstraintError, keep_together, pin
from graphs.strict_json import check_whole
from graphs.text import suggestion
from placer.policies import GENERALIST, load
from placer.progress import Progress
from placer.ray_cluster.address import address_of
from placer.search.objectives import Objective
from placer.search.registry import DEFAULT, placer_named, uses_policy
from placer.search.request import LATENCY, Budget, Placer
from placer.search.sampling import Proposer
from placer.sources.target import Target, load_graph_target
from placer.warm_start import WarmStart, check_devices, warm_start_of

if TYPE_CHECKING:
    from graphs.extract import Workload

Source: TypeAlias = "Target | Workload | nx.DiGraph[str]"
"""A workload, a graph with known costs, or the name of either."""
SEEDS: Final = 2**32
LEAST_MEASURING_S: Final = 6.0
"""Wall time of runs for short budgets: workers take about a second to start."""
MOST_WORKERS: Final = 8
"""Most threads of a search by default; evolution has ten decodes at a time."""


@dataclass(frozen=True, slots=True, init=False)
class SearchConfig:
    """Settings of the search for placements, and of the runs of the best ones."""

    budget: Budget
    seed: int
    placer: Placer
    objective: Objective
    groups: int | None
    measure: bool | str
    overlap: bool
    start_from: WarmStart | None
    backend: Backend | None
    workers: int | str | None

    def __init__(
        self,
        *,
        budget: str | Budget = "20s",
        seed: int = 0,
        placer: str | Placer = DEFAULT,
        policy: str | Proposer | None = AUTO,
        objective: str | Objective = LATENCY,
        micro_batches: int = 1,
        in_flight: int | None = None,
        groups: int | None = None,
        measure: bool | str = True,
        overlap: bool = False,
        start_from: WarmStart | Mapping[str, int | str] | str | Path | None = None,
        backend: Backend | None = None,
        workers: int | str | None = None,
    ) -> None:
        """Check the values and load what they name.

        Args:
            budget: wall time of searching and running the best candidates, ``"60s"``, or
                evaluations of the search, ``"4000e"``. Extracting and measuring op costs come on
                top. Where candidates are run, a third of the search is kept for a second one with
                costs fitted to the runs.
            seed: seed of the search.
            placer: search algorithm: a name that ``placer optimize --help`` lists, or your own
                :class:`placer.search.request.Placer`. Single devices and classic heuristics are
                always among the candidates.
            policy: name or path of a trained policy, or "none"; "auto" is the generalist, if the
                search algorithm uses a policy.
            objective: for a graph with known costs, ``"latency"``, ``"throughput"`` (the time of
                each further micro-batch) or ``"max-load"``; for a model, ``"latency"``.
            micro_batches: micro-batches of a step; a graph is that of one of them.
            in_flight: most micro-batches under way at once, by default one per device.
            groups: merge ops into at most this many groups and place the groups, for large graphs.
            measure: run the best candidates and choose by measured step time; False chooses by the
                simulated one. A wall time such as ``"10s"`` is that of the runs, by default half of
                the budget, at least ``LEAST_MEASURING_S``; with evaluations they are not limited.
            overlap: run candidates with copies that overlap compute: on CUDA devices a tensor is
                sent as soon as it is computed. Only for models that can be exported.
            start_from: warm start: a placement, a Hugging Face device map, or a file of either. The
                portfolio and annealing go on from it, if there are no groups or micro-batches, and
                it is always run.
            backend: evaluates the best candidates in place of this machine's devices, also those
                of a graph with known costs; the fastest by its step times is chosen.
            workers: threads that search side by side. With a budget in seconds the default is one
                for each core that this process may run on, at most MOST_WORKERS; with evaluations
                it is 1, and other numbers find other placements, but the same ones every time.
                ``"ray"`` searches on the Ray cluster at ``$RAY_ADDRESS`` or one on this machine,
                ``"ray://HOST:PORT"`` on that one: with evaluations the search finds the same on
                every cluster. Where several nodes have devices of the same kinds, they run more
                placements first, and the fastest of them run on this machine.

        Raises:
            ValueError: a value is invalid, does not exist, or contradicts another.
            TypeError: the budget, ``measure`` or the backend is of another type.
            OSError: a file cannot be read.
        """
        check_whole(seed, "seed")
        if not 0 <= seed < SEEDS:
            raise ValueError(f"seed is {seed}, not a whole number from 0 to {SEEDS - 1}")
        if groups is not None:
            check_whole(groups, "groups")
            if groups < 1:
                raise ValueError(f"groups is {groups}, below 1")
        if workers is not None:
            _check_workers(workers)
        if not isinstance(measure, bool | str):
            raise TypeError(f"measure is True, False or a wall time such as '10s', not {measure!r}")
        if backend is not None:
            check_protocol(backend)
        if backend is not None and not measure:
            raise ValueError("a backend runs the best candidates, and measure=False runs none")
        if isinstance(objective, str):
            objective = Objective(name=objective, micro_batches=micro_batches, in_flight=in_flight)
        if backend is not None and objective.name != LATENCY:
            raise ValueError(f"a backend evaluates single steps, not {objective.name}")
        if isinstance(measure, str):
            _seconds(measure)
        if not isinstance(budget, str | Budget):
            raise TypeError(
                f"a budget is a string, '60s' or '4000e' for evaluations, not {budget!r}"
            )
        values = {
            "budget": Budget.parse(budget) if isinstance(budget, str) else budget,
            "seed": seed,
            "placer": _placer(placer, policy, objective.name),
            "objective": objective,
            "groups": groups,
            "measure": measure,
            "overlap": overlap,
            "start_from": None if start_from is None else warm_start_of(start_from),
            "backend": backend,
            "workers": workers,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def measuring_s(self) -> float:
        """Return the wall time of the runs of candidates in seconds."""
        if isinstance(self.measure, str):
            return _seconds(self.measure)
        seconds = self.budget.seconds
        return math.inf if seconds is None else max(seconds / 2, LEAST_MEASURING_S)

    @property
    def worker_count(self) -> int:
        """Return the number of threads to search with, on this machine if none was given."""
        if self.workers is None and self.budget.seconds is not None:
            return min(len(physical_cores()), MOST_WORKERS)
        return self.workers if isinstance(self.workers, int) else 1

    @property
    def ray_address(self) -> str | None:
        """Return the address of the Ray cluster to search on, "" for the default; None without."""
        return address_of(self.workers) if isinstance(self.workers, str) else None

    @property
    def search_budget(self) -> Budget:
        """Return the budget of the search beside runs of candidates, at least half of it."""
        if self.budget.seconds is None:
            return self.budget
        return self.budget.part(max(1 - self.measuring_s / self.budget.seconds, 0.5))


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """Conditions that every placement must meet.

    Attributes:
        keep_together: op ids, module paths or globs such as ``"layers.3.*"``; all ops that match
            the same pattern share a device.
        pins: {op id, module path or glob: device name} for ops with a fixed device.
        memory: {device name: bytes, or a size such as ``"8GiB"``} that may be used of this
            machine's devices, by default the free memory.
    """

    keep_together: Sequence[str] = ()
    pins: Mapping[str, str] = field(default_factory=dict)
    memory: Mapping[str, int | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.keep_together, str):
            raise ConstraintError("keep_together is a list of names, not one name")
        _ = self.memory_bytes  # raises if a size cannot be parsed

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Return the memory limits in bytes."""
        return {
            name: parse_bytes(size) if isinstance(size, str) else size
            for name, size in self.memory.items()
        }

    def applied_to(self, graph: nx.DiGraph[str], cluster: Cluster) -> nx.DiGraph[str]:
        """Return the graph with co-located and pinned ops; the same object if there are none."""
        for pattern, device in self.pins.items():
            if device not in cluster.names:
                raise ConstraintError(
                    f"{pattern!r} is pinned to {device!r}, but the devices are "
                    f"{', '.join(cluster.names)}{suggestion(device, cluster.names)}"
                )
        if self.keep_together:
            graph = keep_together(graph, self.keep_together)
        return pin(graph, self.pins) if self.pins else graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One placement to find; build it with :meth:`of`."""

    source: Source
    cluster: Cluster
    search: SearchConfig = field(default_factory=SearchConfig)
    constraints: Constraints = field(default_factory=Constraints)
    replicas: Replication | None = None  # None: a single placement
    extractor: str = AUTO

    def __post_init__(self) -> None:
        objective, start = self.search.objective, self.search.start_from
        if start is not None:
            check_devices(start, self.cluster)
        if self.has_costs:
            if self.extractor != AUTO or self.search.overlap:
                raise ValueError(
                    "a graph has its costs and is not run: extractor and overlap are for models"
                )
        elif objective != Objective():
            raise ValueError(
                "a model is run step by step: other objectives and micro-batches are for graphs "
                "with known costs (placer extract writes one)"
            )
        if self.replicas is not None:
            if objective.name != LATENCY:
                raise ValueError(
                    f"replicas are compared by their steps: objective {objective.name} is for a "
                    "single placement"
                )
            if start is not None:
                raise ValueError("a warm start is for a single placement, not for replicas")
            if self.search.backend is not None:
                raise ValueError("a backend is for a single placement, not for replicas")
            if self.constraints.pins and (self.replicas.replicas or 1) > 1:
                raise ConstraintError(
                    f"pins name devices, and each of {self.replicas.replicas} replicas has devices "
                    "of its own: leave them out, or keep ops together"
                )

    @classmethod
    def of(
        cls,
        source: Source | str | Path,
        devices: str | Path | Cluster = "auto",
        *,
        search: SearchConfig | None = None,
        constraints: Constraints | None = None,
        replicas: int | str | Replication | None = None,
        extractor: str = AUTO,
    ) -> Job:
        """Build a job from the arguments of :func:`placer.optimize`; text names a target."""
        if isinstance(source, nx.DiGraph):
            source = completed(source)
        elif isinstance(source, str | Path):
            source = Target(name=str(source))
        constraints = constraints or Constraints()
        if replicas is not None:
            replicas = Replication.of(replicas)
        return cls(
            source=source,
            cluster=cluster_of(devices, constraints.memory_bytes, has_costs=_has_costs(source)),
            search=search or SearchConfig(),
            constraints=constraints,
            replicas=replicas,
            extractor=extractor,
        )

    @property
    def has_costs(self) -> bool:
        """Return whether the source is a graph with known costs, so that nothing is run."""
        return _has_costs(self.source)

    def loaded(self, progress: Progress) -> Job:
        """Return the job with the workload or graph that its target names."""
        if not isinstance(self.source, Target):
            return self
        if self.source.is_graph:
            return replace(self, source=load_graph_target(self.source.name))
        progress.stage("Loading the model")
        weights = any(map(is_here, self.cluster.names))
        return replace(self, source=self.source.load(weights=weights))


def _has_costs(source: Source) -> bool:
    return source.is_graph if isinstance(source, Target) else isinstance(source, nx.DiGraph)


def _check_workers(workers: int | str) -> None:
    if isinstance(workers, str):
        address_of(workers)
        return
    check_whole(workers, "workers")
    if workers < 1:
        raise ValueError(f"workers is {workers}, below 1")


def _seconds(measure: str) -> float:
    seconds = Budget.parse(measure).seconds
    if seconds is None:
        raise ValueError(f"measure is {measure!r}: runs take wall time, such as '10s'")
    return seconds


def _placer(placer: str | Placer, policy: str | Proposer | None, objective: str) -> Placer:
    """Return the search algorithm with its policy."""
    name = placer if isinstance(placer, str) else type(placer).__name__
    if isinstance(policy, str):
        if isinstance(placer, str) and uses_policy(placer, objective=objective):
            policy = None if policy == "none" else load(GENERALIST if policy == AUTO else policy)
        elif policy in {AUTO, "none"}:
            policy = None
        else:
            raise ValueError(
                f"placer {name!r} asks no policy for the objective {objective}: leave out the "
                f"policy {policy!r}"
            )
    if isinstance(placer, str):
        return placer_named(placer, policy, objective=objective)
    if objective not in placer.objectives:
        served = " and ".join(placer.objectives)
        raise ValueError(f"placer {name!r} serves the objective {served}, not {objective}")
    return placer
