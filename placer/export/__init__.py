"""Exports of placements to other runtimes: one module per format, found by name.

A format is a :class:`placer.export.format.Format`, imported on first use.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from placer.export.format import Format

FORMATS: Final[Mapping[str, str]] = {
    "device-map": "device_map",
    "pipeline": "pipeline_split",
    "layer-counts": "layer_counts",
    "override-regex": "override_regex",
}
"""{format name: module in this package, and function in it, that write the format}."""


def format_named(name: str) -> Format:
    """Return the format with this name.

    Raises:
        ValueError: the format does not exist; the message lists those that do.
    """
    if name not in FORMATS:
        near = get_close_matches(name, FORMATS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"there is no format {name!r}, there are {', '.join(FORMATS)}{hint}")
    home = FORMATS[name]
    found: Format = getattr(import_module(f"placer.export.{home}"), home)
    return found
