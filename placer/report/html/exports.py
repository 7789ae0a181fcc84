"""Tries all exports of a placement, so that a report offers no command that fails."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from envs.placement import Placement
from envs.problem import Problem

if TYPE_CHECKING:
    from graphs.extract import Extraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """The remarks of an export, or why it is not possible."""

    remarks: tuple[str, ...] = ()
    refused: str = ""


def tried_exports(
    extraction: Extraction,
    placement: Placement,
    problem: Problem,
    renamed: Mapping[str, str],
) -> dict[str, Tried]:
    """Return {format: trial} for every format, as ``placer export`` would write it.

    Args:
        extraction: the source of the placed graph.
        placement: of its ops or calls.
        problem: the simulated problem.
        renamed: {device of the placement: device to export}.
    """
    from placer.export import FORMATS, format_named
    from placer.export.placed_modules import PlacedModules
    from placer.export.price import price_of

    found: dict[str, Tried] = {}
    for name in FORMATS:
        try:
            price = None
            if placement.graph == problem.graph.hash:
                price = price_of(problem, placement, extraction, renamed)
            placed = PlacedModules.of(extraction, placement, renamed=renamed, price=price)
            found[name] = Tried(remarks=format_named(name)(placed).remarks)
        except ValueError as error:  # the runtime cannot run this placement or model
            found[name] = Tried(refused=str(error))
    return found
