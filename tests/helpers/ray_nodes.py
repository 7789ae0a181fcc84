"""Ray clusters of several nodes on this machine, and their stand-in in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def ray_nodes(count: int, processors: int = 1) -> Iterator[tuple[Any, list[Any]]]:
    """Yield a cluster of nodes with so many processors each, and all of them but the head."""
    ray: Any = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    head = {"num_cpus": processors, "wait": False}
    cluster: Any = Cluster(initialize_head=True, head_node_args=head)
    try:
        others = [cluster.add_node(wait=False, num_cpus=processors) for _ in range(count - 1)]
        cluster.wait_for_nodes(timeout=300)
        yield cluster, others
    finally:
        ray.shutdown()
        cluster.shutdown()


def kill(cluster: Any, node: Any) -> None:
    """Kill a node, and wait until the cluster knows that it is dead."""
    ray: Any = pytest.importorskip("ray")
    cluster.remove_node(node, False)
    while any(each["Alive"] and each["NodeID"] == node.node_id for each in ray.nodes()):
        time.sleep(0.05)


class InTurn:
    """Runs the tasks of a cluster in this process, one after the other."""

    processors = 2

    def share(self, value: object, prepare: Callable[[Any], Any]) -> Any:
        """Return the prepared value."""
        return prepare(value)

    def run(
        self,
        function: Callable[..., Any],
        shared: Any,
        tasks: Sequence[tuple[Any, ...]],
        should_end: Callable[[int], bool] = lambda _: False,
    ) -> list[Any]:
        """Return the results, None for those after the end."""
        results: list[Any] = []
        for task in tasks:
            ends = should_end(len(results))
            results.append(None if ends else function(shared, *task))
        return results
