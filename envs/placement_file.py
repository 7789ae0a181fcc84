"""Content of placement files, and its checks.

``placement.json``::

    {"format": "placer-placement/1", "graph": hash, "cluster": name,
     "devices": {op id: device name}, "device_order": [device name] (optional),
     "priority": {op id: number},
     "objective": "latency", "micro_batches": 1, "in_flight": 4 (optional),
     "predicted": {"step_s": ..., "peak_memory_bytes": {device: int}} or null,
     "measured": {"step_s": ..., ..., "trials": {plan: {"step_s": ..., ...}} of replicas} or null,
     "made_by": {"placer": ..., "seed": ..., "budget": ..., "version": ...},
     "replicas": {...} (optional, see envs/replication.py),
     "unplaced": true (optional: the model as it is, on the one device of all ops)}
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, Final

from envs.hardware.cluster import LARGEST_INT
from envs.hardware.core_sets import check_core_sets
from envs.replication import Replication
from graphs.strict_json import (
    array,
    boolean,
    fields,
    inside,
    number,
    of_format,
    table,
    text,
    whole,
    within,
)

FORMAT: Final = "placer-placement/1"
_KEYS: Final = frozenset(
    {"format", "graph", "cluster", "devices", "priority", "objective", "micro_batches"}
    | {"device_order", "in_flight", "predicted", "measured", "made_by", "replicas", "unplaced"}
)
RECORD_RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "spread": (0, 1e6),
    "contention": (0, 1e9),
    "rounds": (0, 10**9),
    "samples": (1, LARGEST_INT),
}
"""Allowed ranges of unitless numbers in ``predicted`` and ``measured``."""
_ENDINGS: Final[Mapping[str, tuple[float, float]]] = {"_s": (0, 1e10), "_bytes": (0, LARGEST_INT)}
_TRIAL_KEYS: Final = ("step_s", "predicted_s", "samples")
MOST_NESTED: Final = 8
_MAKER_KEYS: Final = frozenset({"placer", "seed", "budget", "version"})


def parse_placement(data: Mapping[str, Any], device_names: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields of a placement from the content of a file; check keys and types."""
    top = of_format(data, FORMAT, _KEYS, required=("devices",))
    devices = {
        op_id: text(name, f"devices[{op_id!r}]")
        for op_id, name in table(top["devices"], "devices").items()
    }
    used = _device_order(dict.fromkeys(devices.values()), top)
    check_core_sets(used)
    device_names = device_names or used
    index = {name: d for d, name in enumerate(device_names)}
    for op_id, name in devices.items():
        if not name or name not in index:
            raise ValueError(
                f"devices[{op_id!r}] is {name!r}; the cluster has {', '.join(device_names)}"
            )
    priority = {
        op_id: number(value, f"priority[{op_id!r}]")
        for op_id, value in table(top.get("priority", {}), "priority").items()
    }
    for op_id in priority:
        if op_id not in devices:
            raise ValueError(f"priority[{op_id!r}]: devices has no such op")
    replicas = _optional(top, "replicas")
    return {
        "graph": text(top.get("graph", ""), "graph"),
        "cluster": text(top.get("cluster", ""), "cluster"),
        "ops": tuple(devices),
        "device_names": device_names,
        "devices": tuple(index[name] for name in devices.values()),
        "priority": tuple(priority.get(op_id, 0.0) for op_id in devices),
        "objective": text(top.get("objective", "latency"), "objective"),
        "micro_batches": whole(top.get("micro_batches", 1), "micro_batches"),
        "in_flight": whole(top["in_flight"], "in_flight") if "in_flight" in top else None,
        "predicted": _optional(top, "predicted"),
        "measured": _optional(top, "measured"),
        "made_by": _made_by(top.get("made_by") or {}),
        "replicas": None if replicas is None else Replication.from_dict(replicas, "replicas"),
        "unplaced": boolean(top.get("unplaced", False), "unplaced"),
    }


def _optional(data: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
    return None if data.get(key) is None else table(data[key], key)


def _device_order(used: Collection[str], top: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the used devices, those in ``device_order`` first."""
    order = array(top.get("device_order", []), "device_order")
    listed = [text(name, f"device_order[{i}]") for i, name in enumerate(order)]
    if repeated := [name for name, count in Counter(listed).items() if count > 1]:
        raise ValueError(f"device_order names {repeated[0]!r} twice")
    check_core_sets(listed)
    return tuple(name for name in dict.fromkeys([*listed, *used]) if name in used)


def check_record(record: Mapping[str, Any], where: str) -> None:
    """Check ``predicted`` or ``measured``: times, sizes and known numbers are in their ranges."""
    if "step_s" not in record:
        raise ValueError(f"{where} lacks step_s: give it, or null where the step is not known")
    for key, value in record.items():
        path = inside(where, key)
        ending = key[key.rfind("_") :]
        if ending == "_bytes" and isinstance(value, Mapping):
            for device, size in value.items():
                within(number(size, inside(path, device)), *_ENDINGS[ending], inside(path, device))
        elif key == "trials":
            for name, trial in table(value, path).items():
                place = inside(path, name)
                known = frozenset(_TRIAL_KEYS)
                check_record(fields(trial, place, known, required=_TRIAL_KEYS), place)
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


def _made_by(data: object) -> dict[str, Any]:
    made = fields(data, "made_by", _MAKER_KEYS, required=())
    for key, value in made.items():
        if key != "seed":
            text(value, f"made_by.{key}")
        elif value is not None:
            whole(value, "made_by.seed")
    return made
