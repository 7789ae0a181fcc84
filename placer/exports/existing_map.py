"""Existing Hugging Face device maps: their placement, and whether accelerate could run them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from torch import nn

from envs.hardware.cluster import Cluster
from envs.placement import MadeBy, Placement
from graphs.extract import Extraction
from graphs.extract.extraction import ties_of
from graphs.extract.program import VIEW
from graphs.graph import GraphArrays
from graphs.text import suggestion
from placer.exports.dry_run import INPUTS, Hooks, flow, main_device_of
from placer.exports.module_tree import around, canonical_paths, parent

MOST_NAMED: Final = 3
"""Number of modules that a message names."""
OP_BY_OP: Final = "the device map is run op by op, which dispatch_model would not do: there "


@dataclass(frozen=True, slots=True)
class DeviceMap:
    """A Hugging Face device map, {module: device name}; it includes unlisted submodules.

    An entry for a parameter or buffer counts only if no module of the map contains it. accelerate's
    ``dispatch_model`` moves a tensor with its module in the map and leaves other tensors where they
    were loaded, except those of the model itself, which it moves to the main device.
    """

    devices: Mapping[str, str]

    @property
    def device_names(self) -> tuple[str, ...]:
        """Return the devices in order of first use."""
        return tuple(dict.fromkeys(self.devices.values()))

    def check_devices(self, cluster: Cluster) -> None:
        """Raise ValueError for a device that the cluster has not."""
        for path, name in self.devices.items():
            if name not in cluster.names:
                raise ValueError(
                    f"the device map has {path!r} on {name} (a number N means cuda:N), but the "
                    f"devices are {', '.join(cluster.names)}"
                )

    def conflict(self, extraction: Extraction) -> str:
        """Return why accelerate could not dispatch the map, "" if a dry run finds no conflict.

        There is no dry run for a model that was not exported.
        """
        step, model = extraction.step, extraction.step.model
        modules, tensors = self._entries(model)
        fed = main_device_of(self.device_names)
        device_of = dict(modules)
        for path, name in tensors.items():
            module = around(path, modules)
            if module is None:
                device_of[path] = name if parent(path) else fed
                if device_of[path] != name:
                    return f"{OP_BY_OP}{path}, in no module of the map, is sent to {fed}"
            elif modules[module] != name:
                return (
                    f"the device map has {path} on {name}, which neither dispatch_model nor this "
                    f"run heeds: {module or 'the whole model'} around it is on {modules[module]}"
                )
        if extraction.forward_program is None or len(self.device_names) == 1:
            return ""
        if conflict := flow(extraction.forward_program, step, device_of, fed).conflict:
            code = f"{type(model.get_submodule(conflict.module)).__name__}.forward"
            names = {INPUTS: "the inputs of the model", "": "the rest of the model"}
            producers = " and ".join(names.get(each, each) for each in conflict.producers)
            return (
                f"{OP_BY_OP}{conflict.op} in {code}{conflict.module and f' of {conflict.module}'} "
                f"fails, since what {producers} give is on several devices"
            )
        computed = Hooks(model, device_of, fed).runs_on
        others = [path for path, name in device_of.items() if computed[path] != name]
        if not others:
            return ""
        shown = [path or "the rest of the model" for path in others[:MOST_NAMED]]
        if len(others) > MOST_NAMED:
            shown.append(f"{len(others) - MOST_NAMED} more")
        return f"{OP_BY_OP}{', '.join(shown)} would be computed on {fed}, the main device"

    def placed(self, extraction: Extraction, graph: GraphArrays, cluster: Cluster) -> Placement:
        """Return the placement of a step's graph (of ops or calls) that the map means.

        An op outside all modules of the map runs with a tensor that it reads and the map names,
        else where most of its input bytes come from. Ops that must share a device follow the first
        of them. Priorities keep program order.
        """
        model = extraction.step.model
        self._check(model, cluster)
        path_of = canonical_paths(model)
        modules, tensors = self._entries(model)
        free = {name: device for name, device in tensors.items() if around(name, modules) is None}
        device_of_reader = _of_readers(extraction, graph, free) if free else {}
        devices = np.full(len(graph), -1, np.int64)
        device_of_group: dict[int, int] = {}
        for i in graph.topological.tolist():
            module = around(path_of.get(graph.modules[i], graph.modules[i]), modules)
            if module is not None:
                device = cluster.index(modules[module])
            elif graph.ids[i] in device_of_reader:
                device = cluster.index(device_of_reader[graph.ids[i]])
            else:
                device = _inherited(graph, devices, i)
            group = int(graph.group[i])
            devices[i] = device if group < 0 else device_of_group.setdefault(group, device)
        priority = np.empty(len(graph))
        priority[graph.topological] = np.arange(len(graph), 0, -1)
        return Placement.of(graph, cluster, devices, priority, MadeBy(placer="device map"))

    def _entries(self, model: nn.Module) -> tuple[dict[str, str], dict[str, str]]:
        """Return the entries of modules and those of tensors, by their canonical paths."""
        path_of = canonical_paths(model)
        modules = {path_of[path]: name for path, name in self.devices.items() if path in path_of}
        tensors: dict[str, str] = {}
        for path, name in self.devices.items():
            if path not in path_of:
                owner, dot, tensor = path.rpartition(".")
                tensors[path_of.get(owner, owner) + dot + tensor] = name
        return modules, tensors

    def _check(self, model: nn.Module, cluster: Cluster) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        tensors = model.state_dict().keys()
        for path in self.devices:
            if path not in modules and path not in tensors:
                hint = suggestion(path, modules)
                raise ValueError(
                    f"the device map names {path!r}, which {type(model).__name__} has not{hint}"
                )
        self.check_devices(cluster)
        if missing := [name for name in tensors if around(name, self.devices) is None]:
            raise ValueError(
                f"the device map leaves out {len(missing)} of {len(tensors)} parameters and "
                f"buffers, such as {missing[0]!r}"
            )


def _of_readers(
    extraction: Extraction, graph: GraphArrays, tensors: Mapping[str, str]
) -> dict[str, str]:
    """Return {op: device of the first of these tensors that it reads}, from {tensor: device}."""
    program = extraction.step_program
    if program is None:
        return _of_modules(extraction, tensors)
    ties = ties_of(extraction.step)
    device_of = {ties.get(name, name): device for name, device in tensors.items()}
    of_state = (source for source in program.sources if source.role in ("parameter", "buffer"))
    name_of = {source.value: ties.get(source.name, source.name) for source in of_state}
    ops = tuple(extraction.graph)
    keys = ops if graph.ids == ops else extraction.call_of
    device_of_op: dict[str, str] = {}
    for call in program.calls:
        for value in call.reads if call.op != VIEW else ():
            name = name_of.get(program.values[value].root)
            if name in device_of:
                device_of_op.setdefault(keys[call.op], device_of[name])
    return device_of_op


def _of_modules(extraction: Extraction, tensors: Mapping[str, str]) -> dict[str, str]:
    """Return {op of a graph of modules: device of the tensors that its module has itself}."""
    homes: dict[str, str] = {}
    for name, device in tensors.items():
        if homes.setdefault(parent(name), device) != device:
            raise ValueError(
                f"the device map has {name!r} on {device}, but other tensors of its module on "
                f"{homes[parent(name)]}: in a graph of modules a module has one device itself"
            )
    units = zip(extraction.graph, extraction.units, strict=True)
    return {
        op: homes[unit.call.path]
        for op, unit in units
        if unit.call.path in homes and unit.call.number >= 0  # the loss is in no module
    }


def _inherited(graph: GraphArrays, devices: NDArray[np.int64], i: int) -> int:
    size: dict[int, int] = {}
    for k in range(graph.predecessor_start[i], graph.predecessor_start[i + 1]):
        device = int(devices[graph.predecessors[k]])
        moved = int(graph.edge_bytes[graph.predecessor_edge[k]])
        size[device] = size.get(device, 0) + moved
    return max(size, key=lambda device: size[device], default=0)
