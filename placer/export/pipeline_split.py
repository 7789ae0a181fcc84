"""Export as ``torch.distributed.pipelining`` split: the modules before which stages begin.

::

    split_spec = {name: SplitPoint.BEGINNING for name in exported["split_points"]}
    pipe = pipeline(model, mb_args, mb_kwargs, split_spec=split_spec)
    stage = pipe.build_stage(rank, exported["stages"][rank])
"""

from __future__ import annotations

from graphs.extract.reserved import reserved_modules
from placer.export.faults import ExportError, RenamingError
from placer.export.format import Exported
from placer.export.placed_modules import PlacedModules, is_inside
from placer.export.stages import Stage, cost_of, moved, stages, ties_across


def pipeline_split(placed: PlacedModules) -> Exported:
    """Return the device of each stage, and the first module of each stage but the first.

    Raises:
        RenamingError: a device is not a torch device.
        ExportError: the placement returns to a device, uses one device only, a stage would begin
            with a module that is called more than once, or a module has a name that torch.export
            reserves.
    """
    if placed.no_torch:
        raise RenamingError(placed.no_torch)
    if reserved := reserved_modules(placed.model):
        last = reserved[0].rpartition(".")[2]
        raise ExportError(
            f"rename the submodule {reserved[0]!r}: torch.export, which pipelining cuts the model "
            f"with, keeps the name {last!r} for itself"
        )
    found, starts = pipeline_stages(placed)
    told = moved(placed, found)
    costs = cost_of(placed, found, moved=bool(told))
    return Exported(
        is_as_placed=not told,
        content={
            "stages": [stage.device for stage in found],
            "split_points": dict.fromkeys(starts, "beginning"),
        },
        remarks=(*told, *costs, *ties_across(placed, found)),
    )


def pipeline_stages(placed: PlacedModules) -> tuple[list[Stage], list[str]]:
    """Return the stages of a placement, and the first module of each stage but the first.

    Raises:
        ExportError: as for :func:`pipeline_split`, except for devices and reserved names.
    """
    found = stages(placed)
    if len(found) == 1:
        raise ExportError(f"all modules are on {found[0].device}: there is nothing to split")
    starts = [stage.modules[0] for stage in found[1:]]
    for start in starts:
        if any(op.is_repeated and is_inside(op.module, start) for op in placed.ops):
            raise ExportError(
                f"a stage would begin with {start}, which a step calls more than once: pipelining "
                "splits at every call"
            )
    return found, starts
