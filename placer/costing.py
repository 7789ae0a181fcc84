"""Op costs of an extracted graph on the devices of a cluster."""

from __future__ import annotations

import networkx as nx

from envs.cluster import Cluster
from envs.op_costs import op_costs
from graphs.costs import with_costs
from graphs.extract import Extraction
from placer.report.progress import Progress


def costed_graph(
    extraction: Extraction,
    graph: nx.DiGraph[str],
    cluster: Cluster,
    hear: Progress,
    *,
    fresh: bool = False,
) -> nx.DiGraph[str]:
    """Return a copy of an extraction's graph with op costs in seconds for each device kind.

    Costs are measured, or taken from the cache unless ``fresh``; for device kinds that are not on
    this machine they are modelled. See :func:`envs.op_costs.op_costs`.

    Raises:
        ValueError: a device that is not on this machine lacks rates.
        WorkerError: an op cannot run on a device.
        ExtractionError: the graph is a module graph that cannot be timed.
    """
    costs = op_costs(
        extraction,
        cluster,
        fresh=fresh,
        progress=lambda done, total: hear.advance(done / total),
    )
    return with_costs(
        graph,
        {kind: known.cost_s for kind, known in costs.items()},
        {kind: known.sources for kind, known in costs.items()},
    )
