"""Export as Hugging Face ``device_map``: {module: GPU number or device}, for accelerate.

A map that accelerate can run covers every entry of the state dict, keeps tied weights together and
never lets an op outside its modules read from two devices. Modules are therefore joined until a dry
run passes, see :mod:`placer.export.joining`.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from placer.export.device_flow import Flow, flow, main_device_of
from placer.export.faults import ExportError, RenamingError
from placer.export.format import Exported
from placer.export.held import held_together
from placer.export.hooks import HOST
from placer.export.joining import Joined
from placer.export.moved import told_moved
from placer.export.placed_modules import PlacedModules, is_inside
from placer.export.renaming import check_main_device
from placer.milliseconds import milliseconds

MOST_CALLS = 3
"""Number of calls that a remark names."""
LEAST_SHARE = 0.0005
"""Share of FLOPs below which (0.0 % when rounded) changing the model is not worthwhile."""
MERGED = "a module of the map has one device"
WITHOUT_PARAMETERS = "what has no parameters runs where its inputs are"


def device_map(placed: PlacedModules) -> Exported:
    """Return a device map that runs and is as close to the placement as possible.

    Raises:
        RenamingError: a device is not a torch device.
        ExportError: accelerate would offload parameters that are to be trained.
        ExtractionError: the model was not exported, so there is no dry run.
    """
    if placed.no_torch:
        raise RenamingError(placed.no_torch)
    check_main_device(placed.main_device, {op.device for op in placed.ops})
    main_device = placed.main_device or main_device_of({op.device for op in placed.ops})
    found = Joined(placed, main_device)
    found.until_it_runs()
    seen = _run(placed, found.devices(), main_device)
    may_offload = main_device != HOST and HOST in {op.device for op in placed.ops}
    if placed.price is not None and not may_offload and placed.moved(seen.devices):
        found.choose(placed.price, lambda devices: _run(placed, devices, main_device))
        seen = _run(placed, found.devices(), main_device)
    whole = _merged(placed.model, found.devices())
    used = set(whole.values())
    runs_on = {call: name for call, name in seen.devices.items() if call not in seen.of_loss}
    remarks = told_moved(
        placed,
        runs_on,
        whole,
        WITHOUT_PARAMETERS,
        dict.fromkeys(whole.keys() - set(found.units), MERGED) | found.reasons(),
        outside="what is outside of the modules of the map runs where its inputs are",
    )
    is_as_placed = not remarks
    is_offloaded = HOST in used and main_device != HOST and len(used) > 1
    if placed.price is not None and is_offloaded:
        remarks.append("no step is predicted: offloaded weights are sent in every one")
    elif placed.price is not None:
        remarks += placed.price.told(seen.devices, moved=not is_as_placed)
    remedy = _how_to_keep_it(found, seen.devices)
    remarks += remedy
    left = found.runs_apart() if remedy else seen.devices
    if placed.price is not None and not is_offloaded and placed.price.is_lost(left):
        remarks += held_together(
            placed, seen.devices, found.units, lambda held: _held_run(held, main_device)
        )
    if HOST in used and len(used) > 1:
        remarks.append(_host_remark(placed, main_device))
    placed_on = {op.device for op in (*placed.ops, *placed.backward)}
    if len(used) == 1 and len(placed_on) > 1:
        left_on = next(iter(used))
        remarks.append(f"the whole model is on {left_on}: one of {len(placed_on)} devices is left")
    if len(used) == 1 and placed.main_device not in (None, *used):
        remarks.append(
            f"--main-device {placed.main_device} is not used: a model on one device is fed there"
        )
    return Exported(
        is_as_placed=is_as_placed,
        content={module: as_written(device) for module, device in whole.items()},
        remarks=tuple(remarks),
    )


def _run(placed: PlacedModules, devices: Mapping[str, str], main_device: str) -> Flow:
    whole = _merged(placed.model, devices)
    used = set(whole.values())
    fed = main_device if len(used) > 1 else next(iter(used))
    return flow(placed.extraction.forward, placed.step, whole, fed)


def _held_run(held: PlacedModules, main_device: str) -> Mapping[str, str]:
    found = Joined(held, main_device)
    found.until_it_runs()
    return _run(held, found.devices(), main_device).devices


def _how_to_keep_it(found: Joined, runs_on: Mapping[str, str]) -> list[str]:
    """Return a sentence on changing the model so that fewer ops move, or an empty list.

    accelerate moves the inputs of modules, so an op wrapped in a module may read from several
    devices. The sentence is given only if this recovers most of the loss.
    """
    calls = found.calls()
    if not calls or found.devices() == found.apart():
        return []
    apart, price = found.runs_apart(), found.placed.price
    if price is None:
        kept = {op.call: op.flops for op in found.placed.moved(runs_on)}
        for op in found.placed.moved(apart):
            kept.pop(op.call, None)
        if sum(kept.values()) < LEAST_SHARE * sum(op.flops for op in found.placed.ops):
            return []
    elif not price.is_won_back(runs_on, apart):
        return []
    more = len(calls) - MOST_CALLS
    shown = [*calls[:MOST_CALLS], *([f"{more} more"] if more > 0 else [])]
    told = (
        f"a device_map can keep more apart where {', '.join(shown)} "
        f"{'becomes' if len(calls) == 1 else 'become'} the forward of a small module of its own: "
        "accelerate moves what goes into modules, also into those without parameters"
    )
    if price is None:
        return [told]
    return [f"{told}; a step is then predicted to take {milliseconds(price.step(apart).step_s)} ms"]


def as_written(device: str) -> int | str:
    """Return a device as device maps write it: 1 for ``cuda:1``, others by name."""
    kind, _, index = device.partition(":")
    return int(index) if kind == "cuda" and index.isdigit() else device


def _host_remark(placed: PlacedModules, main_device: str) -> str:
    """Return the remark on a map that uses both the CPU and accelerators.

    Raises:
        ExportError: parameters that are to be trained would get no gradients.
    """
    if main_device == HOST:
        return (
            'load it with dispatch_model(model, device_map, main_device="cpu"): otherwise '
            "accelerate computes on an accelerator what the map gives to the CPU"
        )
    if placed.step.training:
        raise ExportError(
            "in a device_map cpu means offloaded: accelerate would compute these modules on "
            f"{main_device} and give their parameters no gradients. Export for a model that is fed "
            'on the CPU (--main-device cpu, and dispatch_model(..., main_device="cpu")), or place '
            "without cpu"
        )
    return (
        "in a device_map cpu means offloaded: accelerate keeps these weights on the host and "
        f"computes on {main_device}, which is not what was placed (with --main-device cpu it "
        "computes there)"
    )


def _merged(model: nn.Module, devices: Mapping[str, str]) -> dict[str, str]:
    """Return an equivalent map with fewer entries: a called module replaces its submodules.

    A ModuleList is never called, so no inputs would be sent to its device.
    """
    merged = dict(devices)
    paths = sorted(dict(model.named_modules()), key=lambda path: -path.count(".") - bool(path))
    for path in paths:
        inside = [unit for unit in merged if is_inside(unit, path)]
        called = type(model.get_submodule(path)).forward is not nn.Module.forward
        if called and inside and len({merged[unit] for unit in inside}) == 1:
            device = merged[inside[0]]
            merged = {
                path if unit == inside[0] else unit: device if unit == inside[0] else own
                for unit, own in merged.items()
                if unit == inside[0] or unit not in inside
            }
    return merged
