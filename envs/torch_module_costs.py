"""Costs of the modules of a step on torch devices: measured, or modelled if memory runs out."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from functools import partial

import numpy as np

from envs import torch_devices
from envs.cluster import Cluster
from envs.module_costs import profile_modules_on
from envs.op_costs import OpCosts
from envs.roofline import SOURCE, roofline_costs
from envs.torch_devices import torch_device, unless_out_of_memory
from envs.watchdog import timed_within_bounds
from graphs.extract import Extraction


def module_costs(
    extraction: Extraction,
    cluster: Cluster,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, OpCosts]:
    """Return the seconds of every op of a graph of modules, {device kind: costs (N,)}.

    The whole step runs on one device of each kind. If it does not fit, the roofline of the measured
    rates of the device is used. The launch overhead, which every op of a problem gets added, is
    subtracted.

    Raises:
        ValueError: a device does not exist on this machine.
    """
    first_of = {device.kind: device for device in reversed(cluster.devices)}
    limits = {torch_device(device.name): device.memory_bytes for device in cluster.devices}
    today = datetime.date.today().isoformat()
    found: dict[str, OpCosts] = {}
    with torch_devices.limited(limits):
        for done, (kind, device) in enumerate(sorted(first_of.items()), 1):
            where = torch_device(device.name)
            with timed_within_bounds("the modules of a step", where):
                launched_s = unless_out_of_memory(
                    partial(profile_modules_on, where, extraction), where
                )
            if launched_s is None:
                cost_s, source = roofline_costs(extraction.graph, [device])[kind], SOURCE
            else:
                cost_s = np.maximum(launched_s - device.launch_s, 0.0)
                source = f"measured {today}, module by module"
            torch_devices.release(where)
            found[kind] = OpCosts(cost_s=cost_s, sources=(source,) * len(cost_s))
            if progress is not None:
                progress(done, len(first_of))
    return found
