"""Placements of tiny steps for tests of exports: random, or cut along the program."""

from __future__ import annotations

import random

import networkx as nx
import numpy as np

from envs.hardware.cluster import Cluster, Device
from envs.placement import Placement
from graphs.extract import Extraction
from graphs.extract.placeable import call_graph
from graphs.graph import GraphArrays, attributes_of
from placer.exports.module_tree import layer_of, stacks


def cluster_of(names: tuple[str, ...]) -> Cluster:
    devices = tuple(Device(name=name, kind=name, memory_bytes=0) for name in names)
    return Cluster(name="any", devices=devices)


def random_placement(
    extraction: Extraction, names: tuple[str, ...], seed: int, *, by: str = "op"
) -> Placement:
    """Return a placement with a random device for every call, module or layer."""
    graph = call_graph(extraction).graph
    found = stacks(extraction.step.model)
    randomly = random.Random(seed)
    chosen: dict[str, int] = {}
    devices = []
    for node in graph:
        module = attributes_of(graph, node)["module"]
        key = {"op": node, "module": module, "layer": layer_of(module, found) or module}[by]
        devices.append(chosen.setdefault(key, randomly.randrange(len(names))))
    return placement_of(graph, names, devices)


def cut_placement(
    extraction: Extraction, names: tuple[str, ...], cuts: tuple[str, ...], *, of_calls: bool
) -> Placement:
    """Return a placement that moves to the next device at each of these modules in forward."""
    graph = call_graph(extraction).graph if of_calls else extraction.graph
    device, waiting = 0, list(cuts)
    devices = []
    for node in graph:
        own = attributes_of(graph, node)
        if own["phase"] == "forward" and waiting and own["module"].startswith(waiting[0]):
            waiting.pop(0)
            device += 1
        devices.append(device)
    assert not waiting, waiting
    return placement_of(graph, names, devices)


def placement_of(graph: nx.DiGraph[str], names: tuple[str, ...], devices: list[int]) -> Placement:
    """Return a placement of a graph; co-location groups go to the device of their first op."""
    arrays = GraphArrays.from_graph(graph)
    home: dict[int, int] = {}
    together = [
        home.setdefault(group, device) if group >= 0 else device
        for group, device in zip(arrays.group.tolist(), devices, strict=True)
    ]
    return Placement.of(arrays, cluster_of(names), np.array(together), np.zeros(len(arrays)))
