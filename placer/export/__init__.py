"""Placements in the terms of other runtimes: one file per format, found by name.

A format is a :class:`placer.export.format.Format`; it is imported when it is used.
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
"""{name of a format: the file here, and the function in it, that write it}."""


def format_named(name: str) -> Format:
    """The format of a name.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    if name not in FORMATS:
        near = get_close_matches(name, FORMATS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"there is no format {name!r}, there are {', '.join(FORMATS)}{hint}")
    home = FORMATS[name]
    found: Format = getattr(import_module(f"placer.export.{home}"), home)
    return found
