"""The links of a cluster as tables of ordered pairs of devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from envs.hardware.cluster import Cluster, Link

NO_QUEUE: Final = -1


class LinkTables:
    """Latency, bandwidth and queues of each ordered pair of devices."""

    def __init__(self, count: int) -> None:
        self.latency_s = np.zeros((count, count))
        self.bandwidth_bytes_per_s = np.full((count, count), np.inf)
        self.connected = np.eye(count, dtype=np.bool_)
        self.queue = np.full((count, count), NO_QUEUE, np.int32)
        self.second_queue = np.full((count, count), NO_QUEUE, np.int32)
        self.by_priority: list[bool] = []
        self._number: dict[tuple[object, ...], int] = {}

    @classmethod
    def of(cls, cluster: Cluster) -> LinkTables:
        """Return the tables of a cluster."""
        links = cls(len(cluster))
        index = {name: d for d, name in enumerate(cluster.names)}
        ports = [{index[n]: link.port_of(n) for n in link.between} for link in cluster.links]
        first = np.full((len(cluster), len(cluster)), -1)  # the link of each pair
        for number in reversed(range(len(cluster.links))):
            link, ends = cluster.links[number], np.array(list(ports[number]))
            if link.one_way:
                first[ends[0], ends[1]] = number
                continue
            _, port = np.unique(list(ports[number].values()), return_inverse=True)
            apart = port[:, None] != port[None]
            first[np.ix_(ends, ends)] = np.where(apart, number, first[np.ix_(ends, ends)])
        for s, d in np.argwhere(first >= 0).tolist():
            number = int(first[s, d])
            links._join(cluster.links[number], number, s, d, ports[number])
        return links

    def _join(self, link: Link, number: int, s: int, d: int, port: Mapping[int, str]) -> None:
        out, into = port[s], port[d]
        self.connected[s, d] = True
        self.latency_s[s, d] = link.latency_s
        self.bandwidth_bytes_per_s[s, d] = link.bandwidth_bytes_per_s
        match link.sharing:
            case "bus":
                self.queue[s, d] = self._queue(link, link.bus or number)
            case "pair" if link.full_duplex:
                self.queue[s, d] = self._queue(link, number, out, into)
            case "pair":
                self.queue[s, d] = self._queue(link, number, *sorted((out, into)))
            case "egress":
                self.queue[s, d] = self._queue(link, number, out)
                if not link.full_duplex:
                    self.second_queue[s, d] = self._queue(link, number, into)
                elif link.ingress:
                    self.second_queue[s, d] = self._queue(link, number, "in", into)
            case "none":
                pass

    def _queue(self, link: Link, *key: object) -> int:
        # ``key`` identifies the queue; transfers with equal keys share it.
        if key not in self._number:
            self._number[key] = len(self._number)
            self.by_priority.append(link.order == "priority")
        return self._number[key]
