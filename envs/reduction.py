"""How replicas are kept in sync: what is reduced, by which algorithm, and how often."""

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
"""Use the fastest algorithm for the size of each bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """How replicas are kept in sync: algorithm, payload of a gradient, and interval.

    With ``every`` above 1 replicas do not reduce gradients but average parameters every so many
    steps (model averaging, BMUF); this does not overlap with the steps.

    ``coding_bytes_per_s`` is the rate at which a rank encodes and decodes gradients (or
    parameters); None means no time at all. Coding 1-bit payloads can take longer than sending them:
    ``placer.parallel.coding`` measures it.
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
        """Return the all-reduce of a bucket over a network, given as levels, innermost first."""
        factor = PAYLOADS[self.payload]
        if self.algorithm == CHEAPEST:
            found = cheapest_all_reduce(size_bytes, levels, payload_factor=factor)
        else:
            found = all_reduce(self.algorithm, size_bytes, levels, payload_factor=factor)
        return replace(found, seconds=found.seconds + self.coding_s(size_bytes))

    def coding_s(self, size_bytes: int) -> float:
        """Return the seconds that a rank takes to encode and decode a bucket of gradients."""
        return 0.0 if self.coding_bytes_per_s is None else size_bytes / self.coding_bytes_per_s
