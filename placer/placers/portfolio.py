"""The default search of ``optimize``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from placer.placers.annealing import balanced
from placer.search.candidate import Candidate
from placer.search.portfolio import Proposer, search
from placer.search.request import ALL, MAX_LOAD, SearchRequest


@dataclass(frozen=True, slots=True)
class Portfolio:
    """Heuristics, a policy if given, evolution and annealing; see :mod:`placer.search.portfolio`.

    For the objective max-load annealing runs alone, without a policy.
    """

    policy: Proposer | None = None
    objectives: ClassVar[tuple[str, ...]] = ALL

    def place(self, request: SearchRequest) -> list[Candidate]:
        """Return all heuristics and the best placement of each search, best first."""
        if request.objective == MAX_LOAD:
            return balanced(request)
        return search(request, self.policy)
