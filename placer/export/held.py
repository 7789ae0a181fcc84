"""Which modules to hold together, so that what is exported loses less to their backward ops."""

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
"""How many modules an advice names: none is given where more are needed."""


def held_together(
    placed: PlacedModules,
    runs_on: Mapping[str, str],
    units: Collection[str],
    export: Callable[[PlacedModules], Mapping[str, str]],
) -> list[str]:
    """How to place so that less is lost to backward ops that are moved, as one sentence or none.

    It helps where the placement has backward ops of a module apart from its forward ops. It is
    told where the step is predicted to be faster once each module is held where most of its work
    is; without predictions nothing is.

    Args:
        placed: the modules as they are placed.
        runs_on: {call: device} as exported.
        units: the modules that have one device each.
        export: makes ``runs_on`` of modules placed otherwise.
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
    """The same modules, of which these have all their ops on the device of most of their work."""
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
    """The modules, those of most ops first, with backward ops apart from their own forward ops."""
    home = {op.call: op.device for op in placed.ops}
    apart = [
        op for op in placed.moved_backward(runs_on) if home.get(op.call, op.device) != op.device
    ]
    run = with_their_calls(placed, apart)
    found = stacks(placed.model)
    counts: dict[str, int] = {}
    for module, ops in by_module(placed, run, units, ()).items():
        if is_code(placed, module, units):  # of which only parts could be held
            continue
        branch = layer_of(module, found) or _branch(module)
        counts[branch] = counts.get(branch, 0) + len(ops)
    counts.pop("", None)
    return sorted(counts, key=lambda module: -counts[module])


def _branch(module: str) -> str:
    """A module, or the Sequential that it is a member of: ``audio`` of ``audio.0``."""
    outer, _, name = module.rpartition(".")
    return _branch(outer) if outer and name.isdigit() else module
