"""The optimization pipeline: extract, measure costs, search, run the best candidates, choose."""

from placer.pipeline.candidate_search import grouped, searching
from placer.pipeline.optimization import optimize_job, optimize_problem

__all__ = ["grouped", "optimize_job", "optimize_problem", "searching"]
