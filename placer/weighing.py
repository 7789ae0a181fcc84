"""Weighs the devices of a cluster: which are worth renting, by the simulator.

Every sort of sub-cluster is searched. A plan that leaves devices idle counts for those it uses, as
idle ones need not be rented; and a sub-cluster is listed only where it is faster than all of its
parts, so that more devices are never slower.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import networkx as nx
import numpy as np

from envs.cluster import Cluster
from envs.compiled import loading_stage
from envs.problem import Problem
from envs.subclusters import Counts, Subclusters, is_part, part_of
from graphs.coarsen import Coarsened
from graphs.graph import GraphArrays
from placer.choose import PlacementError
from placer.demands import demanded
from placer.interrupt import Interrupt
from placer.pipeline import Options, costed_step, grouped, optimize_problem
from placer.report.progress import Progress, Silent
from placer.search.budget import Budget
from placer.search.compiling import load_compiled_code
from placer.several import Slice, share_of
from placer.tradeoff import Offer, Tradeoff

if TYPE_CHECKING:
    from graphs.extract import Extraction, Step

MOST_SUBCLUSTERS: Final = 64
"""More would leave each too little of the budget, and the reader too much to read."""


def weigh_step(
    step: Step, cluster: Cluster, options: Options, progress: Progress | None = None
) -> Tradeoff:
    """Weigh the devices of a cluster for one step of a model; costs may be measured, plans not.

    Raises:
        ExtractionError: the model cannot be exported, or is on the meta device.
        ValueError: as for :func:`weigh_graph`, or a device is neither here nor described.
        PlacementError: no placement was found that fits.
        KeyboardInterrupt: stopped before there was any placement.
    """
    check_options(cluster, options)
    hear = progress or Silent()
    with Interrupt():
        known = costed_step(step, cluster, options, hear)
    return _weighed(known.graph, known.cluster, options, hear, known.extraction)


def weigh_graph(
    graph: nx.DiGraph[str], cluster: Cluster, options: Options, progress: Progress | None = None
) -> Tradeoff:
    """Weigh the devices of a cluster for a graph with known costs.

    Raises:
        DemandError: an option names ops or devices that are not there, or contradicts another.
        ValueError: no device has a price, there are too many sub-clusters, an option is for one
            cluster alone, or an op has no cost on any device.
        PlacementError: no placement was found that fits.
        KeyboardInterrupt: stopped before there was any placement.
    """
    check_options(cluster, options)
    graph = demanded(graph, cluster, options.keep_together, options.pins)
    return _weighed(graph, cluster, options, progress or Silent())


def check_options(cluster: Cluster, options: Options) -> None:
    """Make sure that devices can be weighed.

    Raises:
        ValueError: no device has a price, which says where it belongs; or an option is for one
            cluster alone.
    """
    if cluster.price_per_hour == 0:
        raise ValueError(
            f"no device of cluster {cluster.name!r} has a price: write price_per_hour = 2.49, in "
            "any currency, under its [[device]] in the cluster file (or in its Device)"
        )
    if options.objective.name != "latency":
        raise ValueError(
            "what is weighed against a price is the time of a step: objective "
            f"{options.objective.name} is for a single cluster"
        )
    if options.start_from is not None:
        raise ValueError("a placement to start from is one for a single cluster: leave it out")


def _weighed(
    graph: nx.DiGraph[str],
    cluster: Cluster,
    options: Options,
    hear: Progress,
    extraction: Extraction | None = None,
) -> Tradeoff:
    problem = Problem.of(GraphArrays.from_graph(graph), cluster)
    subclusters = Subclusters.of(problem)
    parts = subclusters.joined(MOST_SUBCLUSTERS)
    hear.stage(loading_stage())
    load_compiled_code()
    hear.stage(f"Searching placements on {len(parts)} sub-clusters")
    search = _Search(
        problem=problem,
        subclusters=subclusters,
        options=replace(options, measure=False),
        coarse=grouped(graph, options),
        extraction=extraction,
        cost_source=graph.graph["cost_source"],
    )
    searched = search.run(parts, hear)
    offers = search.offers()
    if all(offer.found is None for offer in offers):
        raise PlacementError(offers[-1].why)
    return Tradeoff(
        problem=problem,
        offers=tuple(offers),
        searched=searched,
        left_out=len(parts) - searched,
        search_s=search.search_s,
        extraction=extraction,
        cost_source=search.cost_source,
    )


@dataclass(slots=True, kw_only=True)
class _Search:
    """The best plan found for each sort of sub-cluster so far."""

    problem: Problem  # of the whole cluster
    subclusters: Subclusters
    options: Options
    coarse: Coarsened | None
    extraction: Extraction | None
    cost_source: Mapping[str, str]
    best: dict[Counts, Offer] = field(default_factory=dict)
    search_s: float = 0.0

    def run(self, parts: Sequence[tuple[int, ...]], hear: Progress) -> int:
        """Search one after the other; how many, fewer where the user stopped it.

        Raises:
            KeyboardInterrupt: stopped before there was any plan.
        """
        several = sum(len(part) > 1 for part in parts)
        for number, part in enumerate(parts):
            budget = share_of(self.options.budget, several if len(part) > 1 else None)
            try:
                stopped = self._search(part, budget, Slice(hear, number, len(parts)))
            except KeyboardInterrupt:
                if all(offer.found is None for offer in self.best.values()):
                    raise
                return number
            if stopped:
                return number
        return len(parts)

    def _search(self, part: tuple[int, ...], budget: Budget, hear: Progress) -> bool:
        """Search one; whether the user asked to stop."""
        cluster = part_of(self.problem.cluster, part)
        if why := self._why_stuck(part):
            self._keep(part, Offer(cluster=cluster, found=None, why=why))
            return False
        problem = Problem.of(self.problem.graph, cluster)
        options = replace(self.options, budget=budget)
        try:
            found = optimize_problem(problem, options, hear, coarse=self.coarse)
        except PlacementError as error:
            self._keep(part, Offer(cluster=cluster, found=None, why=str(error)))
            return False
        found = replace(found, extraction=self.extraction, cost_source=self.cost_source)
        self.search_s += found.search_s
        used = [part[d] for d in sorted(set(found.placement.devices))]
        self._keep(used, Offer(cluster=part_of(self.problem.cluster, used), found=found))
        return found.stopped

    def _why_stuck(self, part: Sequence[int]) -> str:
        """Why ops can run on none of these devices; "" if all can."""
        stuck = np.flatnonzero(~self.problem.allowed[:, part].any(axis=1))
        if not len(stuck):
            return ""
        more = f" and {len(stuck) - 1} more ops" if len(stuck) > 1 else ""
        return f"op {self.problem.graph.ids[int(stuck[0])]!r}{more} can run on none of its devices"

    def _keep(self, devices: Iterable[int], offer: Offer) -> None:
        counts = self.subclusters.counts(devices)
        if counts not in self.best or offer.step_s < self.best[counts].step_s:
            self.best[counts] = offer

    def offers(self) -> list[Offer]:
        """From cheap to dear: what is faster than all its parts, and what nothing runs on."""
        kept = [
            offer
            for counts, offer in self.best.items()
            if offer.found is None
            or all(
                offer.step_s < other.step_s
                for less, other in self.best.items()
                if less != counts and is_part(less, counts)
            )
        ]
        return sorted(kept, key=lambda offer: (offer.price_per_hour, offer.step_s))
