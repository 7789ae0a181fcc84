"""A placement: a device and a priority for every op, and what replays and validates it.

``placement.json``::

    {"format": "placer-placement/1", "graph": hash, "cluster": name,
     "devices": {op id: device name}, "priority": {op id: number},
     "objective": "latency", "micro_batches": 1,
     "predicted": {"step_s": ..., "peak_memory_bytes": {device: int}} or null,
     "measured": {"step_s": ..., ...} or null,
     "made_by": {"placer": ..., "seed": ..., "budget": ..., "version": ...}}
"""

from __future__ import annotations

import difflib
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from envs.cluster import Cluster
from graphs.graph import GraphArrays

FORMAT: Final = "placer-placement/1"
OBJECTIVES: Final = ("latency", "throughput", "max-load")


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeBy:
    """Who made a placement, and what would make it again."""

    placer: str = ""
    seed: int | None = None
    budget: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """``ops[i]`` runs on ``device_names[devices[i]]``; of ready ops the highest ``priority`` first.

    ``predicted`` and ``measured`` hold at least ``step_s`` where they are known.
    """

    graph: str  # hash of the graph
    cluster: str
    ops: tuple[str, ...]
    device_names: tuple[str, ...]
    devices: tuple[int, ...]
    priority: tuple[float, ...]
    objective: str = "latency"
    micro_batches: int = 1
    predicted: Mapping[str, Any] | None = None
    measured: Mapping[str, Any] | None = None
    made_by: MadeBy = field(default_factory=MadeBy)

    def __post_init__(self) -> None:
        if not len(self.ops) == len(self.devices) == len(self.priority):
            raise ValueError(
                f"a placement of {len(self.ops)} ops has {len(self.devices)} devices and "
                f"{len(self.priority)} priorities"
            )
        for op_id, d, priority in zip(self.ops, self.devices, self.priority, strict=True):
            if not 0 <= d < len(self.device_names):
                raise ValueError(
                    f"op {op_id!r} is on device {d} of {len(self.device_names)} devices"
                )
            if not math.isfinite(priority):
                raise ValueError(f"op {op_id!r}: priority is {priority}, not a finite number")
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective is {self.objective!r}, not one of {', '.join(OBJECTIVES)}")
        if self.micro_batches < 1:
            raise ValueError(f"micro_batches is {self.micro_batches}, below 1")

    @classmethod
    def of(
        cls,
        graph: GraphArrays,
        cluster: Cluster,
        devices: NDArray[np.integer[Any]],
        priority: NDArray[np.floating[Any] | np.integer[Any]],
        made_by: MadeBy | None = None,
    ) -> Placement:
        """A placement from arrays (N,) of device indices and priorities."""
        return cls(
            graph=graph.hash,
            cluster=cluster.name,
            ops=graph.ids,
            device_names=cluster.names,
            devices=tuple(devices.tolist()),
            priority=tuple(priority.tolist()),
            made_by=made_by or MadeBy(),
        )

    def arrays(self) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """Device indices (N,) and priorities (N,)."""
        return np.array(self.devices, np.int32), np.array(self.priority, np.float64)

    def device_of(self, name: str) -> str:
        """The device of an op; of a module: where its first op runs, the home of its parameters.

        Raises:
            KeyError: there is neither such an op nor such a module.
        """
        if name in self.ops:
            return self.device_names[self.devices[self.ops.index(name)]]
        return self.device_names[self.devices[self._inside(name)[0]]]

    def devices_of(self, module: str) -> dict[str, int]:
        """How many ops of a module run on each device, most first.

        Raises:
            KeyError: there is no such module.
        """
        inside = Counter(self.device_names[self.devices[i]] for i in self._inside(module))
        return dict(inside.most_common())

    def _inside(self, module: str) -> list[int]:
        paths = [module_of(op_id) for op_id in self.ops]
        inside = [
            i for i, path in enumerate(paths) if path == module or path.startswith(module + ".")
        ]
        if not inside:
            near = difflib.get_close_matches(module, {*paths, *self.ops}, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise KeyError(f"no op or module {module!r} in this placement{hint}")
        return inside

    def check(self, graph: GraphArrays, cluster: Cluster) -> None:
        """Make sure that this placement belongs to a graph and a cluster.

        Raises:
            ValueError: it is of another graph or cluster, splits a co-location group, or puts an op
                where the graph does not allow it.
        """
        if self.graph != graph.hash:
            raise self._of_another(graph)
        if self.device_names != cluster.names:
            raise ValueError(
                f"this placement was made for devices {', '.join(self.device_names)}, the cluster "
                f"{cluster.name!r} has {', '.join(cluster.names)}"
            )
        home: dict[int, int] = {}
        for i, (group, d) in enumerate(zip(graph.group.tolist(), self.devices, strict=True)):
            first = home.setdefault(group, i) if group >= 0 else i
            if self.devices[first] != d:
                raise ValueError(
                    f"ops {graph.ids[first]!r} and {graph.ids[i]!r} share state and must be on one "
                    f"device, but are on {self.device_names[self.devices[first]]} and "
                    f"{self.device_names[d]}"
                )
            limits = graph.allowed[i]
            if limits is not None and self.device_names[d] not in limits:
                raise ValueError(
                    f"op {graph.ids[i]!r} is on {self.device_names[d]}, but may only run on "
                    f"{', '.join(limits)}"
                )

    def aligned(self, graph: GraphArrays, cluster: Cluster) -> Placement:
        """The same placement with its ops in the order of the graph, devices in the cluster's.

        Placement files of other writers list ops in any order and need not know the graph's hash
        (an empty one matches every graph); what comes back is complete and checked.

        Raises:
            ValueError: it lacks ops of the graph or has others, names a device that the cluster
                has not, or :meth:`check` refuses it.
        """
        if self.graph and self.graph != graph.hash:
            raise self._of_another(graph)
        places = {op_id: i for i, op_id in enumerate(self.ops)}
        if missing := [op_id for op_id in graph.ids if op_id not in places]:
            raise ValueError(
                f"this placement lacks {len(missing)} of the {len(graph)} ops of {graph.name!r}, "
                f"such as {missing[0]!r}"
            )
        if len(places) > len(graph):
            known = set(graph.ids)
            surplus = [op_id for op_id in self.ops if op_id not in known]
            raise ValueError(
                f"this placement has {len(surplus)} ops that {graph.name!r} has not, such as "
                f"{surplus[0]!r}"
            )
        order = [places[op_id] for op_id in graph.ids]
        index = {d: cluster.index(self.device_names[d]) for d in sorted(set(self.devices))}
        aligned = replace(
            self,
            graph=graph.hash,
            cluster=cluster.name,
            ops=graph.ids,
            device_names=cluster.names,
            devices=tuple(index[self.devices[i]] for i in order),
            priority=tuple(self.priority[i] for i in order),
        )
        aligned.check(graph, cluster)
        return aligned

    def _of_another(self, graph: GraphArrays) -> ValueError:
        return ValueError(
            f"this placement was made for graph {self.graph[:12]}, not for {graph.name!r} "
            f"({graph.hash[:12]}): the model, its inputs or the torch version differ. "
            "Run placer optimize again."
        )

    def to_dict(self) -> dict[str, Any]:
        """The content of a placement file."""
        return {
            "format": FORMAT,
            "graph": self.graph,
            "cluster": self.cluster,
            "devices": {
                op_id: self.device_names[d] for op_id, d in zip(self.ops, self.devices, strict=True)
            },
            "priority": dict(zip(self.ops, self.priority, strict=True)),
            "objective": self.objective,
            "micro_batches": self.micro_batches,
            "predicted": None if self.predicted is None else dict(self.predicted),
            "measured": None if self.measured is None else dict(self.measured),
            "made_by": asdict(self.made_by),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], device_names: tuple[str, ...] = ()) -> Placement:
        """A placement from the content of a placement file.

        ``device_names`` gives the order of devices (a cluster's); without it they are in order of
        first use.

        Raises:
            ValueError: unknown or missing keys, or values of a wrong type or out of range.
        """
        names = {"format", "graph", "cluster", "devices", "priority", "objective", "micro_batches"}
        names |= {"predicted", "measured", "made_by"}
        if unknown := sorted(set(data) - names):
            near = difflib.get_close_matches(unknown[0], names, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"unknown key {unknown[0]}{hint}")
        if data.get("format") != FORMAT:
            raise ValueError(f"format is {data.get('format')!r}, this version reads {FORMAT!r}")
        devices = _mapping(data, "devices", str)
        priority = _mapping(data, "priority", (int, float)) if "priority" in data else {}
        if stray := [op_id for op_id in priority if op_id not in devices]:
            raise ValueError(f"priority[{stray[0]!r}]: devices has no such op")
        known = device_names or tuple(dict.fromkeys(devices.values()))
        for op_id, name in devices.items():
            if name not in known:
                raise ValueError(
                    f"devices[{op_id!r}] is {name!r}; the cluster has {', '.join(known)}"
                )
        for key, kind in (("graph", str), ("cluster", str), ("objective", str)):
            if not isinstance(data.get(key, ""), kind):
                raise ValueError(f"{key} is not a string")
        micro_batches = data.get("micro_batches", 1)
        if not isinstance(micro_batches, int) or isinstance(micro_batches, bool):
            raise ValueError("micro_batches is not a whole number")
        return cls(
            graph=data.get("graph", ""),
            cluster=data.get("cluster", ""),
            ops=tuple(devices),
            device_names=known,
            devices=tuple(known.index(name) for name in devices.values()),
            priority=tuple(float(priority.get(op_id, 0.0)) for op_id in devices),
            objective=data.get("objective", "latency"),
            micro_batches=micro_batches,
            predicted=_optional(data, "predicted"),
            measured=_optional(data, "measured"),
            made_by=_made_by(data.get("made_by") or {}),
        )

    def save(self, path: Path) -> None:
        """Write the placement as JSON; the file is complete or absent, never half-written."""
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        partial.replace(path)

    @classmethod
    def load(cls, path: Path, device_names: tuple[str, ...] = ()) -> Placement:
        """Read a placement file.

        Raises:
            ValueError: it is not JSON or not a placement; the message starts with the file.
            OSError: it cannot be read.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(data, dict):
                raise ValueError("the file holds no JSON object")
            return cls.from_dict(data, device_names)
        except (ValueError, OverflowError, RecursionError) as error:
            raise ValueError(f"{path}: {error}") from error


def module_of(op_id: str) -> str:
    """The module path in an op's id, ``module[@call]:[backward/]op[#occurrence]``; "" if none."""
    path, colon, _ = op_id.partition(":")
    return path.partition("@")[0] if colon else ""


def _mapping(data: Mapping[str, Any], key: str, kind: type | tuple[type, ...]) -> Mapping[str, Any]:
    value = data.get(key)
    if not isinstance(value, dict):
        raise ValueError(f"{key} is missing or not an object")
    for op_id, item in value.items():
        if not isinstance(item, kind) or isinstance(item, bool):
            raise ValueError(f"{key}[{op_id!r}] is {item!r}")
    return value


def _optional(data: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
    value = data.get(key)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{key} is neither an object nor null")
    return value


def _made_by(data: object) -> MadeBy:
    if not isinstance(data, dict) or set(data) - {"placer", "seed", "budget", "version"}:
        raise ValueError("made_by is not an object of placer, seed, budget and version")
    return MadeBy(**data)
