"""How a run is configured by the plan in its placement file, unless the user overrides it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from envs.buckets import CAP_BYTES
from envs.placement import Placement
from envs.replica_set import Replicas
from placer.parallel.launching import launch_command
from placer.parallel.options import SyncOptions
from placer.parallel.planned_method import method_of
from placer.parallel.registry import DEFAULT, check_options, method_named


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How the ranks of a run are kept in sync.

    Attributes:
        sync: name of the method.
        options: options of the method.
        accumulate: passes per step, whose gradients are averaged.
        parts: number of parts that a batch of the target is cut into, one per pass of each rank; 1
            if every pass has its own batch.
        bucket_bytes: size of the buckets of gradients that are reduced together.
        remarks: sentences on where the run differs from the plan.
    """

    sync: str = DEFAULT
    options: SyncOptions
    accumulate: int = 1
    parts: int = 1
    bucket_bytes: int = CAP_BYTES
    remarks: tuple[str, ...] = ()


def manner_of(
    placement: Placement,
    *,
    ranks: int,
    sync: str | None = None,
    options: SyncOptions | None = None,
    accumulate: int | None = None,
    target: str = "TARGET",
) -> Manner:
    """Return how to run a placement on ``ranks`` ranks.

    ``sync``, ``options`` and ``accumulate`` are the user's and override the plan.

    Raises:
        ValueError: the plan has another number of replicas, its batch is cut differently, or the
            method does not take an option.
    """
    given, plan = options or SyncOptions(), placement.replicas
    if plan is None:
        check_options(sync or DEFAULT, given.given)
        return Manner(sync=sync or DEFAULT, options=given, accumulate=accumulate or 1)
    if ranks != len(plan):
        count, width = len(plan), len(plan.groups[0])
        raise ValueError(
            f"the placement is planned for {count} replica{'s'[: count > 1]} of {width} "
            f"device{'s'[: width > 1]}, and this run has {ranks} rank{'s'[: ranks > 1]}: start "
            f"{launch_command(plan, target)}"
        )
    passes = accumulate or plan.accumulate
    if plan.batch == "global" and passes != plan.accumulate:
        raise ValueError(
            f"the plan cuts a batch for {len(plan)} replicas x {plan.accumulate} passes, not for "
            f"{passes}: leave --accumulate out, or plan with it"
        )
    name, remarks = (sync, ()) if sync is not None else method_of(plan)
    every, taken = plan.reduction.every, method_named(name).options
    if every > 1 and given.period is None and "period" in taken:
        given = replace(given, period=every)
    if plan.levels and given.levels is None and "levels" in taken:
        given = replace(given, levels=plan.levels)
    check_options(name, given.given)
    return Manner(
        sync=name,
        options=given,
        accumulate=passes,
        parts=parts_of(plan),
        bucket_bytes=plan.reduction.bucket_bytes,
        remarks=remarks,
    )


def parts_of(plan: Replicas) -> int:
    """Return the number of parts that the batch of a step is cut into."""
    return len(plan) * plan.accumulate if plan.batch == "global" else 1
