"""Sources of steps with a smaller batch: the protocol, and one that scales a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import networkx as nx

from envs.cluster import Cluster
from graphs.batch import with_part_of_batch

if TYPE_CHECKING:
    from graphs.extract import Extraction


class StepSource(Protocol):
    """Provides a step with its whole batch or a part of it."""

    cluster: Cluster
    extraction: Extraction | None
    makers: Mapping[str, Sequence[str]]  # {op with parameters: ops that compute their gradients}
    notes: dict[str, None]  # in order, each once

    def graph(self, parts: int) -> nx.DiGraph[str]:
        """Return the graph with costs for one of ``parts`` equal parts of the batch.

        Raises:
            ValueError: the batch cannot be divided so.
        """
        ...


class GraphSource:
    """Scales the costs of a graph file."""

    extraction: Extraction | None = None
    makers: Mapping[str, Sequence[str]] = MappingProxyType({})

    def __init__(self, whole: nx.DiGraph[str], cluster: Cluster) -> None:
        self.whole = whole
        self.cluster = cluster
        self.notes: dict[str, None] = {}

    def graph(self, parts: int) -> nx.DiGraph[str]:
        """Return the scaled graph; see :func:`graphs.batch.with_part_of_batch`."""
        if parts > 1:
            self.notes[
                "Costs and activations for a smaller batch are those of the whole one, divided: "
                "ops that need a large batch to use their device take longer."
            ] = None
        return with_part_of_batch(self.whole, parts)
