"""Describes which ops an export moves off their device in the placement, and why."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from placer.export.placed_modules import PlacedModules, PlacedOp, around

MOST_NAMED: Final = 6
"""Number of modules that a sentence names; the others are counted."""

NO_REASONS: Final[Mapping[str, str]] = MappingProxyType({})


def told_moved(
    placed: PlacedModules,
    runs_on: Mapping[str, str],
    units: Collection[str],
    otherwise: str,
    why: Mapping[str, str] = NO_REASONS,
    outside: str = "",
) -> list[str]:
    """Return a sentence each on the forward and the backward ops that do not run where placed.

    Args:
        placed: the modules as placed.
        runs_on: {call: device} of the export; ops of other calls are not counted.
        units: the modules that have one device each.
        otherwise: the reason for modules without an own reason.
        why: {module: reason}, for the smallest modules or those of the export.
        outside: the reason for ops outside the units.
    """
    ops, backward = placed.moved(runs_on), with_their_calls(placed, placed.moved_backward(runs_on))
    told = []
    if ops:
        flops = sum(op.flops for op in placed.ops)
        share = sum(op.flops for op in ops) / flops if flops else 0.0
        named = _named(placed, ops, runs_on, units, lambda m: why.get(m, otherwise), outside, why)
        told.append(
            f"{len(ops)} of {len(placed.ops)} forward ops, {share:.1%} of the FLOPs, are not where "
            f"the placement has them: {named}"
        )
    if backward:
        counts = {
            module: len(own) for module, own in by_module(placed, backward, units, ()).items()
        }
        most = sorted(counts, key=lambda module: -counts[module])
        named = ", ".join(f"{_name(placed, m, units)} ({counts[m]})" for m in most[:MOST_NAMED])
        if len(most) > MOST_NAMED:
            named += f", and {len(most) - MOST_NAMED} more modules"
        told.append(
            f"{len(backward)} of {len(placed.backward)} backward ops are not where the placement "
            f"has them, since the backward of a module runs where its forward does: {named}"
        )
    return told


def with_their_calls(placed: PlacedModules, ops: Sequence[PlacedOp]) -> list[PlacedOp]:
    """Return backward ops with the modules of their forward calls, as other runtimes run them.

    An op that accumulates gradients may belong to a module that only reads the call's result.
    """
    module_of = {op.call: op.module for op in placed.ops}
    return [replace(op, module=module_of.get(op.call, op.module)) for op in ops]


def by_module(
    placed: PlacedModules, ops: Sequence[PlacedOp], *modules: Collection[str]
) -> dict[str, list[PlacedOp]]:
    """Return {module: its ops}, most work first; ops outside all ``modules`` by their own module.

    If several sets of modules contain an op, the last set counts.
    """
    found: dict[str, list[PlacedOp]] = {}
    for op in ops:
        around_it = (around(op.module, own) for own in reversed(modules))
        module = next((unit for unit in around_it if unit is not None), op.module)
        found.setdefault(module, []).append(op)
    return dict(sorted(found.items(), key=lambda item: -sum(op.flops for op in item[1])))


def _name(
    placed: PlacedModules, module: str, units: Collection[str], ops: Sequence[PlacedOp] = ()
) -> str:
    if is_code(placed, module, units) or _is_around(placed, module, ops):
        return f"the code of {module}" if module else "the code of the model"
    return module or "the model"


def is_code(placed: PlacedModules, module: str, units: Collection[str]) -> bool:
    """Return whether a module is not in any unit but contains submodules."""
    known = dict(placed.model.named_modules()).get(module)  # None for the loss
    return around(module, units) is None and known is not None and any(known.children())


def _is_around(placed: PlacedModules, module: str, ops: Sequence[PlacedOp]) -> bool:
    """Return whether all ops are in a module's own forward and its parameters in submodules."""
    known = dict(placed.model.named_modules()).get(module)
    if known is None or not ops or list(known.parameters(recurse=False)):
        return False
    return bool(list(known.parameters())) and all(op.module == module for op in ops)


def _named(
    placed: PlacedModules,
    ops: Sequence[PlacedOp],
    runs_on: Mapping[str, str],
    units: Collection[str],
    reason_of: Callable[[str], str],
    outside: str,
    why: Collection[str],
) -> str:
    found = by_module(placed, ops, units, why)
    of_reason: dict[str, list[str]] = {}
    for module, own in list(found.items())[:MOST_NAMED]:
        before = ", ".join(sorted({op.device for op in own}))
        after = ", ".join(sorted({runs_on[op.call] for op in own}))
        reason = reason_of(module) if around(module, units) is not None else outside
        name = f"{_name(placed, module, units, own)} ({before} -> {after})"
        of_reason.setdefault(reason, []).append(name)
    told = [f"{', '.join(names)}, since {reason}" for reason, names in of_reason.items()]
    if len(found) > MOST_NAMED:
        told.append(f"and {len(found) - MOST_NAMED} more modules")
    return "; ".join(told)
