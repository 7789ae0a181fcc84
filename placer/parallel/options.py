"""Options of the sync methods."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Final

WARMUP_STEPS: Final = 200
"""Default number of plain steps before gradients are sent as bits or low-rank matrices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncOptions:
    """Options of the sync methods, each of which takes some of them; None means its default.

    Attributes:
        warmup_steps: plain synchronous steps before the method begins.
        period: steps per block.
        block_momentum: momentum of block updates.
        block_rate: factor of block updates.
        levels: ranks at each level of the network, innermost first.
        approximation_rank: rank of the PowerSGD matrices.
    """

    warmup_steps: int | None = None
    period: int | None = None
    block_momentum: float | None = None
    block_rate: float | None = None
    levels: tuple[int, ...] | None = None
    approximation_rank: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("warmup_steps", 0), ("period", 1), ("approximation_rank", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}, below {least}")
        if self.block_momentum is not None and not 0 <= self.block_momentum < 1:
            raise ValueError(f"block_momentum is {self.block_momentum}, not within 0 .. 1")
        if self.block_rate is not None and not (0 < self.block_rate < math.inf):
            raise ValueError(f"block_rate is {self.block_rate}, not a number above 0")
        if self.levels is not None and not (self.levels and min(self.levels) >= 1):
            raise ValueError(f"levels are {self.levels}, not numbers of ranks")

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the options that are set."""
        return tuple(own.name for own in fields(self) if getattr(self, own.name) is not None)
