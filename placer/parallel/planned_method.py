"""Choose the sync method that reduces as a plan assumes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from envs.collectives import HIERARCHICAL
from envs.reduction import CHEAPEST
from placer.parallel.registry import DEFAULT

if TYPE_CHECKING:
    from envs.replica_set import Replicas

_OF_PAYLOAD: Final = {"fp16": "fp16", "bf16": "bf16", "1-bit": "onebit"}
_AS_BACKENDS_DO: Final = ((CHEAPEST,), ("ring",))


def method_of(plan: Replicas) -> tuple[str, tuple[str, ...]]:
    """Return the name of the method for a plan, and sentences on where it differs from the plan."""
    reduction = plan.reduction
    algorithms = plan.algorithms or (reduction.algorithm,)
    first, *others = algorithms
    if reduction.every > 1:
        remarks = []
        if reduction.payload != "fp32":
            remarks.append(
                f"models are averaged in full precision: {reduction.payload} is not sent"
            )
        if first == HIERARCHICAL:
            remarks.append("models are averaged in one level, not level by level")
        return "ma", tuple(remarks)
    sync = _OF_PAYLOAD.get(reduction.payload)
    if sync is None and first == HIERARCHICAL:
        told = f"the plan reduces small buckets by {' and '.join(others)}: all go level by level"
        return HIERARCHICAL, (told,) if others else ()
    sync = sync or DEFAULT
    if first == HIERARCHICAL:
        return sync, (
            f"{reduction.payload} gradients are reduced in one level, not level by level",
        )
    if reduction.algorithm == CHEAPEST and algorithms in _AS_BACKENDS_DO:
        return sync, ()
    told = f"the plan counts on {' and '.join(algorithms)}"
    return sync, (f"{told}: gloo and NCCL choose an algorithm themselves",)
