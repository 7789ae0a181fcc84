"""A placement: a device and a priority for every op, and the provenance to reproduce it.

``placement.json``::

    {"format": "placer-placement/1", "graph": hash, "cluster": name,
     "devices": {op id: device name}, "device_order": [device name] (optional),
     "priority": {op id: number},
     "objective": "latency", "micro_batches": 1, "in_flight": 4 (optional),
     "predicted": {"step_s": ..., "peak_memory_bytes": {device: int}} or null,
     "measured": {"step_s": ..., ...} or null,
     "made_by": {"placer": ..., "seed": ..., "budget": ..., "version": ...},
     "replicas": {...} (optional, see envs/replication.py)}
"""

from __future__ import annotations

import json
import math
import reprlib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from envs.hardware.cluster import LARGEST_INT, MOST_DEVICES, Cluster
from envs.replication import Replication
from graphs.files import write_whole
from graphs.graph import PHASES, GraphArrays
from graphs.names import suggestion
from graphs.printable import check_printable
from graphs.strict_json import array, fields, inside, load_checked, number, table, text, within

FORMAT: Final = "placer-placement/1"
ROOT: Final = "(model)"
"""Module name that stands for the model itself: ops of its own code, in no submodule."""
OBJECTIVES: Final = ("latency", "throughput", "max-load")
_KEYS: Final = frozenset(
    {"format", "graph", "cluster", "devices", "priority", "objective", "micro_batches"}
    | {"device_order", "in_flight", "predicted", "measured", "made_by", "replicas"}
)
RECORD_RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "spread": (0, 1e6),
    "contention": (0, 1e9),
    "rounds": (0, 10**9),
}
"""Allowed ranges of unitless numbers in ``predicted`` and ``measured``."""
_ENDINGS: Final[Mapping[str, tuple[float, float]]] = {"_s": (0, 1e9), "_bytes": (0, LARGEST_INT)}
MOST_MICRO_BATCHES: Final = 4096
MOST_NESTED: Final = 8
_MAKER_KEYS: Final = frozenset({"placer", "seed", "budget", "version"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeBy:
    """Provenance: the algorithm that made a placement, and the settings to reproduce it."""

    placer: str = ""
    seed: int | None = None
    budget: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """``ops[i]`` runs on ``device_names[devices[i]]``; among ready ops, highest ``priority`` first.

    Links serve transfers in order of request or, with ``order = "priority"``, by the highest
    priority among the ops that wait for each. At most ``in_flight`` of the ``micro_batches`` are
    active at once; None means one per device. With ``replicas`` it is the placement of each
    replica.

    ``predicted`` and ``measured`` hold at least ``step_s``, or are None if unknown. Values with
    names ending in ``_s`` are seconds, those in ``_bytes`` are bytes or map devices to bytes, those
    in RECORD_RANGES are numbers; others are free-form.
    """

    graph: str  # hash of the graph
    cluster: str
    ops: tuple[str, ...]
    device_names: tuple[str, ...]
    devices: tuple[int, ...]
    priority: tuple[float, ...]
    objective: str = "latency"
    micro_batches: int = 1
    in_flight: int | None = None
    predicted: Mapping[str, Any] | None = None
    measured: Mapping[str, Any] | None = None
    made_by: MadeBy = field(default_factory=MadeBy)
    replicas: Replication | None = None

    def __post_init__(self) -> None:
        if not self.ops:
            raise ValueError("a placement has at least one op; this one has none")
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
        within(len(self.device_names), 1, MOST_DEVICES, "the number of devices")
        check_micro_batches(self.micro_batches, self.in_flight)
        for where, record in (("predicted", self.predicted), ("measured", self.measured)):
            if record is not None:
                _check_record(record, where)

    @classmethod
    def of(
        cls,
        graph: GraphArrays,
        cluster: Cluster,
        devices: NDArray[np.integer[Any]],
        priority: NDArray[np.floating[Any] | np.integer[Any]],
        made_by: MadeBy | None = None,
    ) -> Placement:
        """Build a placement from arrays (N,) of device indices and priorities."""
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
        """Return device indices (N,) and priorities (N,)."""
        return np.array(self.devices, np.int32), np.array(self.priority, np.float64)

    def device_of(self, name: str) -> str:
        """Return the device of an op, or of the first op of a module, where its parameters live.

        ``"(model)"`` stands for the ops that are in no module.

        Raises:
            KeyError: there is no such op or module.
        """
        if name in self.ops:
            return self.device_names[self.devices[self.ops.index(name)]]
        return self.device_names[self.devices[self._inside(name)[0]]]

    def devices_of(self, module: str) -> dict[str, int]:
        """Return the number of ops of a module on each device, most first.

        Raises:
            KeyError: there is no such module.
        """
        inside = Counter(self.device_names[self.devices[i]] for i in self._inside(module))
        return dict(inside.most_common())

    def phases_of(self, module: str) -> dict[str, dict[str, int]]:
        """Return {device: {phase: number of ops of a module}}, devices with most ops first.

        Raises:
            KeyError: there is no such module.
        """
        counts: dict[str, Counter[str]] = {name: Counter() for name in self.devices_of(module)}
        for i in self._inside(module):
            counts[self.device_names[self.devices[i]]][phase_of(self.ops[i])] += 1
        return {
            name: {phase: own[phase] for phase in PHASES if own[phase]}
            for name, own in counts.items()
        }

    def _inside(self, module: str) -> list[int]:
        paths = [module_of(op_id) for op_id in self.ops]
        inside = [
            i
            for i, path in enumerate(paths)
            if path == module or path.startswith(module + ".") or (module == ROOT and not path)
        ]
        if not inside:
            hint = suggestion(module, {*paths, *self.ops})
            raise KeyError(f"no op or module {module!r} in this placement{hint}")
        return inside

    def check(self, graph: GraphArrays, cluster: Cluster) -> None:
        """Check that this placement belongs to a graph and a cluster.

        Raises:
            ValueError: it is of another graph or cluster, splits a co-location group, or puts an op
                on a device that the graph forbids.
        """
        if self.graph != graph.hash:
            raise self._of_another(graph)
        if self.ops != graph.ids:
            raise ValueError(
                f"this placement lists {len(self.ops)} ops, not the {len(graph)} of {graph.name!r} "
                "in their order: align it first"
            )
        if self.device_names != cluster.names:
            raise ValueError(
                f"this placement was made for devices {', '.join(self.device_names)}, the cluster "
                f"{cluster.name!r} has {', '.join(cluster.names)}"
            )
        self._check_groups(graph)
        for i, limits in enumerate(graph.allowed):
            if limits is not None and self.device_names[self.devices[i]] not in limits:
                raise ValueError(
                    f"op {graph.ids[i]!r} is on {self.device_names[self.devices[i]]}, but may only "
                    f"run on {', '.join(limits)}"
                )

    def _check_groups(self, graph: GraphArrays) -> None:
        devices = np.array(self.devices)
        grouped = np.flatnonzero(graph.group >= 0)
        _, at, of = np.unique(graph.group[grouped], return_index=True, return_inverse=True)
        first = grouped[at[of]]
        apart = np.flatnonzero(devices[grouped] != devices[first])
        if len(apart):
            one, other = int(first[apart[0]]), int(grouped[apart[0]])
            raise ValueError(
                f"ops {graph.ids[one]!r} and {graph.ids[other]!r} share state and must be on one "
                f"device, but are on {self.device_names[self.devices[one]]} and "
                f"{self.device_names[self.devices[other]]}"
            )

    def aligned(self, graph: GraphArrays, cluster: Cluster) -> Placement:
        """Return this placement with ops in the graph's order and devices in the cluster's.

        Placement files may list ops in any order and may leave the graph hash empty, which matches
        every graph; the returned placement is complete and checked. Optimizer ops that the graph
        lacks are dropped.

        Raises:
            ValueError: it lacks ops of the graph or has others, names a device that the cluster
                lacks, or :meth:`check` rejects it.
        """
        if self.graph and self.graph != graph.hash:
            raise self._of_another(graph)
        places = {op_id: i for i, op_id in enumerate(self.ops)}
        if missing := [op_id for op_id in graph.ids if op_id not in places]:
            raise ValueError(
                f"this placement lacks {len(missing)} of the {len(graph)} ops of {graph.name!r}, "
                f"such as {missing[0]!r}"
                + (
                    "; search with this optimizer, or leave --optimizer out"
                    if phase_of(missing[0]) == "optimizer"
                    else ""
                )
            )
        known = set(graph.ids)
        surplus = [
            op_id for op_id in self.ops if op_id not in known and phase_of(op_id) != "optimizer"
        ]
        if surplus:
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
        was_training = any(phase_of(op_id) == "backward" for op_id in self.ops)
        is_training = PHASES.index("backward") in graph.phase
        if was_training and not is_training:
            why = "it is of a training step, and this is inference: leave --inference out"
        elif is_training and not was_training:
            why = "it is of inference, and this is a training step: give --inference"
        elif set(self.ops) == set(graph.ids):
            why = (
                "the ops are the same, but their sizes or edges are not: its inputs have other "
                "shapes, the model has other sizes, or --dtype differs. Run placer optimize again"
            )
        else:
            why = (
                "the model, its inputs, --dtype, --extractor or the torch version differ. Give "
                "what it was made with, or run placer optimize again"
            )
        return ValueError(
            f"this placement was made for graph {self.graph[:12]}, not for {graph.name!r} "
            f"({graph.hash[:12]}): {why}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the content of a placement file."""
        return {
            "format": FORMAT,
            "graph": self.graph,
            "cluster": self.cluster,
            "devices": {
                op_id: self.device_names[d] for op_id, d in zip(self.ops, self.devices, strict=True)
            },
            "device_order": list(self.device_names),
            "priority": dict(zip(self.ops, self.priority, strict=True)),
            "objective": self.objective,
            "micro_batches": self.micro_batches,
            **({} if self.in_flight is None else {"in_flight": self.in_flight}),
            "predicted": None if self.predicted is None else dict(self.predicted),
            "measured": None if self.measured is None else dict(self.measured),
            "made_by": asdict(self.made_by),
            **({} if self.replicas is None else {"replicas": self.replicas.to_dict()}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], device_names: tuple[str, ...] = ()) -> Placement:
        """Build a placement from the content of a placement file.

        ``device_names`` sets the order of devices (that of a cluster). By default the devices in
        use are in the order of ``device_order``, or else of first use.

        Raises:
            ValueError: unknown or missing keys, or values of a wrong type or out of range.
        """
        top = fields(data, "", _KEYS, required=("format", "devices"))
        if top["format"] != FORMAT:
            raise ValueError(f"format is {top['format']!r}, this version reads {FORMAT!r}")
        devices = {
            op_id: text(name, f"devices[{op_id!r}]")
            for op_id, name in table(top["devices"], "devices").items()
        }
        own = _in_order(dict.fromkeys(devices.values()), top)
        known = device_names or own
        index = {name: d for d, name in enumerate(known)}
        for op_id, name in devices.items():
            if not name:
                raise ValueError(f"devices[{op_id!r}] is '', not the name of a device")
            if name not in index:
                raise ValueError(
                    f"devices[{op_id!r}] is {name!r}; the cluster has {', '.join(known)}"
                )
        priority = {
            op_id: number(value, f"priority[{op_id!r}]")
            for op_id, value in table(top.get("priority", {}), "priority").items()
        }
        for op_id in priority:
            if op_id not in devices:
                raise ValueError(f"priority[{op_id!r}]: devices has no such op")
        replicas = _optional(top, "replicas")
        return cls(
            graph=text(top.get("graph", ""), "graph"),
            cluster=text(top.get("cluster", ""), "cluster"),
            ops=tuple(devices),
            device_names=known,
            devices=tuple(index[name] for name in devices.values()),
            priority=tuple(priority.get(op_id, 0.0) for op_id in devices),
            objective=text(top.get("objective", "latency"), "objective"),
            micro_batches=_count(top.get("micro_batches", 1), "micro_batches"),
            in_flight=_count(top["in_flight"], "in_flight") if "in_flight" in top else None,
            predicted=_optional(top, "predicted"),
            measured=_optional(top, "measured"),
            made_by=_made_by(top.get("made_by") or {}),
            replicas=None if replicas is None else Replication.from_dict(replicas, "replicas"),
        )

    def save(self, path: Path) -> None:
        """Write the placement as JSON; the file is complete or absent, never half-written.

        Raises:
            ValueError: it contains unprintable text.
            OSError: it cannot be written.
        """
        content = self.to_dict()
        check_printable(content)
        write_whole(path, json.dumps(content, indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: Path, device_names: tuple[str, ...] = ()) -> Placement:
        """Read a placement file.

        Raises:
            ValueError: it is not JSON or not a placement; the message starts with the path.
            OSError: it cannot be read.
        """
        return load_checked(path, lambda data: cls.from_dict(table(data, ""), device_names))


def module_of(op_id: str) -> str:
    """Return the module path in an op id, ``module[@call]:[backward/]op[#occurrence]``, or ""."""
    path, colon, _ = op_id.partition(":")
    return path.partition("@")[0] if colon else ""


def phase_of(op_id: str) -> str:
    """Return the phase in an op id, one of :data:`graphs.graph.PHASES`."""
    phase, slash, _ = op_id.rpartition(":")[2].partition("/")
    return phase if slash and phase in PHASES else "forward"


def _optional(data: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
    return None if data.get(key) is None else table(data[key], key)


def _in_order(used: Collection[str], top: Mapping[str, Any]) -> tuple[str, ...]:
    order = array(top.get("device_order", []), "device_order")
    named = [text(name, f"device_order[{i}]") for i, name in enumerate(order)]
    if repeated := [name for name, count in Counter(named).items() if count > 1]:
        raise ValueError(f"device_order names {repeated[0]!r} twice")
    return tuple(name for name in dict.fromkeys([*named, *used]) if name in used)


def check_micro_batches(micro_batches: int, in_flight: int | None) -> None:
    """Check the number of micro-batches and how many of them may be active at once.

    Raises:
        ValueError: one of them is out of range.
    """
    within(micro_batches, 1, MOST_MICRO_BATCHES, "micro_batches")
    if in_flight is not None:
        within(in_flight, 1, MOST_MICRO_BATCHES, "in_flight")


def _check_record(record: Mapping[str, Any], where: str) -> None:
    if "step_s" not in record:
        raise ValueError(f"{where} lacks step_s: give it, or null where the step is not known")
    for key, value in record.items():
        path = inside(where, key)
        ending = key[key.rfind("_") :]
        if ending == "_bytes" and isinstance(value, Mapping):
            for device, size in value.items():
                within(number(size, inside(path, device)), *_ENDINGS[ending], inside(path, device))
        elif (allowed := RECORD_RANGES.get(key) or _ENDINGS.get(ending)) is not None:
            within(number(value, path), *allowed, path)
        else:
            _check_json(value, path, MOST_NESTED)


def _check_json(value: object, where: str, deepest: int) -> None:
    if isinstance(value, Mapping | list | tuple):
        if not deepest:
            raise ValueError(f"{where} is nested too deeply")
        for item in value.values() if isinstance(value, Mapping) else value:
            _check_json(item, where, deepest - 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} is {value}, not a finite number")


def _made_by(data: object) -> MadeBy:
    made = fields(data, "made_by", _MAKER_KEYS, required=())
    seed = made.get("seed")
    return MadeBy(
        placer=text(made.get("placer", ""), "made_by.placer"),
        seed=None if seed is None else _count(seed, "made_by.seed"),
        budget=text(made.get("budget", ""), "made_by.budget"),
        version=text(made.get("version", ""), "made_by.version"),
    )


def _count(value: object, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{where} is {reprlib.repr(value)}, not a whole number")
    return value
