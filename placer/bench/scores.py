"""Ratios that ways to search reach on problems, printed for people and kept as plain data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placer.placers.annealing import Annealed
from placer.placers.placer import Placer
from placer.policies.network import ACTION_SCALE
from placer.policies.pool import Exercise
from placer.policies.training.config import Ppo
from placer.search.budget import Budget
from placer.search.candidate import Candidate
from placer.search.decoder import HEFT, WEIGHT_COUNT
from placer.search.judge import Judge
from placer.search.portfolio import SENDERS
from placer.search.request import SearchRequest

WITH_MOVES = Annealed(senders=SENDERS)


class Initial:
    """What a policy proposes before it is trained."""

    def propose(
        self, judge: Judge, known: list[Candidate]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """HEFT, with the deviation that training begins with."""
        spread = ACTION_SCALE * math.exp(Ppo().log_std)
        return np.array([HEFT]), np.full((1, WEIGHT_COUNT), spread)


@dataclass(frozen=True, slots=True)
class Scores:
    """Ratios of one way to search, (seeds, problems)."""

    name: str
    ratios: NDArray[np.float64]

    def means(self) -> list[float]:
        """Of each seed, in order of size."""
        return sorted(np.exp(np.log(self.ratios).mean(axis=1)).tolist())

    def median(self) -> float:
        """Of the means of seeds."""
        return float(np.median(self.means()))

    def line(self) -> str:
        """Name, median and range."""
        means = self.means()
        spread = f"   ({means[0]:.3f} to {means[-1]:.3f})" if len(means) > 1 else ""
        return f"  {self.name:42} {self.median():.3f}{spread}"

    def to_dict(self) -> dict[str, Any]:
        """Median and means of seeds, and every ratio."""
        return {
            "median": self.median(),
            "means": self.means(),
            "ratios": self.ratios.round(5).tolist(),
        }


def searched(
    name: str, placer: Placer, problems: Sequence[Exercise], budget: Budget, seeds: int
) -> Scores:
    """Ratios of a placer."""

    def ratio(item: Exercise, seed: int) -> float:
        return item.ratio(
            placer.place(SearchRequest(item.judge.problem, budget, seed=seed))[0].step_ns
        )

    return Scores(name, np.array([[ratio(p, seed) for p in problems] for seed in range(seeds)]))


def compared(
    own: Scores, other: Scores, problems: Sequence[Exercise], by_problem: bool = False
) -> dict[str, Any]:
    """How a way to search compares with another, problem by problem."""
    relative = np.exp(np.log(own.ratios / other.ratios).mean(axis=0))
    worst = int(relative.argmax())
    mean = float(np.exp(np.log(relative).mean()))
    print(f"    / {other.name}: {mean:.3f}; worst {relative[worst]:.3f} ({problems[worst].family})")
    if by_problem:
        for k, item in enumerate(problems):
            mine, theirs = (np.median(each.ratios[:, k]) for each in (own, other))
            print(f"      {item.family:24} {mine:.3f}  {theirs:.3f}")
    return {"mean": mean, "worst": float(relative[worst]), "worst_problem": problems[worst].family}
