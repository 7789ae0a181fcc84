"""The protocol of placers."""

from __future__ import annotations

from typing import ClassVar, Protocol

from placer.search.candidate import Candidate
from placer.search.request import SearchRequest


class Placer(Protocol):
    """Search algorithm that returns devices and order of ops.

    Every candidate puts each op on an allowed device and a co-location group on one device. The
    same problem, seed and budget of evaluations give the same candidates; see
    :mod:`placer.placers.contract`.
    """

    objectives: ClassVar[tuple[str, ...]]
    """Supported objectives, of :data:`envs.placement.OBJECTIVES`."""

    def place(self, request: SearchRequest) -> list[Candidate]:
        """Return at least one candidate, best first."""
        ...
