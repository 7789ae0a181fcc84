"""Graphs whose best placement is known by construction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import networkx as nx
import numpy as np

from graphs.graph import ANY_KIND, add_edge, add_op, new_graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """A graph and an optimal placement of it: op i runs on ``devices[i]``, in op order.

    No placement on as many devices is faster than ``step_s``, because none of them is ever idle: on
    equal devices by their work, on unequal ones by the work at the devices' prices, see
    :func:`planted`. It is reached if a transfer of ``largest_bytes`` takes at most ``gap_s``,
    transfers do not queue, and devices have no launch overhead. Where transfers queue, it is
    reached if all of them together take at most ``gap_s``: each waits for every other at most once.
    """

    graph: nx.DiGraph[str]
    devices: tuple[int, ...]
    step_s: float
    gap_s: float
    largest_bytes: int


def planted(
    rng: np.random.Generator,
    *,
    devices: int = 4,
    ops_per_device: int = 10,
    degree: float = 2.0,
    step_s: float = 1e-3,
    gap_s: float = 20e-6,
    largest_bytes: int = 1 << 20,
    prices: Sequence[float] | None = None,
    premium: float = 0.0,
    recent: int | None = None,
) -> Planted:
    """Generate a graph from a schedule without idle time, so that its optimum is known.

    Each device's ``step_s`` is cut into ``ops_per_device`` ops at random; an op then reads ops that
    end before it starts, at least ``gap_s`` before if they ran on another device. With ``recent``
    it reads only of so many that end last, which leaves little slack to other placements.

    With ``prices``, one per device, devices are unequal, of kinds "device:0", "device:1", ...: an
    op that takes c on its own device h takes at least c * price_h / price_d on device d. Half of
    these costs are higher by an exponentially distributed share of mean ``premium``. The optimum
    stays ``step_s``: of any placement, sum_d price_d * load_d is at least the sum of price_h * c
    over all ops, which is ``step_s`` * sum_d price_d; so the largest load is at least ``step_s``.
    """
    total_ns = round(step_s * 1e9)
    slots: list[tuple[int, int, int]] = []  # start, end, device
    for device in range(devices):
        cuts = rng.choice(np.arange(1, total_ns), ops_per_device - 1, replace=False)
        bounds = [0, *sorted(cuts.tolist()), total_ns]
        slots += [(a, b, device) for a, b in pairwise(bounds)]
    slots.sort()
    graph = new_graph("planted")
    ids = [f"slots.{i}:op" for i in range(len(slots))]
    for op_id, (start, end, home) in zip(ids, slots, strict=True):
        size = int(rng.integers(1, largest_bytes + 1))
        path = op_id.partition(":")[0]
        add_op(
            graph,
            op_id,
            cost_s=_cost_s(rng, end - start, home, prices, premium),
            op="op",
            module=path,
            output_bytes=size,
        )
    gap_ns = math.ceil(gap_s * 1e9)
    for target, (start, _, device) in enumerate(slots):
        ready = [
            source
            for source, (_, end, other) in enumerate(slots[:target])
            if end + (0 if other == device else gap_ns) <= start
        ]
        if recent is not None:
            ready = sorted(sorted(ready, key=lambda source: slots[source][1])[-recent:])
        count = min(len(ready), 1 + int(rng.poisson(max(degree - 1, 0))))
        for source in sorted(rng.choice(ready, count, replace=False).tolist()) if ready else []:
            add_edge(graph, ids[source], ids[target])
    return Planted(
        graph=graph,
        devices=tuple(device for *_, device in slots),
        step_s=total_ns / 1e9,
        gap_s=gap_s,
        largest_bytes=largest_bytes,
    )


def _cost_s(
    rng: np.random.Generator,
    cost_ns: int,
    home: int,
    prices: Sequence[float] | None,
    premium: float,
) -> dict[str, float]:
    """Return seconds by kind of an op that takes ``cost_ns`` on device ``home``."""
    if prices is None:
        return {ANY_KIND: cost_ns / 1e9}
    above = rng.exponential(premium, len(prices)) * (rng.random(len(prices)) < 0.5)
    above[home] = 0.0
    return {
        f"device:{d}": math.ceil(cost_ns * (prices[home] / price) * (1.0 + above[d])) / 1e9
        for d, price in enumerate(prices)
    }
