"""Steps placed at random on cores, call by call and module by module."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from envs.executors.cores.fork_server import running_server
from envs.executors.cores.instruction_lists import priority_order
from envs.executors.cores.placed_model import PlacedModel
from envs.executors.cores.pool import WorkerPool
from envs.executors.hooks.hooked_module import HookedModule
from envs.executors.torch.placed_module import PlacedModule
from envs.hardware.cluster import Cluster
from envs.hardware.discover import discover
from graphs.extract import Extraction
from graphs.extract.placeable import call_graph, module_map
from graphs.graph import attributes_of

CORES = sorted(os.sched_getaffinity(0))


def two_cores() -> Cluster:
    return discover(f"core:{CORES[0]},core:{CORES[1]}")


def on_cores(extraction: Extraction, seed: int = 0, cluster: Cluster | None = None) -> PlacedModel:
    """Place every op on a random core, in random order; co-located ones together."""
    cluster = cluster or two_cores()
    randomly = random.Random(seed)
    count = extraction.program.op_count
    order = priority_order(extraction.program, [randomly.random() for _ in range(count)])
    groups = [data["colocate"] or op for op, data in extraction.graph.nodes(data=True)]
    chosen = {group: randomly.randrange(len(cluster)) for group in dict.fromkeys(groups)}
    return PlacedModel(extraction, cluster, [chosen[group] for group in groups], order)


def by_calls(
    extraction: Extraction,
    devices: Sequence[torch.device | str],
    seed: int = 0,
    *,
    overlap: bool = False,
) -> PlacedModule:
    """Place calls at random on torch devices; with an odd seed in random order."""
    order = random_order(extraction, seed) if seed % 2 else ()
    where = random_devices(extraction, devices, seed)
    return PlacedModule(extraction, where, order, overlap=overlap)


def by_modules(
    extraction: Extraction, devices: Sequence[torch.device | str], seed: int = 0
) -> HookedModule:
    """Place modules at random on torch devices; co-located ones together."""
    modules = module_map(extraction)
    groups = [attributes_of(modules.graph, op)["colocate"] or op for op in modules.graph]
    randomly = random.Random(seed)
    chosen = {group: randomly.choice(devices) for group in dict.fromkeys(groups)}
    if len(chosen) > 1:
        chosen |= dict(zip(randomly.sample(list(chosen), len(devices)), devices, strict=True))
    return HookedModule(extraction, modules.devices_of_calls([chosen[g] for g in groups]))


def worker_ids(placed: PlacedModel | WorkerPool) -> list[int]:
    pool = placed._pool if isinstance(placed, PlacedModel) else placed
    return [worker.process.pid for worker in pool._workers]


def open_descriptors() -> set[str]:
    """Return number and name of the files this process has open, with its server of workers."""
    running_server()
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # of this loop
            found.add(f"{path.name} {path.readlink()}")
    return found


def random_devices(
    extraction: Extraction, devices: Sequence[torch.device | str], seed: int
) -> dict[str, torch.device | str]:
    """Return {call key: device} with co-location groups kept together; every device gets a call."""
    calls = call_graph(extraction)
    groups = [attributes_of(calls.graph, node)["colocate"] or node for node in calls.graph]
    randomly = random.Random(seed)
    chosen = {group: randomly.choice(devices) for group in dict.fromkeys(groups)}
    chosen |= dict(zip(randomly.sample(list(chosen), len(devices)), devices, strict=True))
    return calls.devices_of_calls([chosen[group] for group in groups])


def random_order(extraction: Extraction, seed: int) -> list[str]:
    """Return all calls in random order, for launches to follow as far as possible."""
    keys = [call.key for call in extraction.forward.placed_calls]
    random.Random(seed).shuffle(keys)
    return keys
