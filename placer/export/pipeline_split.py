"""The split of ``torch.distributed.pipelining``: before which modules the next stage begins.

::

    split_spec = {name: SplitPoint.BEGINNING for name in exported["split_points"]}
    pipe = pipeline(model, mb_args, mb_kwargs, split_spec=split_spec)
    stage = pipe.build_stage(rank, exported["stages"][rank])
"""

from __future__ import annotations

from placer.export.format import Exported
from placer.export.placed_modules import ExportError, PlacedModules, is_inside
from placer.export.stages import Stage, moved, stages, ties_across


def pipeline_split(placed: PlacedModules) -> Exported:
    """Devices by stage, and the modules that stages after the first begin with.

    Raises:
        ExportError: the placement goes back to a device it has left, uses one device only, or a
            stage would begin with a module that is called more than once.
    """
    if why := placed.why_no_torch():
        raise ExportError(why)
    found, starts = pipeline_stages(placed)
    return Exported(
        content={
            "stages": [stage.device for stage in found],
            "split_points": dict.fromkeys(starts, "beginning"),
        },
        remarks=(*moved(placed, found), *ties_across(placed, found)),
    )


def pipeline_stages(placed: PlacedModules) -> tuple[list[Stage], list[str]]:
    """The stages of a placement, and the modules that those after the first begin with.

    Raises:
        ExportError: as for :func:`pipeline_split`, whatever the devices.
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
