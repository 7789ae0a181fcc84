"""The max-load objective as a CP-SAT model, whose bound is valid whatever the search finds."""

from __future__ import annotations

import numpy as np
from ortools.sat.python import cp_model

from envs.problem import Problem
from envs.simulator.max_load import least_send_ns, load_arrays


def solver_bound_ns(problem: Problem, known_ns: int, limit_s: float) -> int:
    """Return a lower bound on the max-load of all placements on equal devices, with one thread.

    Variables for each op and device: whether the op runs there, whether its output is received
    there, and whether it is sent from there. The most expensive op is fixed to the first device,
    which loses nothing because the devices are equal.
    """
    graph, devices = problem.graph, range(problem.device_count)
    arrays = load_arrays(problem)
    if (arrays.cost_ns != arrays.cost_ns[:, :1]).any() or not arrays.pays.all():
        raise ValueError(f"the devices of {problem.cluster.name!r} are not equal")
    model, send_ns = cp_model.CpModel(), least_send_ns(problem).tolist()
    runs = [[model.new_bool_var("") for _ in devices] for _ in range(problem.op_count)]
    largest_ns = model.new_int_var(0, known_ns, "largest load")
    load: list[list[cp_model.LinearExprT]] = [[] for _ in devices]
    for i, row in enumerate(runs):
        model.add_exactly_one(row)
        cost_ns = int(problem.cost_ns[i, 0])
        for d in devices:
            load[d].append(cost_ns * row[d])
        readers = graph.successors[graph.successor_start[i] : graph.successor_start[i + 1]].tolist()
        sent = [model.new_bool_var("") for _ in devices if readers]
        received = [model.new_bool_var("") for _ in devices if readers]
        for d in devices if readers else ():
            load[d] += [send_ns[i] * sent[d], send_ns[i] * received[d]]
            for v in readers:
                model.add_bool_or(received[d], row[d], ~runs[v][d])
                model.add_bool_or(sent[d], ~row[d], runs[v][d])
        if readers:
            model.add(sum(received) >= sum(sent))
    for d in devices:
        model.add(sum(load[d]) <= largest_ns)
        used = sum(int(size) * row[d] for size, row in zip(arrays.size_bytes, runs, strict=True))
        model.add(used <= int(arrays.memory_bytes[d]))
    model.add(sum(term for terms in load for term in terms) <= len(devices) * largest_ns)
    model.add(runs[int(np.argmax(problem.cost_ns[:, 0]))][0] == 1)
    model.minimize(largest_ns)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = 1
    solver.parameters.catch_sigint_signal = False  # the next Ctrl-C would end the process
    solver.solve(model)
    return min(int(np.ceil(solver.best_objective_bound)), known_ns)
