"""A placement that a user already has: a placement file, or a device map of Hugging Face's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from envs.cluster import Cluster
from envs.discover import why_not_here
from envs.placement import Placement
from graphs.graph import GraphArrays
from graphs.strict_json import brief, load_checked, table

if TYPE_CHECKING:
    from graphs.extract import Extraction
    from placer.device_map import DeviceMap

GIVEN: Final = "given"


class GivenError(ValueError):
    """What a user has does not fit what it is given for."""

    def __init__(self, message: str) -> None:
        super().__init__(brief(message))


Given: TypeAlias = "Placement | DeviceMap"


def load_given(path: Path) -> Given:
    """Read a placement file, or a device map: ``{"model.layers.0": 0, "lm_head": "cpu"}``.

    Raises:
        ValueError: it is neither; the message starts with the file.
        OSError: it cannot be read.
    """
    return load_checked(path, lambda data: _given(table(data, "")))


def check_here(given: Given) -> None:
    """Make sure that the devices of a device map are on this machine.

    Raises:
        ValueError: one is not; where it is a GPU's number, the message says what numbers mean.
    """
    for name in () if isinstance(given, Placement) else given.device_names:
        if why := why_not_here(name):
            kind, _, index = name.partition(":")
            number = f"{index} in a device map means {name}, and " if kind == "cuda" else ""
            hint = '; on pinned cores name them in the map, such as "core:0"' if number else ""
            raise ValueError(f"{number}{why}{hint}")


def given_from(given: Placement | Mapping[str, int | str] | str | Path) -> Given:
    """A placement as it is, a device map, or what :func:`load_given` reads.

    Raises:
        ValueError: it is none of them.
        OSError: the file cannot be read.
    """
    if isinstance(given, Placement):
        return given
    return _given(given) if isinstance(given, Mapping) else load_given(Path(given))


def placement_of(
    given: Given, extraction: Extraction | None, graph: GraphArrays, cluster: Cluster
) -> Placement:
    """What is given as a placement of a graph's ops on a cluster's devices.

    ``extraction`` is what the graph is of, None for a graph file.

    Raises:
        GivenError: it is of another graph or model, or has other devices; or it is a device map,
            and the graph is of no model.
    """
    if isinstance(given, Placement):
        try:
            return given.aligned(graph, cluster)
        except ValueError as error:
            raise GivenError(str(error)) from error
    if extraction is None:
        raise GivenError("a device map names modules, and a graph file has none: give a placement")
    placement = given.placed(extraction, graph, cluster)
    placement.check(graph, cluster)
    return placement


def _given(data: Mapping[str, object]) -> Given:
    if "format" in data:
        return Placement.from_dict(data)
    if not data:
        raise ValueError("it names no modules: a device map is {module: device}")
    from placer.device_map import DeviceMap

    return DeviceMap({module: _name(device, module) for module, device in data.items()})


def _name(device: object, module: str) -> str:
    """A device as clusters call it: GPUs are numbers in device maps."""
    if isinstance(device, int) and not isinstance(device, bool) and device >= 0:
        return f"cuda:{device}"
    if not isinstance(device, str) or not device or device == "disk":
        raise ValueError(
            f"{module!r} is on {device!r}, but ops run on a GPU (its number) or a device such as "
            '"cpu" or "core:0"'
        )
    return "cuda:0" if device == "cuda" else device
