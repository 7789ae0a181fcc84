"""Steps with a smaller batch: the protocol, and a graph that is scaled."""

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
    """A step with its whole batch or a part of it."""

    cluster: Cluster
    extraction: Extraction | None
    makers: Mapping[str, Sequence[str]]  # of gradients, as far as they are known
    notes: dict[str, None]  # in order, each once

    def graph(self, parts: int) -> nx.DiGraph[str]:
        """With costs, for the ``parts``-th part of the batch.

        Raises:
            ValueError: the batch has no such part.
        """
        ...


class GraphSource:
    """A graph file, which can only be scaled."""

    extraction: Extraction | None = None
    makers: Mapping[str, Sequence[str]] = MappingProxyType({})

    def __init__(self, whole: nx.DiGraph[str], cluster: Cluster) -> None:
        self.whole = whole
        self.cluster = cluster
        self.notes: dict[str, None] = {}

    def graph(self, parts: int) -> nx.DiGraph[str]:
        """See :func:`graphs.batch.with_part_of_batch`."""
        if parts > 1:
            self.notes[
                "Costs and activations for a smaller batch are those of the whole one, divided: "
                "ops that need a large batch to use their device take longer."
            ] = None
        return with_part_of_batch(self.whole, parts)
