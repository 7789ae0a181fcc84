"""Random layered problems, with or without co-location groups, pins and unequal devices."""

from __future__ import annotations

from itertools import permutations, product

import numpy as np

from envs.hardware.cluster import Cluster, Device, Link, LinkOrder, Sharing
from envs.problem import Problem
from graphs.graph import GraphArrays, add_edge, add_op, new_graph
from placer.search.evaluator import Evaluator


def random_problem(
    seed: int,
    *,
    ops: int = 30,
    devices: int = 3,
    groups: bool = False,
    pins: bool = False,
    unequal: bool = False,
    sharing: Sharing = "egress",
    order: LinkOrder = "fifo",
    memory_bytes: int = 10**12,
) -> Problem:
    """Return a random layered graph; groups colocate some ops, pins restrict some devices."""
    rng = np.random.default_rng(seed)
    graph = new_graph(f"random-{seed}")
    names = tuple(f"device:{d}" for d in range(devices))
    for i in range(ops):
        cost = 1e-4 * float(rng.lognormal(0.0, 0.6))
        add_op(
            graph,
            f"op{i}",
            cost_s={"fast": cost, "slow": cost * float(rng.uniform(1.0, 4.0))},
            output_bytes=int(5e5 * rng.lognormal(0.0, 0.6)),
            parameter_bytes=int(1e6 * rng.lognormal(0.0, 0.6)),
            colocate=f"group{rng.integers(3)}" if groups and rng.random() < 0.3 else None,
            devices=names[int(rng.integers(devices)) :] if pins and rng.random() < 0.3 else None,
        )
    for i in range(1, ops):
        for source in set(rng.integers(max(0, i - 8), i, 2).tolist()):
            add_edge(graph, f"op{source}", f"op{i}")
    cluster = Cluster(
        name="random",
        devices=tuple(
            Device(
                name=name,
                kind="slow" if unequal and d % 2 else "fast",
                memory_bytes=memory_bytes,
            )
            for d, name in enumerate(names)
        ),
        links=(
            Link(
                between=names,
                latency_s=1e-5,
                bandwidth_bytes_per_s=1e10,
                sharing=sharing,
                order=order,
            ),
        )
        if devices > 1
        else (),
    )
    return Problem.of(GraphArrays.from_graph(graph), cluster)


def every_placement(problem: Problem) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    """Return all placements (B, N) that keep groups together."""
    every = np.array(list(product(range(problem.device_count), repeat=problem.op_count)), np.int32)
    group = problem.graph.group
    kept = np.ones(len(every), np.bool_)
    for g in range(int(group.max(initial=-1)) + 1):
        members = every[:, group == g]
        kept &= (members == members[:, :1]).all(axis=1)
    return every[kept]


def best_step_ns(problem: Problem) -> int:
    """Return the shortest step over all placements and all orders of a tiny problem."""
    evaluator = Evaluator(problem)
    orders = np.array(list(permutations(range(problem.op_count))), np.float64)
    return min(
        int(evaluator.costs(np.tile(devices, (len(orders), 1)), orders).min())
        for devices in every_placement(problem)
        if keeps_limits(problem, devices)
    )


def keeps_groups(
    problem: Problem, devices: np.ndarray[tuple[int, ...], np.dtype[np.int32]]
) -> bool:
    """Return whether all members of every group are on one device."""
    group = problem.graph.group
    return all(len(set(devices[group == g].tolist())) == 1 for g in set(group[group >= 0].tolist()))


def keeps_limits(
    problem: Problem, devices: np.ndarray[tuple[int, ...], np.dtype[np.int32]]
) -> bool:
    """Return whether every op is on a device that is allowed for it."""
    return bool(problem.allowed[np.arange(problem.op_count), devices].all())
