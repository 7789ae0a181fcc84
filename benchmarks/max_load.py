"""Gap between the max-load of the search and its proven lower bound, on 13 profiled networks.

    python -m benchmarks.max_load [--full] [NAME ...]

For each profile (``data/pipedream``): the best single device and the layer split, the median and
range of the search over seeds, and the best proven bound. The bound is proven by a sweep over the
ops (``envs.load_bound``) or, where that leaves a gap and ortools is installed, by CP-SAT.
``--full`` spends more time on all of it: 10 s and 5 seeds, up to an hour in total.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

import numpy as np

from benchmarks.pipedream import profile_names, profile_problem
from envs.load_bound import load_bound_ns
from envs.max_load import max_load_ns
from envs.problem import Problem
from envs.simulator import INFEASIBLE_NS
from placer.search.balance_run import load_compiled_code
from placer.search.balancing import balance
from placer.search.budget import Budget
from placer.search.trivial import layer_split, single_device

CLOSED: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Budgets of the search and of the proofs."""

    search_s: float
    seeds: int
    states: int
    sweeps: int
    solver_s: float


SHORT: Final = Effort(search_s=1.0, seeds=3, states=30_000, sweeps=5, solver_s=6.0)
FULL: Final = Effort(search_s=10.0, seeds=5, states=100_000, sweeps=8, solver_s=60.0)


def main(names: Sequence[str] = (), effort: Effort = SHORT) -> None:
    load_compiled_code()
    print(f"max-load in ms, search {effort.search_s:g} s, {effort.seeds} seeds")
    print(
        f"{'':16} {'ops':>4} {'devices':>7} {'single':>8} {'layers':>8} {'median':>8} "
        f"{'(range)':>17} {'bound':>8} {'gap':>6}  proven by"
    )
    gaps = [report(name, effort) for name in names or profile_names()]
    closed = sum(gap <= CLOSED for gap in gaps)
    print(f"{closed} of {len(gaps)} within {CLOSED:.0%} of what is proven")


def report(name: str, effort: Effort) -> float:
    """Print one line and return the gap between the median and the bound."""
    problem = profile_problem(name)
    single = np.array([single_device(problem, d) for d in range(problem.device_count)])
    single_ns = int(max_load_ns(problem, single).min())
    layers_ns = int(max_load_ns(problem, layer_split(problem))[0])
    found_ns = sorted(searched_ns(problem, effort.search_s, seed) for seed in range(effort.seeds))
    began = time.perf_counter()
    bound_ns, proof = proven(problem, found_ns[0], effort)
    took_s = time.perf_counter() - began
    median_ns = int(statistics.median(found_ns))
    gap = median_ns / bound_ns - 1
    spread = f"({found_ns[0] / 1e6:.2f}-{found_ns[-1] / 1e6:.2f})"
    print(
        f"{name:16} {problem.op_count:4} {problem.device_count:7} {milliseconds(single_ns)} "
        f"{milliseconds(layers_ns)} {milliseconds(median_ns)} {spread:>17} "
        f"{milliseconds(bound_ns)} {gap:6.2%}  {proof}, {took_s:.0f} s",
        flush=True,
    )
    return gap


def searched_ns(problem: Problem, seconds: float, seed: int) -> int:
    best = balance(problem, Budget(seconds=seconds), seed)[0]
    return int(max_load_ns(problem, best.devices)[0])


def proven(problem: Problem, known_ns: int, effort: Effort) -> tuple[int, str]:
    """Return the best lower bound and the name of its proof."""
    swept_ns = load_bound_ns(problem, known_ns, states=effort.states, sweeps=effort.sweeps)
    if swept_ns == known_ns:
        return swept_ns, "sweep: optimal"
    if known_ns <= (1 + CLOSED / 2) * swept_ns or find_spec("ortools") is None:
        return swept_ns, "sweep"
    from benchmarks.max_load_model import solver_bound_ns

    solver_ns = solver_bound_ns(problem, known_ns, effort.solver_s)
    if solver_ns <= swept_ns:
        return swept_ns, "sweep"
    return solver_ns, "CP-SAT: optimal" if solver_ns == known_ns else "CP-SAT"


def milliseconds(ns: int) -> str:
    return f"{ns / 1e6:8.2f}" if ns < INFEASIBLE_NS else f"{'no room':>8}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="profiles; all by default")
    parser.add_argument("--full", action="store_true", help="10 s, 5 seeds and longer proofs")
    arguments = parser.parse_args()
    main(arguments.names, FULL if arguments.full else SHORT)
