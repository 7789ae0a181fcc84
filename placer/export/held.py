"""Suggests modules to keep together, so that an export loses less by moving backward ops."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Final

from placer.export.faults import ExportError
from placer.export.layers import layer_of, stacks
from placer.export.moved import by_module, is_code, with_their_calls
from placer.export.placed_modules import PlacedModules, PlacedOp, around
from placer.export.price import is_faster
from placer.milliseconds import milliseconds

MOST_TOGETHER: Final = 6
"""Largest number of modules to suggest; with more there is no suggestion."""


def held_together(
    placed: PlacedModules,
    runs_on: Mapping[str, str],
    units: Collection[str],
    export: Callable[[PlacedModules], Mapping[str, str]],
) -> list[str]:
    """Return a suggestion of modules to keep together in a new search, or an empty list.

    It helps if the placement separates backward ops of a module from its forward ops, which an
    export cannot do. It is given only if the step is predicted to be faster once each module is on
    the device of most of its work.

    Args:
        placed: the modules as placed.
        runs_on: {call: device} as exported.
        units: the modules that have one device each.
        export: computes ``runs_on`` for modules placed differently.
    """
    modules = _apart(placed, runs_on, units)
    if placed.price is None or not 0 < len(modules) <= MOST_TOGETHER:
        return []
    try:
        then = export(holding(placed, modules))
    except ExportError:
        return []
    held = placed.price.step(then)
    if not is_faster(held, placed.price.step(runs_on)):
        return []
    options = " ".join(f"--keep-together {module}" for module in modules)
    step_ms = milliseconds(held.step_s)
    told = f"for training, place with {options}, which holds the backward ops of a module where its"
    told += f" forward ops are: as exported a step is then predicted to take {step_ms} ms"
    return [f"{told}; for inference, place with --inference"]


def holding(placed: PlacedModules, modules: Collection[str]) -> PlacedModules:
    """Return the modules as placed, but each of ``modules`` on the device of most of its work."""
    work: dict[str, dict[str, tuple[int, int]]] = {module: {} for module in modules}
    for op in (*placed.ops, *placed.backward):
        if (module := around(op.module, work)) is not None:
            flops, size = work[module].get(op.device, (0, 0))
            work[module][op.device] = (flops + op.flops, size + op.moved_bytes)
    homes = {module: max(own, key=lambda d: own[d]) for module, own in work.items() if own}

    def held(op: PlacedOp) -> PlacedOp:
        module = around(op.module, homes)
        return op if module is None else replace(op, device=homes[module])

    return replace(
        placed, ops=tuple(map(held, placed.ops)), backward=tuple(map(held, placed.backward))
    )


def _apart(placed: PlacedModules, runs_on: Mapping[str, str], units: Collection[str]) -> list[str]:
    """Return modules whose backward ops are apart from their forward ops, by number of such ops."""
    home = {op.call: op.device for op in placed.ops}
    apart = [
        op for op in placed.moved_backward(runs_on) if home.get(op.call, op.device) != op.device
    ]
    run = with_their_calls(placed, apart)
    found = stacks(placed.model)
    counts: dict[str, int] = {}
    for module, ops in by_module(placed, run, units, ()).items():
        if is_code(placed, module, units):  # only parts of it can be kept together
            continue
        branch = layer_of(module, found) or _branch(module)
        counts[branch] = counts.get(branch, 0) + len(ops)
    counts.pop("", None)
    return sorted(counts, key=lambda module: -counts[module])


def _branch(module: str) -> str:
    outer, _, name = module.rpartition(".")
    return _branch(outer) if outer and name.isdigit() else module
