"""Warm starts: existing placements, as placement files or Hugging Face device maps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from envs.hardware.cluster import Cluster
from envs.hardware.discover import missing_reason
from envs.placement import Placement
from graphs.graph import GraphArrays
from graphs.strict_json import load_checked, table
from placer.choose import WarmStartError

if TYPE_CHECKING:
    from graphs.extract import Extraction
    from placer.device_map import DeviceMap


WarmStart: TypeAlias = "Placement | DeviceMap"


def load_warm_start(path: Path) -> WarmStart:
    """Read a placement file or a device map, ``{"model.layers.0": 0, "lm_head": "cpu"}``.

    Raises:
        ValueError: the file is neither; the message starts with its path.
        OSError: the file cannot be read.
    """
    return load_checked(path, lambda data: _parsed(table(data, "")))


def warm_start_of(start: Placement | DeviceMap | Mapping[str, int | str] | str | Path) -> WarmStart:
    """Convert a placement, a device map or the path of either.

    Raises:
        ValueError: the argument is none of these.
        OSError: the file cannot be read.
    """
    if isinstance(start, str | Path):
        return load_warm_start(Path(start))
    return _parsed(start) if isinstance(start, Mapping) else start


def check_here(start: WarmStart) -> None:
    """Check that the devices of a device map are on this machine.

    Raises:
        ValueError: one is not; for a GPU number the message explains what numbers mean.
    """
    for name in () if isinstance(start, Placement) else start.device_names:
        if why := missing_reason(name):
            kind, _, index = name.partition(":")
            number = f"{index} in a device map means {name}, and " if kind == "cuda" else ""
            hint = '; on pinned cores name them in the map, such as "core:0"' if number else ""
            raise ValueError(f"{number}{why}{hint}")


def placement_of(
    start: WarmStart, extraction: Extraction | None, graph: GraphArrays, cluster: Cluster
) -> Placement:
    """Convert a placement or device map to a placement of a graph on a cluster.

    ``extraction`` is the source of the graph, None for a graph file.

    Raises:
        WarmStartError: the argument belongs to another graph or model, has other devices, or is a
            device map for a graph file, which has no modules.
    """
    if isinstance(start, Placement):
        try:
            return start.aligned(graph, cluster)
        except ValueError as error:
            raise WarmStartError(str(error)) from error
    if extraction is None:
        raise WarmStartError(
            "a device map names modules, and a graph file has none: give a placement"
        )
    placement = start.placed(extraction, graph, cluster)
    placement.check(graph, cluster)
    return placement


def _parsed(data: Mapping[str, object]) -> WarmStart:
    if "format" in data:
        return Placement.from_dict(data)
    if not data:
        raise ValueError("it names no modules: a device map is {module: device}")
    from placer.device_map import DeviceMap

    return DeviceMap({module: _name(device, module) for module, device in data.items()})


def _name(device: object, module: str) -> str:
    if isinstance(device, int) and not isinstance(device, bool) and device >= 0:
        return f"cuda:{device}"
    if not isinstance(device, str) or not device or device == "disk":
        raise ValueError(
            f"{module!r} is on {device!r}, but ops run on a GPU (its number) or a device such as "
            '"cpu" or "core:0"'
        )
    return "cuda:0" if device == "cuda" else device
