"""Exact search, for small graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

from envs.problem import Problem
from envs.simulator import INFEASIBLE_NS
from placer.placers.placer import LATENCY, STEPS, Progress
from placer.search.budget import Budget, Meter
from placer.search.candidate import Candidate, ranked
from placer.search.exact import LARGEST, exact
from placer.search.heuristics import heuristics
from placer.search.judge import Judge
from placer.search.tally import Tally


class Exact:
    """CP-SAT from the best heuristic; its candidate holds the proven bound.

    An evaluation of a budget is worth a millisecond of the solver's deterministic time. Requires
    ortools.
    """

    objectives: ClassVar[tuple[str, ...]] = STEPS

    def place(
        self,
        problem: Problem,
        budget: Budget,
        seed: int,
        *,
        objective: str = LATENCY,
        progress: Progress | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> list[Candidate]:
        """Return the best candidate; see :class:`placer.placers.placer.Placer`.

        Raises:
            ValueError: the graph has too many ops.
        """
        if problem.op_count > LARGEST:
            raise ValueError(
                f"graph {problem.graph.name!r} has {problem.op_count} ops; exact search takes at "
                f"most {LARGEST}: merge them into groups, as --groups {LARGEST} does, or take "
                "another placer"
            )
        judge = Judge(problem)
        tally = Tally(judge, Meter(budget, should_stop), "exact", progress)
        bound_ns = exact(tally, seed, ranked(heuristics(judge))[0])
        best = replace(tally.best(), bound_ns=bound_ns)
        if progress is not None:
            proven = best.step_ns <= bound_ns < INFEASIBLE_NS
            progress(1.0, "exact, proven to be the best" if proven else "exact, not proven")
        return [best]
