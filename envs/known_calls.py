"""Costs of the calls of a step on torch devices, measured now or taken from the cache.

They are cached like the costs of ops (envs/cost_cache.py). The noise of a profile is unknown here,
so each counts as noisy: three of them make a cost known.
"""

from __future__ import annotations

import datetime
import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np
import torch

from envs.cache_folder import host, processor
from envs.call_costs import profile_calls
from envs.cluster import Cluster, Device
from envs.cost_cache import Conditions, CostCache, Session
from envs.op_costs import OpCosts
from envs.op_signature import op_signatures
from envs.torch_module_costs import module_costs
from graphs.extract import Extraction
from graphs.extract.call_graph import CallGraph
from graphs.extract.module_map import ModuleMap

NOISY: Final = 1.0


def call_costs(
    extraction: Extraction,
    calls: CallGraph | ModuleMap,
    cluster: Cluster,
    *,
    fresh: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, OpCosts]:
    """Return the seconds of every node of a call graph, {device kind: costs (M,)}.

    Costs are measured by ``profile_calls``. ``fresh`` ignores the cache but still stores the new
    measurements. Calls of modules have no signature to cache them by: see
    :func:`envs.torch_module_costs.module_costs`.

    Raises:
        ValueError: a device does not exist on this machine.
    """
    if isinstance(calls, ModuleMap):
        return module_costs(extraction, cluster, progress=progress)
    signatures = node_signatures(extraction, calls)
    cache = CostCache()
    devices = {device.kind: device for device in reversed(cluster.devices)}
    found = {} if fresh else _known(signatures, devices.values(), cache)
    missing = [device for kind, device in devices.items() if kind not in found]
    if not missing:
        return found
    of_missing = Cluster(name=cluster.name, devices=tuple(missing))
    today = datetime.date.today().isoformat()
    profiled = profile_calls(extraction, calls, of_missing, progress=progress)
    for device in missing:
        cost_s = profiled[device.kind]
        launched_s = cost_s + device.launch_s
        cache.store(_conditions(device), _session(signatures, launched_s.tolist(), today))
        sources = (f"measured {today}, each call alone",) * len(cost_s)
        found[device.kind] = OpCosts(cost_s=cost_s, sources=sources)
    return found


def known_call_costs(
    extraction: Extraction, calls: CallGraph | ModuleMap, cluster: Cluster
) -> dict[str, OpCosts] | None:
    """Return the cached costs of :func:`call_costs`, or None if any call would have to be measured.

    Raises:
        ValueError: a device does not exist on this machine.
    """
    if isinstance(calls, ModuleMap):
        return None
    devices = {device.kind: device for device in reversed(cluster.devices)}
    found = _known(node_signatures(extraction, calls), devices.values(), CostCache())
    return found if found.keys() == devices.keys() else None


def _known(
    signatures: Sequence[str], devices: Iterable[Device], cache: CostCache
) -> dict[str, OpCosts]:
    found: dict[str, OpCosts] = {}
    for device in devices:
        known = cache.known(_conditions(device), signatures)
        if not all(signature in known for signature in signatures):
            continue
        launched_s = np.array([known[signature].cost_s for signature in signatures])
        found[device.kind] = OpCosts(
            cost_s=np.maximum(launched_s - device.launch_s, 0.0),
            sources=[f"cached, measured {known[s].measured}, each call alone" for s in signatures],
        )
    return found


def node_signatures(extraction: Extraction, calls: CallGraph) -> tuple[str, ...]:
    """Return the signature of every node, (M,): a hash of its ops and the matmul precision."""
    ops: defaultdict[int, list[str]] = defaultdict(list)
    for node, signature in zip(
        calls.node_of.tolist(), op_signatures(extraction.program), strict=True
    ):
        ops[node].append(signature)
    precision = torch.get_float32_matmul_precision()
    texts = ["\n".join([precision, *ops[node]]) for node in range(len(calls.graph))]
    return tuple(hashlib.sha256(text.encode()).hexdigest()[:32] for text in texts)


def _session(signatures: Sequence[str], launched_s: Sequence[float], day: str) -> Session:
    times: defaultdict[str, list[float]] = defaultdict(list)
    for signature, seconds in zip(signatures, launched_s, strict=True):
        if not math.isnan(seconds):
            times[signature].append(seconds)
    return Session(
        cost_s={signature: float(np.median(own)) for signature, own in times.items()},
        runs=1,
        spread=NOISY,
        measured=day,
    )


def _conditions(device: Device) -> Conditions:
    hardware = f"{host()}, {processor()}"
    return Conditions(kind=device.kind, hardware=hardware, torch=torch.__version__)
