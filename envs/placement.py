"""A placement: a device and a priority for every op, and the provenance to reproduce it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from envs.hardware.cluster import MOST_DEVICES, Cluster
from envs.hardware.units import human_bytes
from envs.placement_file import FORMAT, check_record, parse_placement
from envs.replication import Replication
from graphs.files import write_whole
from graphs.graph import PHASES, GraphArrays
from graphs.strict_json import check_whole, load_checked, one_of, table, within
from graphs.text import check_printable, html_table, suggestion

ROOT: Final = "(model)"
"""Module name that stands for the model itself: ops of its own code, in no submodule."""
OBJECTIVES: Final = ("latency", "throughput", "max-load")
MOST_MICRO_BATCHES: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeBy:
    """Provenance: the algorithm that made a placement, and the settings to reproduce it."""

    placer: str = ""
    seed: int | None = None
    budget: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Placement:
    """``ops[i]`` runs on ``device_names[devices[i]]``; among ready ops, highest ``priority`` first.

    Links serve transfers in order of request or, with ``order = "priority"``, by the highest
    priority among the ops that wait for each. At most ``in_flight`` of the ``micro_batches`` are
    active at once; None means one per device. With ``replicas`` it is the placement of each
    replica. An ``unplaced`` one is the model's own code, unchanged, on the one device of all ops.

    ``predicted`` and ``measured`` hold at least ``step_s``, or are None if unknown. Values with
    names ending in ``_s`` are seconds, those in ``_bytes`` are bytes or map devices to bytes, those
    in ``placement_file.RECORD_RANGES`` are numbers; ``trials`` are plans of replicas that were run;
    others are free-form.
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
    unplaced: bool = False

    def __post_init__(self) -> None:
        if not self.ops:
            raise ValueError("a placement has at least one op; this one has none")
        if not len(self.ops) == len(self.devices) == len(self.priority):
            raise ValueError(
                f"a placement of {len(self.ops)} ops has {len(self.devices)} devices and "
                f"{len(self.priority)} priorities"
            )
        count = len(self.device_names)
        if not 0 <= min(self.devices) <= max(self.devices) < count:
            op_id, d = next(
                (op_id, d)
                for op_id, d in zip(self.ops, self.devices, strict=True)
                if not 0 <= d < count
            )
            raise ValueError(f"op {op_id!r} is on device {d} of {count} devices")
        if not all(map(math.isfinite, self.priority)):
            op_id, priority = next(
                (op_id, priority)
                for op_id, priority in zip(self.ops, self.priority, strict=True)
                if not math.isfinite(priority)
            )
            raise ValueError(f"op {op_id!r}: priority is {priority}, not a finite number")
        one_of(self.objective, OBJECTIVES, "objective")
        within(len(self.device_names), 1, MOST_DEVICES, "the number of devices")
        check_micro_batches(self.micro_batches, self.in_flight)
        if self.unplaced and len(self.used_devices) > 1:
            used = ", ".join(self.used_devices)
            raise ValueError(f"the unplaced model is on one device, not on {used}")
        for where, record in (("predicted", self.predicted), ("measured", self.measured)):
            if record is not None:
                check_record(record, where)

    @property
    def leaves_unplaced(self) -> bool:
        """Return whether the model runs as it is: by itself, or as each of the replicas."""
        return self.unplaced or (self.replicas is not None and self.replicas.unplaced)

    @property
    def is_training(self) -> bool:
        """Return whether it is of a training step, which has backward ops."""
        return any(phase_of(op_id) == "backward" for op_id in self.ops)

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} on {name}" for name, count in self._op_counts().items())
        return f"<Placement of {len(self.ops)} ops: {counts}>"

    def _repr_html_(self) -> str:
        predicted = self.predicted or {}
        peaks = predicted.get("peak_memory_bytes") or {}
        caption = f"Placement of {len(self.ops)} ops on {self.cluster}"
        if "step_s" in predicted:
            caption += f", predicted step {predicted['step_s'] * 1e3:.4g} ms"
        rows = (
            (name, count, human_bytes(peaks[name]) if name in peaks else "")
            for name, count in self._op_counts().items()
        )
        return html_table(caption, ("device", "ops", "predicted memory"), rows)

    @property
    def used_devices(self) -> tuple[str, ...]:
        """Return the names of the devices with ops, in order."""
        return tuple(self.device_names[d] for d in sorted(set(self.devices)))

    def _op_counts(self) -> dict[str, int]:
        counts = Counter(self.devices)
        return {name: counts[d] for d, name in enumerate(self.device_names) if counts[d]}

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

        ``"(model)"`` stands for the ops that are in no module. An unknown name raises KeyError.
        """
        if name in self.ops:
            return self.device_names[self.devices[self.ops.index(name)]]
        return self.device_names[self.devices[self._inside(name)[0]]]

    def devices_of(self, module: str) -> dict[str, int]:
        """Return the number of ops of a module on each device, most first."""
        counts = Counter(self.device_names[self.devices[i]] for i in self._inside(module))
        return dict(counts.most_common())

    def phases_of(self, module: str) -> dict[str, dict[str, int]]:
        """Return {device: {phase: number of ops of a module}}, devices with most ops first."""
        counts = Counter(
            (self.device_names[self.devices[i]], phase_of(self.ops[i]))
            for i in self._inside(module)
        )
        return {
            name: {phase: counts[name, phase] for phase in PHASES if counts[name, phase]}
            for name in self.devices_of(module)
        }

    def _inside(self, module: str) -> list[int]:
        paths = [module_of(op_id) for op_id in self.ops]
        inside = [
            i
            for i, path in enumerate(paths)
            if path == module or path.startswith(module + ".") or (module == ROOT and not path)
        ]
        if not inside:
            parts = (path.split(".") for path in dict.fromkeys(paths))
            modules = {".".join(each[: k + 1]) for each in parts for k in range(len(each))}
            hint = suggestion(module, sorted({*modules, *self.ops}))
            raise KeyError(f"no op or module {module!r} in this placement{hint}")
        return inside

    def check(self, graph: GraphArrays, cluster: Cluster) -> None:
        """Check that this placement belongs to a graph and a cluster.

        Raises:
            ValueError: it is of another graph or cluster, splits a co-location group, or puts an op
                on a device that the graph forbids.
        """
        self._check_hash(graph)
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
        home: dict[int, int] = {}  # the first op of each co-location group
        for i, (group, limits) in enumerate(zip(graph.group.tolist(), graph.allowed, strict=True)):
            name = self.device_names[self.devices[i]]
            first = home.setdefault(group, i) if group >= 0 else i
            if self.devices[first] != self.devices[i]:
                raise ValueError(
                    f"ops {graph.ids[first]!r} and {graph.ids[i]!r} share state and must be on one "
                    f"device, but are on {self.device_names[self.devices[first]]} and {name}"
                )
            if limits is not None and name not in limits:
                raise ValueError(
                    f"op {graph.ids[i]!r} is on {name}, but may only run on {', '.join(limits)}"
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
        if self.graph:
            self._check_hash(graph)
        position = {op_id: i for i, op_id in enumerate(self.ops)}
        if missing := [op_id for op_id in graph.ids if op_id not in position]:
            raise ValueError(
                f"this placement lacks {len(missing)} of the {len(graph)} ops of {graph.name!r}, "
                f"such as {phase_of(missing[0])} op {missing[0]!r}"
            )
        known = set(graph.ids)
        extra = [op for op in self.ops if op not in known and phase_of(op) != "optimizer"]
        if extra:
            raise ValueError(
                f"this placement has {len(extra)} ops that {graph.name!r} has not, such as "
                f"{extra[0]!r}"
            )
        order = [position[op_id] for op_id in graph.ids]
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

    def _check_hash(self, graph: GraphArrays) -> None:
        if self.graph == graph.hash:
            return
        trains = any(phase_of(op_id) == "backward" for op_id in self.ops)
        if trains != (PHASES.index("backward") in graph.phase):
            steps = ("a training step", "inference")
            reason = "it is of {}, this is {}".format(*(steps if trains else steps[::-1]))
        elif set(self.ops) == set(graph.ids):
            reason = (
                "the ops are the same, but their sizes or edges differ; the inputs have other "
                "shapes, the model has other sizes, or the dtype is another one"
            )
        else:
            reason = "the model, its inputs, dtype, extractor or the torch version differ"
        raise ValueError(
            f"this placement was made for graph {self.graph[:12]}, not for {graph.name!r} "
            f"({graph.hash[:12]}): {reason}. Use what it was made with, or search again."
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
            **({"unplaced": True} if self.unplaced else {}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], device_names: tuple[str, ...] = ()) -> Placement:
        """Build a placement from the content of a placement file.

        ``device_names`` sets the order of devices (that of a cluster). By default the devices in
        use are in the order of ``device_order``, or else of first use.

        Raises:
            ValueError: unknown or missing keys, or values of a wrong type or out of range.
        """
        values = parse_placement(data, device_names)
        return cls(**values | {"made_by": MadeBy(**values["made_by"])})

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
    def load(cls, path: str | Path, device_names: tuple[str, ...] = ()) -> Placement:
        """Read a placement file.

        Raises:
            ValueError: it is not JSON or not a placement; the message starts with the path.
            OSError: it cannot be read.
        """
        return load_checked(Path(path), lambda data: cls.from_dict(table(data, ""), device_names))


def module_of(op_id: str) -> str:
    """Return the module path in an op id, ``module[@call]:[backward/]op[#occurrence]``, or ""."""
    path, colon, _ = op_id.partition(":")
    return path.partition("@")[0] if colon else ""


def phase_of(op_id: str) -> str:
    """Return the phase in an op id, one of :data:`graphs.graph.PHASES`."""
    phase, slash, _ = op_id.rpartition(":")[2].partition("/")
    return phase if slash and phase in PHASES else "forward"


def check_micro_batches(micro_batches: int, in_flight: int | None) -> None:
    """Check the number of micro-batches and how many of them may be active at once."""
    check_whole(micro_batches, "micro_batches")
    within(micro_batches, 1, MOST_MICRO_BATCHES, "micro_batches")
    if in_flight is not None:
        check_whole(in_flight, "in_flight")
        within(in_flight, 1, MOST_MICRO_BATCHES, "in_flight")
