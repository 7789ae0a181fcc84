"""The graph of a model with op costs that were measured on this machine."""

from __future__ import annotations

import datetime

import networkx as nx

from envs.calibrate import profile_ops
from envs.cluster import Cluster
from graphs.costs import with_costs
from graphs.extract import Extraction
from placer.report.progress import Progress


def measured_graph(
    extraction: Extraction, graph: nx.DiGraph[str], cluster: Cluster, hear: Progress
) -> nx.DiGraph[str]:
    """A copy of an extraction's graph, with seconds for every kind of device in the cluster.

    Raises:
        WorkerError: an op cannot run on a device.
    """
    costs_s = profile_ops(
        extraction, cluster, progress=lambda done, total: hear.advance(done / total)
    )
    source = f"measured {datetime.date.today().isoformat()}, in context"
    return with_costs(graph, costs_s, dict.fromkeys(costs_s, source))
