"""Requests for a search: the problem, the budget and how it is spent, and the protocol of placers.

A placer counts its evaluations with a :class:`Meter` of the request.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from envs.hardware.units import milliseconds
from envs.problem import HORIZON_NS, Problem
from envs.simulator import INFEASIBLE_NS
from placer.search.candidate import Candidate

_FORM: Final = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:e[0-9]+(?=[a-z]))?)\s*(s|m|min|e|evals?)")
_SECONDS: Final = {"s": 1.0, "m": 60.0, "min": 60.0}
LONGEST_CHUNK_S: Final = 0.05
LARGEST_CHUNK: Final = 1 << 16

LATENCY: Final = "latency"
MAX_LOAD: Final = "max-load"
STEP_OBJECTIVES: Final = (LATENCY, "throughput")
"""Objectives of placers that minimize the step time: of one micro-batch, or of many."""

Progress: TypeAlias = Callable[[float, str], None]
"""Called with the spent share of the budget, 0 .. 1, and a text."""


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

        >>> Budget.parse("1.5s"), Budget.parse("4000e")
        (Budget(seconds=1.5, evaluations=None), Budget(seconds=None, evaluations=4000))
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


class Improvement(NamedTuple):
    """An improvement over all earlier placements of the same part of a search."""

    evaluations: int  # spent by all parts of the search until then
    seconds: float  # since the search began
    cost_s: float  # simulated value of the objective


@dataclass(slots=True)
class PartTrace:
    """The improvements of one part of a search, in order."""

    name: str
    improvements: list[Improvement] = field(default_factory=list)
    evaluations: int = 0  # at its last report
    seconds: float = 0.0


@dataclass(slots=True)
class SearchTrace:
    """The trace of each part of a search, in order of their starts."""

    parts: dict[str, PartTrace] = field(default_factory=dict)

    def note(self, name: str, evaluations: int, seconds: float, cost_s: float) -> None:
        """Record the best cost of ``name`` so far."""
        part = self.parts.setdefault(name, PartTrace(name))
        part.evaluations, part.seconds = evaluations, seconds
        if not part.improvements or cost_s < part.improvements[-1].cost_s:
            part.improvements.append(Improvement(evaluations, seconds, cost_s))


@dataclass(frozen=True, slots=True, eq=False)
class SearchRequest:
    """A problem, and how to search its placements.

    Attributes:
        problem: graph and cluster; under the objective "throughput", all micro-batches.
        budget: search budget. Heuristics without search take what they need.
        seed: random seed. With a budget of evaluations, it and ``workers`` determine the result.
        objective: one of the placer's ``objectives``; decides which candidate is best.
        progress: called with the progress.
        should_stop: polled now and then; once it returns True, a placer returns the best so far.
        search_trace: records the improvements of the search, if given.
        workers: threads to search with, at least 1; a placer may use fewer.
        start: placement to go on from, evaluated on the problem of the request that a placer gets;
            a placer may ignore it.
        unit_ns: nanoseconds that a nanosecond of ``problem`` stands for, see
            :mod:`envs.simulator.time_units`.
        clock: returns the time in seconds, for budgets in seconds.
    """

    problem: Problem
    budget: Budget
    _: KW_ONLY
    seed: int = 0
    objective: str = LATENCY
    progress: Progress | None = None
    should_stop: Callable[[], bool] | None = None
    search_trace: SearchTrace | None = None
    workers: int = 1
    start: Candidate | None = None
    unit_ns: int = 1
    clock: Callable[[], float] = time.perf_counter

    def meter(self) -> Meter:
        """Return a meter of the budget, which starts now."""
        return Meter(self)

    def report(self, share: float, text: str) -> None:
        """Report the spent share of the budget, at most 1, if anyone listens."""
        if self.progress is not None:
            self.progress(min(share, 1.0), text)


class Meter:
    """Spending of the budget of a request, including requests to stop.

    Compiled loops run in chunks of about ``chunk_s`` between two polls of ``should_stop``.
    """

    def __init__(self, request: SearchRequest) -> None:
        """Start to spend the budget."""
        self.request = request
        self.spent = 0
        self.stopped = False
        self._began = request.clock()

    @property
    def chunk_s(self) -> float:
        """Length of a chunk: 0.05 s, or 1/50 of the budget if that is shorter."""
        if self.request.budget.seconds is None:
            return LONGEST_CHUNK_S
        return min(LONGEST_CHUNK_S, self.request.budget.seconds / 50.0)

    def seconds(self) -> float:
        """Return the seconds since the meter was created."""
        return self.request.clock() - self._began

    def share(self) -> float:
        """Return the spent share of the budget, 0 .. 1 (above 1 when overdrawn)."""
        if self.request.budget.seconds is not None:
            return self.seconds() / self.request.budget.seconds
        assert self.request.budget.evaluations is not None
        return self.spent / self.request.budget.evaluations

    def spend(self, evaluations: int) -> None:
        """Add to the spent evaluations."""
        self.spent += evaluations

    def note(self, name: str, cost_ns: int) -> None:
        """Report the best cost of ``name`` so far; record it in the search trace if feasible."""
        # Loads may be longer than steps that the simulator counts.
        limit_ns = INFEASIBLE_NS if self.request.objective == MAX_LOAD else HORIZON_NS
        fits, trace = cost_ns < limit_ns, self.request.search_trace
        cost_s = cost_ns * self.request.unit_ns / 1e9
        if trace is not None and fits:
            trace.note(name, self.spent, self.seconds(), cost_s)
        if self.request.progress is not None:
            cost = f"{milliseconds(cost_s)} ms" if fits else "nothing fits"
            self.request.report(self.share(), f"{name}, {cost}")

    def left(self, share: float = 1.0) -> int | None:
        """Return the evaluations left of ``share`` of the budget, None if it is in seconds."""
        if self.request.budget.evaluations is None:
            return None
        return max(round(self.request.budget.evaluations * share) - self.spent, 0)

    def over(self, share: float = 1.0) -> bool:
        """Return whether ``share`` of the budget is spent or a stop was requested."""
        should_stop = self.request.should_stop
        if not self.stopped and should_stop is not None and should_stop():
            self.stopped = True
        return self.stopped or self.share() >= share

    def next_chunk(self, chunk: int, done: int, seconds: float) -> int:
        """Return how many steps to make until the next look at the clock, by the rate of the last.

        The last chunk of ``chunk`` steps was cut to ``done`` steps, which took ``seconds``.
        """
        rate = done / max(seconds, 1e-6)
        return int(min(max(rate * self.chunk_s, 1), 2 * chunk, LARGEST_CHUNK))


class Placer(Protocol):
    """Search algorithm that returns devices and order of ops.

    Every candidate puts each op on an allowed device and a co-location group on one device. The
    same problem, seed, budget of evaluations and workers give the same candidates; see
    :mod:`placer.search.contract`.
    """

    @property
    def objectives(self) -> tuple[str, ...]:
        """Return the supported ones of :data:`envs.placement.OBJECTIVES`, a class attribute."""
        ...

    def place(self, request: SearchRequest) -> list[Candidate]:
        """Return at least one candidate, best first."""
        ...


def candidates_of(placer: Placer, request: SearchRequest) -> list[Candidate]:
    """Return a placer's candidates; raise ValueError unless there is at least one."""
    answer: object = placer.place(request)
    found = list(answer) if isinstance(answer, Iterable) else []
    if not found or not all(isinstance(each, Candidate) for each in found):
        kinds = ", ".join(sorted({type(each).__name__ for each in found}))
        gave = f"{type(answer).__name__}[{kinds}]" if found else type(answer).__name__
        raise ValueError(
            f"placer {type(placer).__name__} gave {gave}: return a list of at least one Candidate, "
            "the best first"
        )
    return [
        replace(each, devices=_as(np.int32, each.devices), priority=_as(np.float64, each.priority))
        for each in found
    ]


def _as(dtype: type[np.number[Any]], numbers: Any) -> NDArray[Any]:
    """Return numbers as an array of a dtype; others than fit in are left for later checks."""
    array = np.asarray(numbers)
    return array.astype(dtype) if np.can_cast(array.dtype, dtype, "same_kind") else array
