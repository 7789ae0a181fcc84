"""Which modules an export moves away from where the placement has them, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from placer.export.placed_modules import PlacedModules, PlacedOp, around

MOST_NAMED: Final = 6
"""How many modules a sentence names; the others are counted."""

NO_REASONS: Final[Mapping[str, str]] = MappingProxyType({})


def told_moved(
    placed: PlacedModules,
    device_of: Mapping[str, str],
    otherwise: str,
    why: Mapping[str, str] = NO_REASONS,
) -> list[str]:
    """What it costs to give every module one device, as one sentence or none.

    Args:
        placed: the modules as they are placed.
        device_of: {module: device} of the export; ops outside these modules are not counted.
        otherwise: the reason of modules that have none of their own.
        why: {module: its reason}, for modules as small as can be or as the export has them.
    """
    ops = placed.moved(device_of)
    if not ops:
        return []
    flops = sum(op.flops for op in placed.ops)
    share = sum(op.flops for op in ops) / flops if flops else 0.0
    told = (
        f"{len(ops)} of {len(placed.ops)} forward ops, {share:.1%} of the FLOPs, are not where the "
        f"placement has them: {_named(_by_module(ops, device_of, why), device_of, otherwise, why)}"
    )
    return [told if placed.price is None else f"{told}; {placed.price(device_of)}"]


def _by_module(
    ops: Sequence[PlacedOp], device_of: Mapping[str, str], why: Mapping[str, str]
) -> dict[str, list[PlacedOp]]:
    """{module: its ops that are moved}, those of most work first."""
    found: dict[str, list[PlacedOp]] = {}
    for op in ops:
        module = around(op.module, why)
        module = around(op.module, device_of) if module is None else module
        assert module is not None
        found.setdefault(module, []).append(op)
    return dict(sorted(found.items(), key=lambda item: -sum(op.flops for op in item[1])))


def _named(
    found: Mapping[str, Sequence[PlacedOp]],
    device_of: Mapping[str, str],
    otherwise: str,
    why: Mapping[str, str],
) -> str:
    """The modules with their devices, those of one reason together."""
    of_reason: dict[str, list[str]] = {}
    for module, ops in list(found.items())[:MOST_NAMED]:
        unit = around(module, device_of)
        assert unit is not None
        devices = ", ".join(sorted({op.device for op in ops}))
        name = f"{module or 'the model'} ({devices} -> {device_of[unit]})"
        of_reason.setdefault(why.get(module, otherwise), []).append(name)
    told = [f"{', '.join(names)}, since {reason}" for reason, names in of_reason.items()]
    if len(found) > MOST_NAMED:
        told.append(f"and {len(found) - MOST_NAMED} more modules")
    return "; ".join(told)
