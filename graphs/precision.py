"""Compute dtypes of a step: those of the model, or mixed precision."""

from __future__ import annotations

from typing import Final

FULL: Final = "fp32"
MIXED: Final = ("bf16",)
DTYPES: Final = (FULL, *MIXED)
"""``fp32`` leaves every tensor in the dtype that the model gives it."""


def check_dtype(dtype: str) -> str:
    """Return the name of a dtype unchanged."""
    if dtype == "fp16":
        raise ValueError(
            "fp16 is not for CPUs: they have few kernels for it, and small gradients would vanish "
            "without a scaler, which a placed step has not; use bf16"
        )
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    return dtype
