"""Op costs by kind of device, with the source of each number; measured once, then cached."""

from __future__ import annotations

import datetime
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import networkx as nx
import numpy as np
import torch
from numpy.typing import NDArray

from envs.costs.cache import Conditions, CostCache, Session
from envs.hardware.cache_folder import host, processor
from envs.hardware.cluster import Device
from envs.hardware.discover import device_kind
from graphs.costs import with_costs


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCosts:
    """Seconds of every op on one kind of device, (N,), and the source of each."""

    cost_s: NDArray[np.float64]
    sources: Sequence[str]

    @classmethod
    def of_one_source(cls, cost_s: NDArray[np.float64], source: str) -> OpCosts:
        """Return costs that all have the same source."""
        return cls(cost_s=cost_s, sources=(source,) * len(cost_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedCosts:
    """Costs of the ops of one step, from the cache or measured now; see :mod:`envs.costs.cache`.

    ``signatures`` (N,) identify the ops: equal signatures, equal cost. ``method`` tells how they
    are measured and ends the source of each cost. With ``launched`` a cached time includes the
    launch overhead of its device, which the costs themselves exclude.
    """

    signatures: Sequence[str]
    method: str
    launched: bool = False

    def known(self, devices: Mapping[str, Device]) -> dict[str, OpCosts]:
        """Return {device kind: costs} for the kinds of devices with all costs in the cache.

        Raises:
            ValueError: a device does not exist on this machine.
        """
        cache = CostCache()
        found: dict[str, OpCosts] = {}
        for kind, device in devices.items():
            known = cache.known(conditions_of(device), self.signatures)
            if not all(signature in known for signature in self.signatures):
                continue
            own = [known[signature] for signature in self.signatures]
            times_s = np.array([cost.cost_s for cost in own])
            found[kind] = OpCosts(
                cost_s=np.maximum(times_s - self._overhead_s(device), 0.0),
                sources=[f"cached, measured {cost.measured}{self.method}" for cost in own],
            )
        return found

    def costs(
        self,
        devices: Mapping[str, Device],
        profile: Callable[[list[Device]], Mapping[str, NDArray[np.float64]]],
        *,
        fresh: bool = False,
    ) -> dict[str, OpCosts]:
        """Return {device kind: costs}; what the cache lacks is profiled and stored there.

        Args:
            devices: {device kind: a device of this machine}.
            profile: returns {device kind: seconds of every op in every run, (R, N)}; nan for an op
                that does not fit on the device.
            fresh: ignore the cache, but store the new measurements.

        Raises:
            ValueError: a device does not exist on this machine.
        """
        found = {} if fresh else self.known(devices)
        missing = [device for kind, device in devices.items() if kind not in found]
        if not missing:
            return found
        today = datetime.date.today().isoformat()
        for kind, runs_s in profile(missing).items():
            times_s = runs_s + self._overhead_s(devices[kind])
            session = session_of(times_s, self.signatures, today)
            CostCache().store(conditions_of(devices[kind]), session)
            cost_s = np.median(runs_s, axis=0)
            found[kind] = OpCosts.of_one_source(cost_s, f"measured {today}{self.method}")
        return found

    def _overhead_s(self, device: Device) -> float:
        return device.launch_s if self.launched else 0.0


def first_of_kinds(devices: Sequence[Device]) -> dict[str, Device]:
    """Return {device kind: the first device of that kind}."""
    return {device.kind: device for device in reversed(devices)}


def with_op_costs(graph: nx.DiGraph[str], costs: Mapping[str, OpCosts]) -> nx.DiGraph[str]:
    """Return a copy of a graph with costs of its ops, {device kind: costs in node order}."""
    return with_costs(
        graph,
        {kind: known.cost_s for kind, known in costs.items()},
        {kind: known.sources for kind, known in costs.items()},
    )


def conditions_of(device: Device) -> Conditions:
    """Return the conditions under which times on a device of this machine are valid.

    The device kind is that of the hardware, whatever the cluster calls it.
    """
    return Conditions(
        kind=device_kind(device.name),
        hardware=f"{host()}, {processor()}",
        torch=torch.__version__,
    )


def session_of(runs_s: NDArray[np.float64], signatures: Sequence[str], day: str) -> Session:
    """Return the cache entry for a profile (R, N); the noise of a single run is unknown."""
    ops = defaultdict(list)
    for op, signature in enumerate(signatures):
        ops[signature].append(op)
    spread = None
    if len(runs_s) > 1:
        low, middle, high = np.quantile(runs_s.sum(axis=1), [0.25, 0.5, 0.75])
        spread = float((high - low) / middle)
    return Session(
        cost_s={signature: _median(runs_s[:, own]) for signature, own in ops.items()},
        runs=len(runs_s),
        spread=spread,
        measured=day,
    )


def _median(times_s: NDArray[np.float64]) -> float:
    """Return the median without the ops that did not fit; nan if none did."""
    ran_s = times_s[~np.isnan(times_s)]
    return float(np.median(ran_s)) if len(ran_s) else np.nan
