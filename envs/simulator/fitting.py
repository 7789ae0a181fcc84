"""Problems with op costs fitted to measured steps, see :mod:`envs.costs.factors`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from envs.costs.factors import (
    CLASSES,
    LAUNCH,
    LOAD,
    Factors,
    class_of,
    factors_of_ops,
    fit,
    scaled_loaded_s,
)
from envs.placement import Placement
from envs.problem import Problem
from envs.simulator.kernel.arrays import INFEASIBLE_NS
from envs.simulator.schedule import Schedule
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

    The factor of a class acts on the time that its ops take on the critical path of each step, that
    of the load on what part of it other devices compute, that of launches on the time in which the
    path waits for these. Kinds of devices on no such path get none.
    """
    kinds = sorted({device.kind for device in problem.cluster.devices})
    classes = [(kind, name) for kind in kinds for name in CLASSES]
    if problem.load is not None:
        classes += [(kind, LOAD) for kind in kinds]
    if has_launches := problem.hosts is not None and bool(problem.graph.launch_s):
        classes += [(kind, LAUNCH) for kind in kinds]
    independent = [kind if name in CLASSES else f"{kind}, {name}" for kind, name in classes]
    columns = _columns(problem, classes)
    kind_of = np.array([kinds.index(device.kind) for device in problem.cluster.devices])
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
            if current.load is not None:
                under_load_ns = _under_load_ns(current, schedule)[chain]
                of_kind = len(kinds) * len(CLASSES) + kind_of[where]
                of_class += np.bincount(of_kind, under_load_ns, len(classes))
            if has_launches:
                of_kind = len(classes) - len(kinds) + kind_of
                of_class += np.bincount(of_kind, _launching_ns(current, schedule), len(classes))
            whole_ns = schedule.step_ns + problem.graph.hand_over_s * 1e9
            if not (whole_ns and step_s):  # a step without time says nothing of factors
                continue
            shares.append(of_class / whole_ns)
            error.append(np.log(step_s * 1e9 / whole_ns))
        if not shares:
            return {}
        used |= np.any(shares, axis=0)
        before = log_factors
        log_factors = fit(np.array(shares), np.array(error), independent, before)
        if np.abs(log_factors - before).max() < SETTLED:
            break
    used_kinds = {kind for (kind, _), is_used in zip(classes, used, strict=True) if is_used}
    return {
        kind: of_kind
        for kind, of_kind in _by_kind(classes, np.exp(log_factors)).items()
        if kind in used_kinds
    }


def load_shares(problem: Problem, schedule: Schedule) -> NDArray[np.float64]:
    """Return the share of the other devices of its machine that compute when an op starts, (N,)."""
    load, start_ns = problem.load, schedule.start_ns
    shares = np.zeros(problem.op_count)
    if load is None:
        return shares
    machine = load.machine[schedule.devices]
    for d, own_machine in enumerate(load.machine.tolist()):
        own = np.flatnonzero(schedule.devices == d)
        own = own[np.argsort(start_ns[own], kind="stable")]
        if own_machine < 0 or not len(own):
            continue
        last = np.searchsorted(start_ns[own], start_ns, "right") - 1
        runs = (last >= 0) & (schedule.end_ns[own[np.maximum(last, 0)]] > start_ns)
        others = (machine == own_machine) & (schedule.devices != d)
        shares += (runs & others) / (np.count_nonzero(load.machine == own_machine) - 1)
    return shares


