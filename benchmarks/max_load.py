"""Max-load of the search on 13 profiled networks, and its gap to the proven lower bound.

    python -m benchmarks max_load

For each profile (data/pipedream): the best single device and the layer split, the median and range
of the search over seeds, and the best proven lower bound: by
CP-SAT where ortools is installed, otherwise the average work per device or the costliest op.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Final

import numpy as np

from benchmarks.instances import profile_names, profiled
from benchmarks.record import Effort, Part
from benchmarks.tables import Table, spread
from envs.problem import Problem
from envs.simulator import INFEASIBLE_NS
from envs.simulator.bounds import load_bound_ns
from envs.simulator.max_load import max_load_ns
from placer.search.annealing.max_load import minimize_max_load
from placer.search.heuristics import layer_split, single_device
from placer.search.request import Budget, SearchRequest

QUICK_PROFILES: Final = ("alexnet", "resnet18", "vgg16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Budgets of the search and of the proof."""

    search_s: float
    seeds: int
    proof_s: float


def parts(effort: Effort) -> dict[str, Part]:
    """Return a part for each profile."""
    budgets = Budgets(
        search_s=effort.pick(quick=0.2, normal=1.0, full=10.0),
        seeds=effort.seed_count(quick=1, normal=3, full=5),
        proof_s=effort.pick(quick=1.0, normal=6.0, full=60.0),
    )
    names = effort.pick(quick=QUICK_PROFILES, normal=(*profile_names(),), full=(*profile_names(),))
    return {name: partial(profile, name, budgets) for name in names}


def profile(name: str, budgets: Budgets, found: dict[str, Any]) -> Table:
    """Search one profile with all seeds and bound its max-load."""
    problem = profiled(name)
    single = np.array([single_device(problem, d) for d in range(problem.device_count)])
    single_ns = int(max_load_ns(problem, single).min())
    layers_ns = int(max_load_ns(problem, layer_split(problem))[0])
    own_ns = sorted(searched_ns(problem, budgets.search_s, seed) for seed in range(budgets.seeds))
    bound_ns = proven_ns(problem, own_ns[0], budgets.proof_s)
    gap = statistics.median(own_ns) / bound_ns - 1
    found.update(single_ns=single_ns, layers_ns=layers_ns, search_ns=own_ns, bound_ns=bound_ns)
    return Table(
        "Max-load",
        f"ms, search {budgets.search_s:g} s, median and range of {budgets.seeds} seeds",
        ("profile", "ops", "devices", "single", "layers", "search", "bound", "gap"),
        (
            (
                name,
                f"{problem.op_count}",
                f"{problem.device_count}",
                _milliseconds(single_ns),
                _milliseconds(layers_ns),
                spread([ns / 1e6 for ns in own_ns], ".2f"),
                _milliseconds(bound_ns),
                f"{gap:.2%}",
            ),
        ),
    )


def searched_ns(problem: Problem, seconds: float, seed: int) -> int:
    """Return the max-load of the best placement that the search finds."""
    best = minimize_max_load(SearchRequest(problem, Budget(seconds=seconds), seed=seed))[0]
    return int(max_load_ns(problem, best.devices)[0])


def proven_ns(problem: Problem, known_ns: int, proof_s: float) -> int:
    """Return the best lower bound that can be proven within a time limit."""
    bound_ns = load_bound_ns(problem)
    if find_spec("ortools") is None:
        return bound_ns
    from benchmarks.max_load_model import solver_bound_ns

    return max(bound_ns, solver_bound_ns(problem, known_ns, proof_s))


def _milliseconds(ns: int) -> str:
    return f"{ns / 1e6:.2f}" if ns < INFEASIBLE_NS else "no room"
