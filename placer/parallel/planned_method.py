"""The method that reduces as a plan counts on."""

from __future__ import annotations

from typing import Final

from envs.reduction import CHEAPEST, Reduction
from placer.parallel.registry import DEFAULT

_OF_PAYLOAD: Final = {"fp16": "fp16", "bf16": "bf16", "1-bit": "onebit"}
_BY_LEVELS: Final = "hierarchical"


def method_of(reduction: Reduction) -> tuple[str, tuple[str, ...]]:
    """Name of the method that does what was planned, and what it does otherwise, in sentences."""
    if reduction.every > 1:
        if reduction.payload == "fp32":
            return "ma", ()
        return "ma", (f"models are averaged in full precision: {reduction.payload} is not sent",)
    sync = _OF_PAYLOAD.get(reduction.payload)
    is_by_levels = reduction.algorithm == _BY_LEVELS
    if sync is None:
        sync = _BY_LEVELS if is_by_levels else DEFAULT
    if reduction.algorithm == CHEAPEST or sync == _BY_LEVELS:
        return sync, ()
    if is_by_levels:
        return sync, (
            f"{reduction.payload} gradients are reduced in one level, not level by level",
        )
    return sync, (
        f"the plan counts on {reduction.algorithm}: gloo and NCCL choose an algorithm themselves",
    )
