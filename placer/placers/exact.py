"""Exact search, for small graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from envs.simulator import INFEASIBLE_NS
from placer.search.candidate import Candidate, Kind, ranked
from placer.search.evaluator import BudgetedEvaluator
from placer.search.exact import LARGEST, exact
from placer.search.heuristics import heuristics
from placer.search.request import STEPS, SearchRequest


class Exact:
    """CP-SAT from the best heuristic; its candidate holds the proven bound.

    An evaluation of a budget is worth a millisecond of the solver's deterministic time. Requires
    ortools.
    """

    objectives: ClassVar[tuple[str, ...]] = STEPS

    def place(self, request: SearchRequest) -> list[Candidate]:
        """Return the best candidate.

        Raises:
            ValueError: the graph has too many ops.
        """
        problem = request.problem
        if problem.op_count > LARGEST:
            raise ValueError(
                f"graph {problem.graph.name!r} has {problem.op_count} ops; exact search takes at "
                f"most {LARGEST}: merge them into groups, as --groups {LARGEST} does, or take "
                "another placer"
            )
        budgeted = BudgetedEvaluator(request, Kind.EXACT)
        bound_ns = exact(budgeted, request.seed, ranked(heuristics(budgeted.evaluator))[0])
        best = replace(budgeted.best(), bound_ns=bound_ns)
        proven = best.step_ns <= bound_ns < INFEASIBLE_NS
        request.report(1.0, "exact, proven to be the best" if proven else "exact, not proven")
        return [best]
