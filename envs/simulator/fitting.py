"""Problems with op costs fitted to measured steps, see :mod:`envs.costs.factors`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from envs.costs.factors import CLASSES, class_of, factors_of_ops, fit
from envs.placement import Placement
from envs.problem import Problem
from envs.simulator.kernel.arrays import INFEASIBLE_NS
from envs.simulator.simulated import Simulator
from graphs.coarsen.groups import Coarsened
from graphs.graph import GraphArrays, frozen

MOST_FITS: Final = 6
"""Other factors may put other ops on the critical path, so the fit is repeated."""
SETTLED: Final = 1e-3


def fitted_factors(
    problem: Problem, placements: Sequence[Placement], measured_s: Sequence[float]
) -> dict[str, dict[str, float]]:
    """Return the factors of a problem's costs that explain the measured steps of placements best.

    The factor of a class acts on the time that its ops take on the critical path of each step.
    Kinds of devices on no such path get none.
    """
    kinds = sorted({device.kind for device in problem.cluster.devices})
    classes = [(kind, name) for kind in kinds for name in CLASSES]
    columns = _columns(problem, classes)
    launch_ns = np.array([device.launch_s * 1e9 for device in problem.cluster.devices])
    if problem.hosts is not None:
        launch_ns = np.where(problem.hosts.synchronous, launch_ns, 0.0)
    log_factors = np.zeros(len(classes))
    used = np.zeros(len(classes), np.bool_)
    for _ in range(MOST_FITS):
        current = scaled_problem(problem, _by_kind(classes, np.exp(log_factors)))
        simulator = Simulator(current, memory=False)
        shares, error = [], []
        for placement, step_s in zip(placements, measured_s, strict=True):
            schedule = simulator.run(*placement.arrays(), transfers=False)
            if schedule.step_ns == INFEASIBLE_NS:
                continue
            chain = schedule.critical_chain()
            where = schedule.devices[chain]
            on_path_ns = (schedule.end_ns - schedule.start_ns)[chain] - launch_ns[where]
            path = columns[chain, where]
            of_class = np.bincount(path, np.maximum(on_path_ns, 0.0), len(classes))
            whole_ns = schedule.step_ns + problem.graph.hand_over_s * 1e9
            shares.append(of_class / whole_ns)
            error.append(np.log(step_s * 1e9 / whole_ns))
        if not shares:
            return {}
        used |= np.any(shares, axis=0)
        before = log_factors
        log_factors = fit(np.array(shares), np.array(error), [kind for kind, _ in classes], before)
        if np.abs(log_factors - before).max() < SETTLED:
            break
    used_kinds = {kind for (kind, _), is_used in zip(classes, used, strict=True) if is_used}
    return {
        kind: of_kind
        for kind, of_kind in _by_kind(classes, np.exp(log_factors)).items()
        if kind in used_kinds
    }


def scaled_problem(problem: Problem, factors: Mapping[str, Mapping[str, float]]) -> Problem:
    """Return the problem with costs multiplied by the factors of kinds and classes of ops."""
    classes = [class_of(op) for op in problem.graph.ops]
    of_ops = {kind: factors_of_ops(classes, of_kind) for kind, of_kind in factors.items()}
    return Problem.of(_scaled(problem.graph, of_ops), problem.cluster)


def grouped_problem(groups: Coarsened, problem: Problem) -> Problem:
    """Return the problem of placing groups of ops, with a problem's costs for these ops."""
    coarse, ops = GraphArrays.from_graph(groups.graph), problem.graph
    ratios = {}
    for kind in {device.kind for device in problem.cluster.devices}:
        sums = np.bincount(groups.group_of, ops.costs_for(kind), len(coarse))
        known = coarse.costs_for(kind)
        changed = (known > 0) & ~np.isclose(sums, known, rtol=1e-9, atol=0.0)
        ratios[kind] = np.divide(sums, known, out=np.ones(len(coarse)), where=changed)
    return Problem.of(_scaled(coarse, ratios), problem.cluster)


def _scaled(graph: GraphArrays, factors: Mapping[str, NDArray[np.float64]]) -> GraphArrays:
    """Return a graph with the costs on some kinds multiplied by the factors of its ops."""
    scaled = {kind: frozen(graph.costs_for(kind) * factors[kind]) for kind in factors}
    loaded = {kind: frozen(graph.loaded_costs_for(kind) * factors[kind]) for kind in factors}
    return replace(
        graph,
        cost_s={**graph.cost_s, **scaled},
        loaded_cost_s={**graph.loaded_cost_s, **loaded} if graph.loaded_cost_s else {},
    )


def _columns(problem: Problem, classes: list[tuple[str, str]]) -> NDArray[np.int64]:
    """Return the index in ``classes`` of every op on every device, (N, D)."""
    number = {key: i for i, key in enumerate(classes)}
    names = [class_of(op) for op in problem.graph.ops]
    return np.array(
        [[number[device.kind, name] for device in problem.cluster.devices] for name in names]
    )


def _by_kind(
    classes: list[tuple[str, str]], factors: NDArray[np.float64]
) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for (kind, name), factor in zip(classes, factors.tolist(), strict=True):
        found.setdefault(kind, {})[name] = factor
    return found
