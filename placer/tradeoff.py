"""What a step takes against what its devices cost: offers, and which of them are worth taking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np

from envs.cluster import Cluster
from envs.problem import Problem
from placer.messages import SMALLEST_GAIN, extraction_remarks
from placer.result import Result

if TYPE_CHECKING:
    from graphs.extract import Extraction

Pick: TypeAlias = Literal["fastest", "cheapest"]
PICKS: Final[tuple[Pick, ...]] = ("fastest", "cheapest")
HOUR_S: Final = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Offer:
    """Devices to be rented together, and the best plan found that uses all of them."""

    cluster: Cluster
    found: Result | None  # None where nothing fits or can run
    why: str = ""  # nothing does

    @property
    def step_s(self) -> float:
        """Predicted step; inf where there is none."""
        return np.inf if self.found is None else self.found.best.predicted_s

    @property
    def price_per_hour(self) -> float:
        """Of all its devices."""
        return self.cluster.price_per_hour

    @property
    def price_per_million_steps(self) -> float:
        """Of the time that 10**6 steps take; inf where there is none."""
        if self.found is None:
            return np.inf
        return self.price_per_hour * self.step_s / HOUR_S * 1e6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tradeoff:
    """What a step takes and costs on the sub-clusters of a cluster.

    ``offers`` go from cheap to dear by the hour; at least one has a plan.
    """

    problem: Problem  # of the whole cluster
    offers: tuple[Offer, ...]
    searched: int  # sub-clusters
    left_out: int  # sub-clusters that were not searched, since the user stopped it
    search_s: float
    extraction: Extraction | None = None
    cost_source: Mapping[str, str] = field(default_factory=dict)  # {device kind: where from}

    @property
    def front(self) -> tuple[Offer, ...]:
        """The offers that no other beats: as fast or faster, as cheap or cheaper by the hour."""
        able = [offer for offer in self.offers if offer.found is not None]
        best = pareto_front([(offer.price_per_hour, offer.step_s) for offer in able])
        return tuple(offer for offer, is_best in zip(able, best, strict=True) if is_best)

    @property
    def fastest(self) -> Offer:
        """The shortest step; of equal ones the cheapest by the hour."""
        return min(self.offers, key=lambda offer: (offer.step_s, offer.price_per_hour))

    @property
    def cheapest(self) -> Offer:
        """The least price of a step; of those that are 1 % apart or less the shortest step."""
        least = min(offer.price_per_million_steps for offer in self.offers)
        equal = [o for o in self.offers if o.price_per_million_steps <= least * (1 + SMALLEST_GAIN)]
        return min(equal, key=lambda offer: (offer.step_s, offer.price_per_hour))

    def picked(self, pick: Pick) -> Result:
        """The plan of the fastest or of the cheapest offer.

        Raises:
            ValueError: it is neither of them.
        """
        if pick not in PICKS:
            raise ValueError(f"pick is {pick!r}, not one of {', '.join(PICKS)}")
        found = (self.fastest if pick == "fastest" else self.cheapest).found
        assert found is not None  # some offer has a plan, and inf is never the least
        return found

    @property
    def remarks(self) -> list[str]:
        """What a reader of the numbers should know, each a sentence."""
        found = ["Nothing was run: steps are the simulator's."]
        free = [d.name for d in self.problem.cluster.devices if d.price_per_hour == 0]
        if free:
            found.append(f"Without a price_per_hour, and counted as free: {', '.join(free)}.")
        if self.left_out:
            found.append(
                f"Stopped early: {self.left_out} of {self.searched + self.left_out} sub-clusters "
                "were not searched."
            )
        if self.extraction is not None:
            found += extraction_remarks(self.extraction)
        return found


def pareto_front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """For each point, whether no other is as small in both numbers and smaller in one.

    >>> pareto_front([(1.0, 5.0), (2.0, 5.0), (2.0, 3.0)])
    [True, False, True]
    """
    best = [False] * len(points)
    last: tuple[float, float] | None = None
    for i in sorted(range(len(points)), key=points.__getitem__):
        if last is None or points[i][1] < last[1] or points[i] == last:
            best[i], last = True, points[i]
    return best
