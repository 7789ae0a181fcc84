"""The graph of modules of a step, in which each module can be placed as a whole.

Code of a module between two of its calls may use tensors from before them, so that all work that a
module does itself, in every call, is on one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import networkx as nx

from graphs.extract.call_graph import CallGraph, call_graph
from graphs.extract.extraction import Extraction
from graphs.graph import attributes_of

Device = TypeVar("Device")


@dataclass(frozen=True, slots=True, eq=False)
class ModuleMap:
    """A graph of modules with N ops; op ``i`` belongs to the module with path ``modules[i]``."""

    graph: nx.DiGraph[str]
    modules: tuple[str, ...]

    def devices_of_calls(self, devices: Sequence[Device]) -> dict[str, Device]:
        """Return {path of a module: its device}, given the device of every op, (N,).

        Raises:
            ValueError: the number of devices is not the number of ops.
        """
        if len(devices) != len(self.modules):
            raise ValueError(f"{len(devices)} devices are not for {len(self.modules)} ops")
        return dict(zip(self.modules, devices, strict=True))

    def launch_order(self, priority: Sequence[float]) -> tuple[str, ...]:
        """Return an empty order: the model's own code decides."""
        del priority
        return ()


def placeable(extraction: Extraction) -> CallGraph | ModuleMap:
    """Return the graph that torch devices can run: of the exported calls, else of the modules.

    Raises:
        ExtractionError: the step was recorded, or torch devices cannot run its export.
    """
    if extraction.extractor == "modules":
        return module_map(extraction)
    return call_graph(extraction)


def module_map(extraction: Extraction) -> ModuleMap:
    """Return the graph of a step extracted by its modules, the ops of each in one group."""
    graph: nx.DiGraph[str] = extraction.graph.copy()
    modules = tuple(unit.call.path for unit in extraction.units)
    together: nx.Graph[tuple[str, str]] = nx.Graph()
    for op, module in zip(graph, modules, strict=True):
        together.add_edge(("op", op), ("module", module))
        if (group := attributes_of(graph, op)["colocate"]) is not None:
            together.add_edge(("op", op), ("group", group))
    for members in nx.connected_components(together):
        ops = [name for kind, name in members if kind == "op"]
        group = min(f"module {name}" for kind, name in members if kind == "module")
        for op in ops if len(ops) > 1 else ():
            graph.nodes[op]["colocate"] = group
    return ModuleMap(graph, modules)
