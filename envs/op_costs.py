"""Costs of the ops of a step on the devices of a cluster, and the source of each number.

Kinds with a device on this machine are measured or taken from the cache (envs/cost_cache.py); all
others get a roofline estimate from their rates (envs/roofline.py).
"""

from __future__ import annotations

import datetime
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from envs.cache_folder import host, processor
from envs.cluster import Cluster, Device, load_cluster
from envs.cost_cache import Conditions, CostCache, KnownCost, Session
from envs.discover import check_cores, check_devices, cores_of, is_here, kind_of
from envs.host_names import is_core
from envs.module_costs import profile_modules
from envs.op_signature import op_signatures
from envs.profiling import profile_runs
from envs.roofline import SOURCE, check_rates, roofline_costs
from graphs.extract import Extraction


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCosts:
    """Seconds of every op on one kind of device, (N,), and the source of each."""

    cost_s: NDArray[np.float64]
    sources: Sequence[str]


def op_costs(
    extraction: Extraction,
    cluster: Cluster,
    *,
    fresh: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, OpCosts]:
    """Return the costs on every kind of device in a cluster, {device kind: costs}.

    ``fresh`` ignores the cache but still stores the new measurements.

    Raises:
        ValueError: a device that is not on this machine lacks rates, or devices of its kind have
            different rates.
        WorkerError: an op cannot run on a device.
        ExtractionError: the graph is of modules, and they cannot be timed.
    """
    check_cluster(cluster)
    here = {device.kind: device for device in reversed(cluster.devices) if _runs_ops(device.name)}
    described = [device for device in cluster.devices if device.kind not in here]
    found = _measured(extraction, here, fresh=fresh, progress=progress)
    for kind, cost_s in roofline_costs(extraction.graph, described).items():
        found[kind] = OpCosts(cost_s=cost_s, sources=(SOURCE,) * len(cost_s))
    return found


def check_cluster(cluster: Cluster) -> None:
    """Check that every device is on this machine or has rates.

    Torch devices run only if all devices are on this machine; otherwise they need rates, too.

    Raises:
        ValueError: a device has neither, two devices share a core, or all are on this machine but
            mix cores with torch devices; says what to change.
    """
    if all(map(is_here, cluster.names)):
        check_devices(cluster.names)
        return
    check_cores([name for name in cluster.names if _runs_ops(name)])
    check_rates([device for device in cluster.devices if not _runs_ops(device.name)])


def _runs_ops(name: str) -> bool:
    return is_core(name) and is_here(name)


def load_devices(path: Path) -> Cluster:
    """Read a cluster file whose devices can run the ops of a model, really or simulated.

    Raises:
        ValueError: it is not a cluster file, or :func:`check_cluster` rejects it; the message
            starts with the path.
        OSError: it cannot be read.
    """
    cluster = load_cluster(path)
    try:
        check_cluster(cluster)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return cluster


def _measured(
    extraction: Extraction,
    devices: Mapping[str, Device],
    *,
    fresh: bool,
    progress: Callable[[int, int], None] | None,
) -> dict[str, OpCosts]:
    today = datetime.date.today().isoformat()
    if extraction.own_program is None:  # module calls have no signature to cache them by
        sources = (f"measured {today}, module by module",) * len(extraction.graph)
        costs_s = profile_modules(extraction, list(devices.values()), progress=progress)
        return {kind: OpCosts(cost_s=costs_s[kind], sources=sources) for kind in devices}
    signatures = op_signatures(extraction.program)
    cache = CostCache()
    found = {} if fresh else _known(signatures, devices, cache)
    missing = [device for kind, device in devices.items() if kind not in found]
    for kind, runs_s in profile_runs(extraction, missing, progress=progress).items():
        cache.store(conditions_of(devices[kind]), session_of(runs_s, signatures, today))
        sources = (f"measured {today} in runs of the whole step",) * len(signatures)
        found[kind] = OpCosts(cost_s=np.median(runs_s, axis=0), sources=sources)
    return found


def known_op_costs(extraction: Extraction, cluster: Cluster) -> dict[str, OpCosts] | None:
    """Return the cached costs on cores of this machine, or None unless all ops are cached.

    Raises:
        ValueError: a device does not exist on this machine.
    """
    if extraction.own_program is None:
        return None
    devices = {device.kind: device for device in reversed(cluster.devices)}
    found = _known(op_signatures(extraction.program), devices, CostCache())
    return found if found.keys() == devices.keys() else None


def _known(
    signatures: Sequence[str], devices: Mapping[str, Device], cache: CostCache
) -> dict[str, OpCosts]:
    found: dict[str, OpCosts] = {}
    for kind, device in devices.items():
        known = cache.known(conditions_of(device), signatures)
        if all(signature in known for signature in signatures):
            found[kind] = _from_cache([known[signature] for signature in signatures])
    return found


def conditions_of(device: Device) -> Conditions:
    """Return the conditions under which times on a core set of this machine are valid.

    The device kind is derived from the number of cores, whatever the cluster calls it.
    """
    return Conditions(
        kind=kind_of(len(cores_of(device.name))),
        hardware=f"{host()}, {processor()}",
        torch=torch.__version__,
    )


def session_of(runs_s: NDArray[np.float64], signatures: Sequence[str], day: str) -> Session:
    """Return the cache entry for a profile (runs, N)."""
    ops = defaultdict(list)
    for op, signature in enumerate(signatures):
        ops[signature].append(op)
    low, middle, high = np.quantile(runs_s.sum(axis=1), [0.25, 0.5, 0.75])
    return Session(
        cost_s={signature: float(np.median(runs_s[:, own])) for signature, own in ops.items()},
        runs=len(runs_s),
        spread=float((high - low) / middle),
        measured=day,
    )


def _from_cache(costs: Sequence[KnownCost]) -> OpCosts:
    return OpCosts(
        cost_s=np.array([cost.cost_s for cost in costs]),
        sources=[f"cached, measured {cost.measured} in runs of the whole step" for cost in costs],
    )
