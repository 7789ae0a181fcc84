"""What a step takes on torch's devices beyond what the graph of its calls says.

Gradients of parameters stay until the optimizer has used them. They are counted with the
parameters, as if they were there from the start of the step: a little more than really is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import networkx as nx

from envs.cluster import Cluster, Device
from envs.torch_devices import is_core
from graphs.extract import Extraction
from graphs.extract.call_graph import CallGraph
from graphs.graph import attributes_of

FRAGMENTED_SHARE: Final = 0.08
"""Part of a device's memory that lies in gaps between tensors; a guess, 5 to 15 % are usual."""
LIBRARY_BYTES: Final = 96 << 20
"""Scratch memory of cuBLAS (32 MiB on recent GPUs, for each of two streams) and cuDNN."""


def with_gradients(extraction: Extraction, calls: CallGraph) -> nx.DiGraph[str]:
    """The graph of the calls, with the gradient of every parameter counted where that lives."""
    graph = calls.graph.copy()
    program = extraction.program
    names = list(graph)
    home = parameter_homes(extraction, calls)
    producer = program.producers()
    for result in program.results:
        root = program.values[result.value].root
        name = program.ties.get(result.name, result.name)
        if result.role != "gradient" or name not in home:
            continue
        size = program.values[root].size_bytes
        graph.nodes[names[home[name]]]["parameter_bytes"] += size
        if root in producer:  # it is no output that comes and goes
            maker = names[int(calls.node_of[program.calls[producer[root]].op])]
            left = attributes_of(graph, maker)["output_bytes"] - size
            graph.nodes[maker]["output_bytes"] = max(left, 0)
    return graph


def parameter_homes(extraction: Extraction, calls: CallGraph) -> Mapping[str, int]:
    """{first name of a parameter: node of the first call that reads it}."""
    nodes: dict[int, int] = {}
    for call in extraction.forward.placed_calls:
        for value in call.reads:
            nodes.setdefault(extraction.forward.storage_of[value], calls.node_of_call[call.key])
    ties = extraction.program.ties
    homes: dict[str, int] = {}
    for source in extraction.forward.sources:
        storage = extraction.forward.storage_of[source.value]
        if source.role == "parameter" and storage in nodes:
            homes.setdefault(ties.get(source.name, source.name), nodes[storage])
    return homes


def plannable(cluster: Cluster) -> Cluster:
    """The cluster with the memory of torch's devices that placements may be planned for.

    The rest is left for gaps and for libraries. The context of a CUDA device is in neither: it is
    taken before free memory is asked for.
    """
    return replace(cluster, devices=tuple(map(_plannable, cluster.devices)))


def _plannable(device: Device) -> Device:
    if is_core(device.name):
        return device
    libraries = LIBRARY_BYTES if device.name.startswith("cuda") else 0
    left = int(device.memory_bytes * (1 - FRAGMENTED_SHARE)) - libraries
    return replace(device, memory_bytes=max(left, 0))
