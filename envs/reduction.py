"""How replicas agree on one model: what is reduced, by which algorithm, and how often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from envs.buckets import CAP_BYTES
from envs.collectives import (
    ALGORITHMS,
    PAYLOADS,
    AllReduce,
    Level,
    all_reduce,
    cheapest_all_reduce,
)

CHEAPEST: Final = "auto"
"""Every bucket is reduced by the algorithm that is the fastest for its size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """How replicas agree: the algorithm, what is sent of a gradient, and how often.

    With ``every`` above 1 they do not reduce gradients but average parameters, after so many steps
    (model averaging, BMUF): nothing of that overlaps with the steps.
    """

    algorithm: str = CHEAPEST
    payload: str = "fp32"
    bucket_bytes: int = CAP_BYTES
    every: int = 1

    def __post_init__(self) -> None:
        if self.algorithm not in (CHEAPEST, *ALGORITHMS):
            names = ", ".join((CHEAPEST, *ALGORITHMS))
            raise ValueError(f"there is no reduction {self.algorithm!r}: there are {names}")
        if self.payload not in PAYLOADS:
            raise ValueError(f"payload is {self.payload!r}, not one of {', '.join(PAYLOADS)}")
        if self.every < 1:
            raise ValueError(f"parameters are averaged every {self.every} steps, below 1")
        if self.bucket_bytes < 1:
            raise ValueError(f"a bucket of {self.bucket_bytes} bytes holds nothing: give 1 or more")

    def of(self, size_bytes: int, levels: Sequence[Level]) -> AllReduce:
        """The reduction of a bucket of gradients over a network, innermost level first."""
        factor = PAYLOADS[self.payload]
        if self.algorithm == CHEAPEST:
            return cheapest_all_reduce(size_bytes, levels, payload_factor=factor)
        return all_reduce(self.algorithm, size_bytes, levels, payload_factor=factor)