def scaled_problem(problem: Problem, factors: Factors) -> Problem:
    """Return the problem with costs multiplied by the factors of kinds and classes of ops."""
    graph = problem.graph
    classes = [class_of(op) for op in graph.ops]
    cost_s, loaded_s = dict(graph.cost_s), dict(graph.loaded_cost_s)
    launch_s = dict(graph.launch_s)
    for kind, of_kind in factors.items():
        of_ops = factors_of_ops(classes, of_kind)
        if graph.launch_s:
            launch_s[kind] = frozen(graph.launches_for(kind) * of_kind.get(LAUNCH, 1.0))
        cost_s[kind] = frozen(graph.costs_for(kind) * of_ops)
        if graph.loaded_cost_s:
            scaled_s = graph.loaded_costs_for(kind) * of_ops
            loaded_s[kind] = frozen(scaled_loaded_s(scaled_s, cost_s[kind], of_kind))
    scaled = replace(graph, cost_s=cost_s, loaded_cost_s=loaded_s, launch_s=launch_s)
    return Problem.of(scaled, problem.cluster)


def grouped_problem(groups: Coarsened, problem: Problem) -> Problem:
    """Return the problem of placing groups of ops, with a problem's costs for these ops."""
    coarse, ops = GraphArrays.from_graph(groups.graph), problem.graph

    def summed(known: NDArray[np.float64], own: NDArray[np.float64]) -> NDArray[np.float64]:
        sums = np.bincount(groups.group_of, own, len(coarse))
        changed = (known > 0) & ~np.isclose(sums, known, rtol=1e-9, atol=0.0)
        return frozen(np.where(changed, sums, known))

    cost_s, loaded_s = dict(coarse.cost_s), dict(coarse.loaded_cost_s)
    launch_s = dict(coarse.launch_s)
    for kind in {device.kind for device in problem.cluster.devices}:
        alone_s = ops.costs_for(kind)
        cost_s[kind] = summed(coarse.costs_for(kind), alone_s)
        if coarse.loaded_cost_s:
            beside_s = ops.loaded_costs_for(kind)
            beside_s = np.where(np.isnan(beside_s), alone_s, beside_s)
            loaded_s[kind] = summed(coarse.loaded_costs_for(kind), beside_s)
        if coarse.launch_s:
            launch_s[kind] = summed(coarse.launches_for(kind), ops.launches_for(kind))
    summed_up = replace(coarse, cost_s=cost_s, loaded_cost_s=loaded_s, launch_s=launch_s)
    return Problem.of(summed_up, problem.cluster)


def _under_load_ns(problem: Problem, schedule: Schedule) -> NDArray[np.float64]:
    """Return the time of every op, (N,), that grows with the factor of the load."""
    assert problem.load is not None, "the problem has loaded costs"
    ops, where = np.arange(problem.op_count), schedule.devices
    loaded_ns = problem.cost_ns[ops, where] + problem.load.extra_ns[ops, where]
    return load_shares(problem, schedule) * loaded_ns


def _launching_ns(problem: Problem, schedule: Schedule) -> NDArray[np.float64]:
    """Return the time that launches for each device take on the critical path, (D,).

    They fill the path between two ops if the first is not one that the second reads on another
    device: then a copy does.
    """
    hosts, issued, devices = problem.hosts, schedule.issued, schedule.devices
    assert hosts is not None, "launches occupy the threads of hosts"
    assert issued is not None, "hosts issue ops in an order"
    position = np.argsort(issued)
    launch_ns = hosts.op_launch_ns[np.arange(problem.op_count), devices]
    graph, found = problem.graph, np.zeros(problem.device_count)
    first, since_ns, before = 0, 0, -1
    for i in schedule.critical_chain():
        waits_ns = int(schedule.start_ns[i]) - since_ns
        read = graph.predecessors[graph.predecessor_start[i] : graph.predecessor_start[i + 1]]
        is_copied = before in read and devices[before] != devices[i]
        if waits_ns > 0 and not is_copied:
            between = issued[first : position[i] + 1]
            own = between[hosts.thread[devices[between]] == hosts.thread[devices[i]]]
            by_device = np.bincount(devices[own], launch_ns[own], len(found))
            found += by_device * min(1.0, waits_ns / max(by_device.sum(), 1.0))
        first, since_ns, before = int(position[i]) + 1, int(schedule.end_ns[i]), i
    return found


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
