"""Which ops may be merged: those with the same phase, allowed devices and costed device kinds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graphs.graph import ANY_KIND, GraphArrays


@dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """Classes of ops that may be merged, and the devices that each op's co-location group allows.

    Ops of one class (N,) have one phase, the same ``devices`` to choose from and costs for the same
    device kinds; classes are numbered in the order of the phases.
    """

    classes: NDArray[np.int64]
    devices: tuple[tuple[str, ...] | None, ...]

    @classmethod
    def of(cls, graph: GraphArrays) -> Limits:
        """Compute the limits of a graph's ops.

        Raises:
            ValueError: the ops of a co-location group have no device, or no device kind with costs,
                in common.
        """
        kinds = sorted({*graph.cost_s, ANY_KIND})
        known = np.stack([~np.isnan(graph.costs_for(kind)) for kind in kinds], axis=1)
        devices = list(graph.allowed)
        by_group = np.argsort(graph.group, kind="stable")
        by_group = by_group[np.searchsorted(graph.group[by_group], 0) :]
        bounds = np.flatnonzero(np.diff(graph.group[by_group])) + 1
        for members in np.split(by_group, bounds) if len(by_group) else ():
            shared = known[members].all(axis=0)
            if known[members].any() and not shared.any():
                raise ValueError(
                    f"{_named(graph, members)} must share a device, but there is no device kind "
                    "with costs for all of them; measure them on one"
                )
            known[members] = shared
            choice = _common(graph, members)
            for i in members.tolist():
                devices[i] = choice
        keys = [
            (phase, names if names is None else frozenset(names), tuple(row))
            for phase, names, row in zip(graph.phase.tolist(), devices, known.tolist(), strict=True)
        ]
        by_phase = sorted(dict.fromkeys(keys), key=lambda key: key[0])
        number = {key: i for i, key in enumerate(by_phase)}
        classes = [number[key] for key in keys]
        return cls(np.array(classes, np.int64), tuple(devices))


def _common(graph: GraphArrays, members: NDArray[np.int64]) -> tuple[str, ...] | None:
    """Return the devices that all members allow, None for all devices."""
    limited = [names for i in members.tolist() if (names := graph.allowed[i]) is not None]
    if not limited:
        return None
    shared = frozenset(limited[0]).intersection(*limited)
    if not shared:
        shown = " and ".join(dict.fromkeys(", ".join(names) for names in limited))
        raise ValueError(
            f"{_named(graph, members)} must share a device, but they are allowed on {shown}"
        )
    return tuple(name for name in limited[0] if name in shared)


def _named(graph: GraphArrays, members: NDArray[np.int64]) -> str:
    shown = ", ".join(repr(graph.ids[i]) for i in members[:3].tolist())
    return f"ops {shown}" + (f" and {len(members) - 3} more" if len(members) > 3 else "")
