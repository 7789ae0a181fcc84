"""Hugging Face device maps: the placement one means, and whether accelerate could run it."""

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
from graphs.names import suggestion
from placer.choose import WarmStartError
from placer.exports.dry_run import Hooks, flow, main_device_of
from placer.exports.placed_modules import around, canonical_paths, parent
from placer.search.candidate import Kind

MOST_NAMED: Final = 3
"""Number of modules that a message names."""


@dataclass(frozen=True, slots=True)
class DeviceMap:
    """A Hugging Face device map, {module: device name}; it includes unlisted submodules.

    An entry for a parameter or buffer counts only if no module of the map contains it. accelerate's
    ``dispatch_model`` moves a tensor with its module in the map and leaves other tensors where they
    were loaded, except those of the model itself, which it moves to the main device.
    """

    devices: Mapping[str, str]

    def conflict(self, extraction: Extraction) -> str:
        """Return why accelerate could not dispatch the map, "" if a dry run finds no conflict.

        There is no dry run for a model that was not exported.
        """
        if told := self._overruled(canonical_paths(extraction.step.model)):
            return told
        if extraction.forward_program is None or len(self.device_names) == 1:
            return ""
        step, model = extraction.step, extraction.step.model
        path_of = canonical_paths(model)
        device_of = self._dispatched(path_of)
        fed = main_device_of(self.device_names)
        told = "the device map is run op by op, which dispatch_model would not do: "
        if found := flow(extraction.forward_program, step, device_of, fed).conflict:
            return told + (
                f"there {found.description(model)} fails, since what {found.origins} give is on "
                "several devices"
            )
        computed = Hooks.of(model, device_of, fed).runs_on
        others = [path for path, name in device_of.items() if computed[path] != name]
        if not others:
            return ""
        shown = [path or "the rest of the model" for path in others[:MOST_NAMED]]
        if len(others) > MOST_NAMED:
            shown.append(f"{len(others) - MOST_NAMED} more")
        return f"{told}there {', '.join(shown)} would be computed on {fed}, the main device"

    @property
    def device_names(self) -> tuple[str, ...]:
        """Return the devices in order of first use."""
        return tuple(dict.fromkeys(self.devices.values()))

    def placed(self, extraction: Extraction, graph: GraphArrays, cluster: Cluster) -> Placement:
        """Return the placement of a step's graph (of ops or calls) that the map means.

        An op outside all modules of the map runs with a tensor that it reads and the map names,
        else where most of its input bytes come from. Ops that must share a device follow the first
        of them. Priorities keep program order.

        Raises:
            WarmStartError: the map names modules that the model lacks, leaves out some with
                parameters, has devices that the cluster lacks, or names a tensor outside all its
                modules although the graph is a module graph.
        """
        model = extraction.step.model
        self._check(model)
        path_of = canonical_paths(model)
        tensors = self._tensors(path_of)
        known = self._modules(path_of)
        self._check_devices(cluster)
        free = {name: device for name, device in tensors.items() if around(name, known) is None}
        named = _of_readers(extraction, graph, free) if free else {}
        index = {name: cluster.index(name) for name in self.device_names}
        devices = np.full(len(graph), -1, np.int64)
        home: dict[int, int] = {}
        for i in graph.topological.tolist():
            module = around(path_of.get(graph.modules[i], graph.modules[i]), known)
            if module is not None:
                own = index[known[module]]
            elif graph.ids[i] in named:
                own = index[named[graph.ids[i]]]
            else:
                own = _inherited(graph, devices, i)
            group = int(graph.group[i])
            devices[i] = own if group < 0 else home.setdefault(group, own)
        rank = np.empty(len(graph))
        rank[graph.topological] = np.arange(len(graph), 0, -1)
        return Placement.of(graph, cluster, devices, rank, MadeBy(placer=Kind.WARM_START.value))

    def _modules(self, path_of: Mapping[str, str]) -> dict[str, str]:
        return {path_of[path]: name for path, name in self.devices.items() if path in path_of}

    def _tensors(self, path_of: Mapping[str, str]) -> dict[str, str]:
        found: dict[str, str] = {}
        for path, name in self.devices.items():
            if path not in path_of:
                owner, dot, own = path.rpartition(".")
                found[path_of.get(owner, owner) + dot + own] = name
        return found

    def _dispatched(self, path_of: Mapping[str, str]) -> dict[str, str]:
        """Return {path: device} for the entries that dispatch_model uses."""
        modules = self._modules(path_of)
        main = main_device_of(self.device_names)
        tensors = {
            path: name if parent(path) else main
            for path, name in self._tensors(path_of).items()
            if around(path, modules) is None
        }
        return modules | tensors

    def _overruled(self, path_of: Mapping[str, str]) -> str:
        modules, main = self._modules(path_of), main_device_of(self.device_names)
        for path, name in self._tensors(path_of).items():
            module = around(path, modules)
            if module is not None and modules[module] != name:
                return (
                    f"the device map has {path} on {name}, which neither dispatch_model nor this "
                    f"run heeds: {module or 'the whole model'} around it is on {modules[module]}"
                )
            if module is None and not parent(path) and name != main:
                return (
                    "the device map is run op by op, which dispatch_model would not do: there "
                    f"{path}, which is in no module of the map, is sent to {main}, the main device"
                )
        return ""

    def _check_devices(self, cluster: Cluster) -> None:
        for path, name in self.devices.items():
            if name not in cluster.names:
                raise WarmStartError(
                    f"the device map has {path!r} on {name}, {_meant(name, cluster)}"
                )

    def _check(self, model: nn.Module) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        tensors = model.state_dict().keys()
        for path in self.devices:
            if path not in modules and path not in tensors:
                hint = suggestion(path, modules)
                raise WarmStartError(
                    f"the device map names {path!r}, which {type(model).__name__} has not{hint}"
                )
        if missing := [name for name in tensors if around(name, self.devices) is None]:
            raise WarmStartError(
                f"the device map leaves out {len(missing)} of {len(tensors)} parameters and "
                f"buffers, such as {missing[0]!r}"
            )


