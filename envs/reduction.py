"""How replicas agree on one model: what is reduced, by which algorithm, and how often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from graphs.graph import LARGEST_BYTES
from graphs.strict_json import within

CHEAPEST: Final = "auto"
"""Every bucket is reduced by the algorithm that is the fastest for its size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """How replicas agree: the algorithm, what is sent of a gradient, and how often.

    With ``every`` above 1 they do not reduce gradients but average parameters, after so many steps
    (model averaging, BMUF): nothing of that overlaps with the steps.

    ``coding_bytes_per_s`` are the bytes of gradients (or parameters) that a rank makes ready to be
    sent, and takes from what it is sent, in a second; None is no time at all. With bits that may
    take longer than to send them: ``placer.parallel.coding`` measures it.
    """

    algorithm: str = CHEAPEST
    payload: str = "fp32"
    bucket_bytes: int = CAP_BYTES
    every: int = 1
    coding_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if self.algorithm not in (CHEAPEST, *ALGORITHMS):
            names = ", ".join((CHEAPEST, *ALGORITHMS))
            raise ValueError(f"there is no reduction {self.algorithm!r}: there are {names}")
        if self.payload not in PAYLOADS:
            raise ValueError(f"payload is {self.payload!r}, not one of {', '.join(PAYLOADS)}")
        within(self.every, 1, 10**9, "every")
        within(self.bucket_bytes, 1, LARGEST_BYTES, "bucket_bytes")
        if self.coding_bytes_per_s is not None:
            within(self.coding_bytes_per_s, 1e-3, 1e18, "coding_bytes_per_s")

    def of(self, size_bytes: int, levels: Sequence[Level]) -> AllReduce:
        """The reduction of a bucket of gradients over a network, innermost level first."""
        factor = PAYLOADS[self.payload]
        if self.algorithm == CHEAPEST:
            found = cheapest_all_reduce(size_bytes, levels, payload_factor=factor)
        else:
            found = all_reduce(self.algorithm, size_bytes, levels, payload_factor=factor)
        return replace(found, seconds=found.seconds + self.coding_s(size_bytes))

    def coding_s(self, size_bytes: int) -> float:
        """Seconds that a rank takes to code a bucket of gradients, both ways."""
        return 0.0 if self.coding_bytes_per_s is None else size_bytes / self.coding_bytes_per_s
