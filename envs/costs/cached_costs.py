"""Op costs by kind of device, with the source of each number; measured once, then cached."""

from __future__ import annotations

import datetime
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import networkx as nx
import numpy as np
import torch
from numpy.typing import NDArray

from envs.costs.cache import Conditions, CostCache, KnownCost, Session
from envs.costs.factor_cache import FactorCache, step_id
from envs.costs.factors import (
    LARGEST,
    LARGEST_UNPLACED,
    LAUNCH,
    Factors,
    factors_of_ops,
    fitted_source,
    scaled_loaded_s,
)
from envs.costs.oversize_cache import OversizeCache
from envs.hardware.cache_folder import host, processor
from envs.hardware.cluster import Device
from envs.hardware.discover import device_kind
from envs.hardware.torch_devices import driver_version
from graphs.costs import with_costs


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCosts:
    """Seconds of every op on one kind of device, (N,), and the source of each.

    ``loaded_s`` are those while the other devices of the machine compute, none below ``cost_s``,
    ``launches_s`` those in which a thread issues the ops, nan where unknown.
    """

    cost_s: NDArray[np.float64]
    sources: Sequence[str]
    loaded_s: NDArray[np.float64] | None = None
    launches_s: NDArray[np.float64] | None = None

    @classmethod
    def of_one_source(cls, cost_s: NDArray[np.float64], source: str) -> OpCosts:
        """Return costs that all have the same source."""
        return cls(cost_s=cost_s, sources=(source,) * len(cost_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Costs of a step: of its ops, {device kind: costs}, and of handing it over to workers."""

    ops: Mapping[str, OpCosts]
    hand_over_s: float = 0.0

    def added_to(self, graph: nx.DiGraph[str]) -> nx.DiGraph[str]:
        """Return a copy of the graph of the step with these costs."""
        costed = with_op_costs(graph, self.ops)
        costed.graph["hand_over_s"] = self.hand_over_s
        return costed


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCosts:
    """Costs of the ops of one step, from the cache or measured now; see :mod:`envs.costs.cache`.

    ``profile`` returns {device kind: seconds of every op in every run, (R, N) or (N,)} for one
    device of each kind; nan for an op that does not fit on the device. ``signatures`` (N,) identify
    the ops: equal signatures, equal cost; None if they cannot be cached. ``method`` says how they
    are measured and ends the source of each cost. With ``launched`` a cached time includes the
    launch overhead of its device, which the costs themselves exclude. Cached costs are multiplied
    by the factors of the ops' ``classes`` (N,) that were fitted to measured steps; those of the
    ``unplaced`` model are its own. Of the kinds in ``at_once``, {kind: number of devices},
    ``profile`` also returns the seconds while so many devices compute, see :func:`loaded_kind`, and
    where launches are known those of launches, see :func:`launch_kind`.
    ``free_bytes`` returns the free memory of a device, or None: where it is known, ops that did not
    fit are cached, too, and are profiled again once there is more of it.
    """

    profile: Callable[[Sequence[Device]], Mapping[str, NDArray[np.float64]]]
    method: str
    signatures: Sequence[str] | None = None
    launched: bool = False
    classes: Sequence[str] = ()
    unplaced: bool = False
    at_once: Mapping[str, int] = field(default_factory=dict)
    free_bytes: Callable[[Device], int | None] | None = None

    def known(self, devices: Mapping[str, Device]) -> dict[str, OpCosts] | None:
        """Return {device kind: costs}, or None unless all are in the cache."""
        known = self._cached(devices)
        return known if known.keys() == devices.keys() else None

    def costs(self, devices: Mapping[str, Device], *, fresh: bool = False) -> dict[str, OpCosts]:
        """Return {device kind: costs}; kinds that the cache lacks are profiled and stored there.

        ``devices`` holds a device of this machine for each kind. ``fresh`` ignores the cache, but
        stores the new measurements.
        """
        costs = {} if fresh else self._cached(devices)
        missing = [device for kind, device in devices.items() if kind not in costs]
        if not missing:
            return costs
        today = datetime.date.today().isoformat()
        room = {device.name: self._free_bytes(device) for device in missing}
        profiled = self.profile(missing)
        for kind in [kind for kind in profiled if kind in devices]:
            device, count = devices[kind], self.at_once.get(kind, 1)
            overhead_s = self._overhead_s(device)
            cost_s = self._stored(conditions_of(device), profiled[kind], overhead_s, today)
            self._store_oversize(device, cost_s, room[device.name])
            source = f"measured {today}{self.method}"
            costs[kind] = OpCosts.of_one_source(cost_s, source)
            if count > 1:
                times_s = profiled[loaded_kind(kind, count)]
                loaded_s = self._stored(conditions_of(device, count), times_s, overhead_s, today)
                costs[kind] = replace(costs[kind], loaded_s=np.maximum(loaded_s, cost_s))
            if (launches_s := profiled.get(launch_kind(kind))) is not None:
                launches_s = self._stored(_launches_of(device), launches_s, 0.0, today)
                costs[kind] = replace(costs[kind], launches_s=launches_s)
        return costs

    def _stored(
        self,
        conditions: Conditions,
        times_s: NDArray[np.float64],
        overhead_s: float,
        today: str,
    ) -> NDArray[np.float64]:
        """Return the medians of a profile, whose session with overhead is stored in the cache."""
        runs_s = np.atleast_2d(times_s)
        if self.signatures is not None:
            session = session_of(runs_s + overhead_s, self.signatures, today)
            CostCache().store(conditions, session)
            for unplaced in (False, True):  # both have these costs
                step = step_id(self.signatures, unplaced=unplaced)
                FactorCache().forget_factors(conditions, step)
        return np.asarray(np.median(runs_s, axis=0), np.float64)

    def _store_oversize(
        self, device: Device, cost_s: NDArray[np.float64], free_bytes: int | None
    ) -> None:
        """Store which ops did not fit in the memory that was free, before and after."""
        left_bytes = self._free_bytes(device)
        if self.signatures is None or free_bytes is None or left_bytes is None:
            return
        rows = list(zip(self.signatures, np.isnan(cost_s).tolist(), strict=True))
        fitting = {signature for signature, lacks_room in rows if not lacks_room}
        oversize = {signature for signature, _ in rows} - fitting
        OversizeCache().store_oversize(
            conditions_of(device), oversize, fitting, min(free_bytes, left_bytes)
        )

    def _free_bytes(self, device: Device) -> int | None:
        return None if self.free_bytes is None else self.free_bytes(device)

    def _cached(self, devices: Mapping[str, Device]) -> dict[str, OpCosts]:
        """Return the costs of those kinds of devices that have all of them in the cache."""
        cached: dict[str, OpCosts] = {}
        for kind, device in devices.items():
            count = self.at_once.get(kind, 1)
            costs = self._known(device, 1)
            loaded = self._known(device, count) if count > 1 else costs
            if costs is None or loaded is None:
                continue
            if count > 1:
                costs = replace(costs, loaded_s=np.maximum(loaded.cost_s, costs.cost_s))
            costs = replace(costs, launches_s=self._known_launches(device))
            factors = FactorCache().factors(conditions_of(device), self._step)
            cached[kind] = self._fitted(costs, factors) if factors else costs
        return cached

    def _known(self, device: Device, count: int) -> OpCosts | None:
        """Return the cached costs on a device while ``count`` devices compute, None unless all."""
        if self.signatures is None:
            return None
        known = CostCache().known(conditions_of(device, count), self.signatures)
        lacking = set(self.signatures).difference(known)
        if lacking and not self._are_oversize(device, lacking):
            return None
        no_room = KnownCost(cost_s=np.nan, measured="without room for it")
        ops = [known.get(signature, no_room) for signature in self.signatures]
        times_s = np.array([op.cost_s for op in ops])
        return OpCosts(
            cost_s=np.maximum(times_s - self._overhead_s(device), 0.0),
            sources=[f"cached, measured {op.measured}{self.method}" for op in ops],
        )

    def _known_launches(self, device: Device) -> NDArray[np.float64] | None:
        """Return the cached seconds of launches, (N,), nan where there are none; None without any.

        They are stored with the costs, so they are known where these are.
        """
        known = CostCache().known(_launches_of(device), self.signatures or ())
        if not known:
            return None
        no_launch = KnownCost(cost_s=np.nan, measured="")
        return np.array([known.get(name, no_launch).cost_s for name in self.signatures or ()])

    def _are_oversize(self, device: Device, signatures: Collection[str]) -> bool:
        """Return whether none of these ops fitted when as much memory was free as now."""
        free_bytes = self._free_bytes(device)
        if free_bytes is None:
            return False
        oversize = OversizeCache().oversize(conditions_of(device), signatures, free_bytes)
        return oversize.issuperset(signatures)

    def keep_factors(self, devices: Mapping[str, Device], factors: Factors) -> None:
        """Keep factors with the costs that they were fitted to."""
        if self.signatures is None:
            return
        largest = LARGEST_UNPLACED if self.unplaced else LARGEST
        for kind in factors.keys() & devices.keys():
            conditions = conditions_of(devices[kind])
            FactorCache().scale_factors(conditions, self._step, factors[kind], largest)

    def _fitted(self, costs: OpCosts, factors: Mapping[str, float]) -> OpCosts:
        of_ops = factors_of_ops(self.classes, factors)
        cost_s, loaded_s, launches_s = costs.cost_s * of_ops, costs.loaded_s, costs.launches_s
        if loaded_s is not None:
            loaded_s = scaled_loaded_s(loaded_s * of_ops, cost_s, factors)
        if launches_s is not None:
            launches_s = launches_s * factors.get(LAUNCH, 1.0)
        return OpCosts(
            cost_s=cost_s,
            sources=[fitted_source(source) for source in costs.sources],
            loaded_s=loaded_s,
            launches_s=launches_s,
        )

    @property
    def _step(self) -> str:
        return step_id(self.signatures or (), unplaced=self.unplaced)

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
        {kind: known.loaded_s for kind, known in costs.items() if known.loaded_s is not None},
        {kind: known.launches_s for kind, known in costs.items() if known.launches_s is not None},
    )


def loaded_kind(kind: str, count: int) -> str:
    """Return the name in profiles and in the cache for a kind while ``count`` devices compute."""
    return kind if count == 1 else f"{kind}, {count} at once"


def launch_kind(kind: str) -> str:
    """Return the name in profiles and in the cache for launches on a kind of device."""
    return f"{kind}, launches"


def _launches_of(device: Device) -> Conditions:
    conditions = conditions_of(device)
    return replace(conditions, kind=launch_kind(conditions.kind))


def conditions_of(device: Device, count: int = 1) -> Conditions:
    """Return the conditions of times on a device of this machine while ``count`` devices compute.

    The device kind is that of the hardware, whatever the cluster calls it. The hardware of a GPU
    includes its driver, which compiles kernels and schedules them.
    """
    hardware = [host(), processor()]
    if device.name.startswith("cuda") and (driver := driver_version()):
        hardware.append(f"driver {driver}")
    return Conditions(
        kind=loaded_kind(device_kind(device.name), count),
        hardware=", ".join(hardware),
        torch=torch.__version__,
    )


def session_of(runs_s: NDArray[np.float64], signatures: Sequence[str], day: str) -> Session:
    """Return the cache entry for a profile (R, N); the noise of a single run is unknown."""
    ops = defaultdict(list)
    for op, signature in enumerate(signatures):
        ops[signature].append(op)
    spread = None
    if len(runs_s) > 1:
        low, middle, high = np.quantile(np.nansum(runs_s, axis=1), [0.25, 0.5, 0.75])
        spread = float((high - low) / middle) if middle else 0.0
    return Session(
        cost_s={signature: _median(runs_s[:, where]) for signature, where in ops.items()},
        runs=len(runs_s),
        spread=spread,
        measured=day,
    )


def _median(times_s: NDArray[np.float64]) -> float:
    """Return the median without the ops that did not fit; nan if none did."""
    ran_s = times_s[~np.isnan(times_s)]
    return float(np.median(ran_s)) if len(ran_s) else np.nan