def _meant(name: str, cluster: Cluster) -> str:
    kind, _, index = name.partition(":")
    there = ", ".join(cluster.names)
    if kind != "cuda" or not index.isdecimal() or any(map(_is_cuda, cluster.names)):
        return f"but the devices are {there}"
    return (
        f"which is what {index} means in device maps, but the devices are {there}: name them in "
        f'the map, such as "{cluster.names[min(int(index), len(cluster.names) - 1)]}" for {index}'
    )


def _is_cuda(name: str) -> bool:
    return name.startswith("cuda:")


def _of_readers(
    extraction: Extraction, graph: GraphArrays, tensors: Mapping[str, str]
) -> dict[str, str]:
    """Return {op: device of the first of these tensors that it reads}, from {tensor: device}.

    Raises:
        WarmStartError: the graph is a module graph, where the tensors that an op reads are unknown.
    """
    program = extraction.step_program
    if program is None:
        raise WarmStartError(
            f"the device map names {next(iter(tensors))!r}, but in a graph of modules it is not "
            "known what reads a tensor: give its module a device, such as the model itself, ''"
        )
    ties = ties_of(extraction.step)
    device_of = {ties.get(name, name): device for name, device in tensors.items()}
    of_state = (source for source in program.sources if source.role in ("parameter", "buffer"))
    name_of = {source.value: ties.get(source.name, source.name) for source in of_state}
    ops = tuple(extraction.graph)
    keys = ops if graph.ids == ops else extraction.call_of
    found: dict[str, str] = {}
    for call in program.calls:
        for value in call.reads if call.op != VIEW else ():
            name = name_of.get(program.values[value].root)
            if name in device_of:
                found.setdefault(keys[call.op], device_of[name])
    return found


def _inherited(graph: GraphArrays, devices: NDArray[np.int64], i: int) -> int:
    size: dict[int, int] = {}
    for k in range(graph.predecessor_start[i], graph.predecessor_start[i + 1]):
        device = int(devices[graph.predecessors[k]])
        moved = int(graph.edge_bytes[graph.predecessor_edge[k]])
        size[device] = size.get(device, 0) + moved
    return max(size, key=lambda device: size[device], default=0)
