"""Search budgets: seconds, or evaluations of the simulator."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from envs.problem import HORIZON_NS
from placer.search.trace import SearchTrace

_FORM: Final = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:e[0-9]+(?=[a-z]))?)\s*(s|m|min|e|evals?)")
LONGEST_CHUNK_S: Final = 0.05
LARGEST_CHUNK: Final = 4096
_SECONDS: Final = {"s": 1.0, "m": 60.0, "min": 60.0}


@dataclass(frozen=True, slots=True)
class Budget:
    """Search budget: either ``seconds`` or ``evaluations``; the other is None.

    With evaluations, a search with the same seed gives the same result on every machine.
    """

    seconds: float | None = None
    evaluations: int | None = None

    def __post_init__(self) -> None:
        if (self.seconds is None) == (self.evaluations is None):
            raise ValueError("a budget is either seconds or evaluations, such as '20s' or '4000e'")
        amount = self.seconds if self.seconds is not None else self.evaluations
        if amount is None or not (math.isfinite(amount) and amount > 0):
            raise ValueError(f"a budget of {amount} is no amount above 0; try '20s' or '4000e'")

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Parse ``"20s"``, ``"2m"`` or ``"4000e"``.

        >>> Budget.parse("1.5s")
        Budget(seconds=1.5, evaluations=None)
        >>> Budget.parse("4000e")
        Budget(seconds=None, evaluations=4000)

        Raises:
            ValueError: the text has another form, is zero, or is a fraction of an evaluation.
        """
        match = _FORM.fullmatch(text.strip().lower())
        if match is None:
            raise ValueError(
                f"budget {text!r} is neither seconds, such as '20s' or '1.5m', nor evaluations, "
                "such as '4000e'"
            )
        amount, unit = float(match[1]), match[2]
        if unit in _SECONDS:
            return cls(seconds=amount * _SECONDS[unit])
        if not math.isfinite(amount) or amount != int(amount):
            raise ValueError(f"budget {text!r} is no whole number of evaluations; try '4000e'")
        return cls(evaluations=int(amount))

    def part(self, share: float) -> Budget:
        """Return ``share`` (0 .. 1) of the budget, at least one evaluation.

        >>> Budget(evaluations=1000).part(0.3)
        Budget(seconds=None, evaluations=300)
        """
        if self.seconds is not None:
            return Budget(seconds=self.seconds * share)
        assert self.evaluations is not None
        return Budget(evaluations=max(round(self.evaluations * share), 1))

    def __str__(self) -> str:
        """Return the budget in the form that :meth:`parse` reads."""
        return f"{self.seconds:g}s" if self.seconds is not None else f"{self.evaluations}e"


@dataclass(slots=True)
class Meter:
    """Spending of a budget, including requests to stop.

    Compiled loops run in chunks of about ``chunk_s`` between two polls of ``should_stop``. If there
    is a ``search_trace``, it records how the search went.
    """

    budget: Budget
    should_stop: Callable[[], bool] | None = None
    spent: int = 0
    stopped: bool = False
    search_trace: SearchTrace | None = None
    _began: float = field(default_factory=time.perf_counter)

    @property
    def chunk_s(self) -> float:
        """Length of a chunk: 0.05 s, or 1/50 of the budget if that is shorter."""
        if self.budget.seconds is None:
            return LONGEST_CHUNK_S
        return min(LONGEST_CHUNK_S, self.budget.seconds / 50.0)

    def seconds(self) -> float:
        """Return the seconds since the meter was created."""
        return time.perf_counter() - self._began

    def share(self) -> float:
        """Return the spent share of the budget, 0 .. 1 (above 1 when overdrawn)."""
        if self.budget.seconds is not None:
            return self.seconds() / self.budget.seconds
        assert self.budget.evaluations is not None
        return self.spent / self.budget.evaluations

    def spend(self, evaluations: int) -> None:
        """Add to the spent evaluations."""
        self.spent += evaluations

    def note(self, name: str, cost_ns: int) -> None:
        """Record the best feasible cost of ``name`` so far in the search trace, if any."""
        if self.search_trace is not None and cost_ns < HORIZON_NS:
            self.search_trace.note(name, self.spent, self.seconds(), cost_ns / 1e9)

    def left(self) -> int | None:
        """Return the evaluations left, or None if the budget is in seconds."""
        if self.budget.evaluations is None:
            return None
        return max(self.budget.evaluations - self.spent, 0)

    def over(self, share: float = 1.0) -> bool:
        """Return whether ``share`` of the budget is spent or a stop was requested."""
        if not self.stopped and self.should_stop is not None and self.should_stop():
            self.stopped = True
        return self.stopped or self.share() >= share

    def next_chunk(self, chunk: int, done: int, seconds: float, most: int = LARGEST_CHUNK) -> int:
        """Return how many steps to make until the next look at the clock, by the rate of the last.

        The last chunk of ``chunk`` steps was cut to ``done`` steps, which took ``seconds``.
        """
        rate = done / max(seconds, 1e-6)
        return int(min(max(rate * self.chunk_s, 1), 2 * chunk, most))
