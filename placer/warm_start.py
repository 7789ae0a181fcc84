"""Warm starts: existing placements, as placement files or Hugging Face device maps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from envs.hardware.cluster import Cluster
from envs.hardware.core_sets import cores_named, has_several_cores
from envs.hardware.discover import device_kind, is_core
from envs.placement import Placement
from graphs.graph import GraphArrays
from graphs.strict_json import brief, load_checked, table

if TYPE_CHECKING:
    from graphs.extract import Extraction
    from placer.exports.existing_map import DeviceMap


WarmStart: TypeAlias = "Placement | DeviceMap"


class WarmStartError(ValueError):
    """A placement or device map does not fit its graph, model or cluster."""

    def __init__(self, message: str) -> None:
        super().__init__(brief(message))


def load_warm_start(path: Path) -> WarmStart:
    """Read a placement file or a device map, ``{"model.layers.0": 0, "lm_head": "cpu"}``."""
    return load_checked(path, lambda data: _parsed(table(data, "")))


def warm_start_of(start: Placement | DeviceMap | Mapping[str, int | str] | str | Path) -> WarmStart:
    """Convert a placement, a device map or the path of either."""
    if isinstance(start, str | Path):
        return load_warm_start(Path(start))
    return _parsed(start) if isinstance(start, Mapping) else start


def check_here(start: WarmStart) -> None:
    """Check that the devices of a device map are on this machine."""
    for name in () if isinstance(start, Placement) else start.device_names:
        try:
            device_kind(name)
        except ValueError as error:
            raise type(error)(f"{error} (in a device map a number N means cuda:N)") from None


def check_devices(start: WarmStart, cluster: Cluster) -> None:
    """Check that a cluster has the devices of a warm start, before its model is extracted."""
    if is_unplaced_on(start, cluster):
        return
    try:
        if isinstance(start, Placement):
            for name in start.used_devices:
                cluster.index(name)
        else:
            start.check_devices(cluster)
    except ValueError as error:
        raise WarmStartError(str(error)) from error


def is_unplaced_on(start: WarmStart, cluster: Cluster) -> bool:
    """Return whether a start is the unplaced model on a set of cores that are devices of their own.

    An optimization on these devices may have had it as its answer, and runs it in any case.
    """
    if not isinstance(start, Placement) or not start.unplaced:
        return False
    here = {core for name in cluster.names if is_core(name) for core in cores_named(name)}
    return all(
        is_core(name)
        and has_several_cores(name)
        and name not in cluster.names
        and cores_named(name) <= here
        for name in start.used_devices
    )


def placement_of(
    start: WarmStart, extraction: Extraction | None, graph: GraphArrays, cluster: Cluster
) -> Placement:
    """Convert a warm start to a placement of a graph, of an extraction or from a file."""
    try:
        if isinstance(start, Placement):
            return start.aligned(graph, cluster)
        if extraction is None:
            raise ValueError("a graph file has no modules for a device map: give a placement")
        placement = start.placed(extraction, graph, cluster)
        placement.check(graph, cluster)
    except ValueError as error:
        raise WarmStartError(str(error)) from error
    return placement


def _parsed(data: Mapping[str, object]) -> WarmStart:
    if "format" in data:
        return Placement.from_dict(data)
    if not data:
        raise ValueError("it names no modules: a device map is {module: device}")
    from placer.exports.existing_map import DeviceMap

    return DeviceMap({module: _device_name(device, module) for module, device in data.items()})


def _device_name(device: object, module: str) -> str:
    if isinstance(device, int) and not isinstance(device, bool) and device >= 0:
        return f"cuda:{device}"
    if not isinstance(device, str) or not device or device == "disk":
        raise ValueError(
            f"{module!r} is on {device!r}, but ops run on a GPU (its number) or a device such as "
            '"cpu" or "core:0"'
        )
    return "cuda:0" if device == "cuda" else device
