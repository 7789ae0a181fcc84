"""Contract tests for placers, for their authors to run, and the small problems they use.

::

    import pytest

    @pytest.mark.parametrize("check", CHECKS)
    def test_my_placer_keeps_the_contract(check):
        check(MyPlacer)

A check takes a factory of the placer (its class, or a function without arguments) and raises an
AssertionError that names the fault and the problem; each problem has one difficulty. Evaluations
are those that :attr:`placer.search.evaluator.Evaluator.evaluations` counts. For budgets in seconds
a request brings its own clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any, Final, TypeAlias

import networkx as nx
import numpy as np

from envs.hardware.cluster import Cluster, Device, Link, Sharing
from envs.placement import OBJECTIVES
from envs.problem import Problem
from envs.simulator import Simulator
from envs.simulator.max_load import max_load_ns
from graphs.graph import GraphArrays, add_edge, add_op, new_graph
from placer.search.candidate import Candidate
from placer.search.compilation import load_compiled_code
from placer.search.evaluator import Evaluator
from placer.search.request import MAX_LOAD, Budget, Placer, SearchRequest

Make: TypeAlias = Callable[[], Placer]

EVALUATIONS: Final = 30
BUDGET: Final = Budget(evaluations=EVALUATIONS)
SECONDS: Final = 1.0
TICK_S: Final = 0.05
ALLOWED_FOR_RULES: Final = 24
"""Evaluations on top of the budget: heuristics run in full, and the best are evaluated again."""
LAST_STEP: Final = 64
"""Evaluations that may be under way when the budget ends or a stop is requested."""


@cache
def contract_problems() -> tuple[Problem, ...]:
    """Return problems with one op, one device, no edges, separate parts, pins and groups, ..."""
    mixed = _random("pins and groups", pins=True, groups=True)
    return (
        _problem(_random("one op", ops=1), devices=3),
        _problem(_random("one device", ops=9), devices=1),
        _problem(_random("no edges", degree=0), devices=3),
        _problem(_random("two parts", parts=2), devices=3),
        _problem(mixed, devices=3),
        _problem(mixed, devices=3, unequal=True, sharing="bus"),
        _problem(_random("short of memory"), devices=3, memory_bytes=6_000_000),
        _problem(_random("fits nowhere"), devices=2, memory_bytes=1_000),
        _problem(_random("free"), devices=4, sharing="none", unequal=True),
    )


def _random(
    name: str,
    *,
    ops: int = 14,
    degree: int = 2,
    parts: int = 1,
    pins: bool = False,
    groups: bool = False,
) -> nx.DiGraph[str]:
    """Return ops that read some of the ops before them, in parts without edges between them."""
    rng = np.random.default_rng(len(name))
    graph = new_graph(name)
    for i in range(ops):
        limited = pins and i % 4 == 1
        add_op(
            graph,
            str(i),
            cost_s={"fast": float(rng.uniform(1e-4, 1e-3)), "slow": float(rng.uniform(1e-3, 2e-3))},
            output_bytes=int(rng.integers(1, 500_000)),
            parameter_bytes=int(rng.integers(1, 1_000_000)),
            colocate=f"group {i % 2}" if groups and i % 3 == 2 else None,
            devices=("device:1", "device:2") if limited else None,
        )
        before = np.arange(i % parts, i, parts)[-4:]
        for source in sorted(set(rng.choice(before, degree).tolist())) if len(before) else ():
            add_edge(graph, str(source), str(i))
    return graph


def _problem(
    graph: nx.DiGraph[str],
    *,
    devices: int,
    unequal: bool = False,
    memory_bytes: int = 10**12,
    sharing: Sharing = "egress",
) -> Problem:
    names = tuple(f"device:{d}" for d in range(devices))
    links = (
        (Link(between=names, latency_s=1e-5, bandwidth_bytes_per_s=1e9, sharing=sharing),)
        if devices > 1
        else ()
    )
    cluster = Cluster(
        name="contract",
        devices=tuple(
            Device(
                name=name, kind="slow" if unequal and d % 2 else "fast", memory_bytes=memory_bytes
            )
            for d, name in enumerate(names)
        ),
        links=links,
    )
    return Problem.of(GraphArrays.from_graph(graph), cluster)


def placements_are_complete(make: Make) -> None:
    """Check that every op is on an allowed device, with a priority, and groups share a device."""
    for problem, objective in _cases(make):
        for candidate in _place(make, problem, objective):
            what = f"candidate {candidate.name!r} for {_name(problem, objective)}"
            devices, priority, count = candidate.devices, candidate.priority, problem.op_count
            assert devices.shape == priority.shape == (count,), f"{what}: wrong shape"
            assert devices.dtype == np.int32, f"{what}: devices are {devices.dtype}"
            assert np.isfinite(priority).all(), f"{what}: a priority is not finite"
            inside = (devices >= 0) & (devices < problem.device_count)
            assert inside.all(), f"{what}: op {int((~inside).argmax())} has no device"
            allowed = problem.allowed[np.arange(count), devices]
            assert allowed.all(), f"{what}: op {int((~allowed).argmax())} is not allowed there"
            for group in range(int(problem.graph.group.max(initial=-1)) + 1):
                used = set(devices[problem.graph.group == group].tolist())
                assert len(used) == 1, f"{what}: group {group} is on devices {used}"


def steps_are_simulated(make: Make) -> None:
    """Check that step times, and infeasibility, match the simulator, and the best comes first."""
    for problem, objective in _cases(make):
        candidates, simulator = _place(make, problem, objective), Simulator(problem)
        steps = [candidate.step_ns for candidate in candidates]
        simulated = [int(simulator.step_ns(c.devices, c.priority)[0]) for c in candidates]
        assert steps == simulated, (
            f"steps for {_name(problem, objective)} are {steps}, those of the simulator {simulated}"
        )
        costs = steps
        if objective == MAX_LOAD:
            costs = max_load_ns(problem, np.array([c.devices for c in candidates])).tolist()
        assert costs == sorted(costs), f"{_name(problem, objective)}: the best is not the first"


def seed_determines_candidates(make: Make) -> None:
    """Check that with a budget of evaluations the seed determines the candidates exactly."""
    for problem, objective in _cases(make):
        first, again = (
            [(c.name, c.step_ns, c.devices.tobytes(), c.priority.tobytes()) for c in candidates]
            for candidates in (_place(make, problem, objective, seed=3) for _ in range(2))
        )
        assert first == again, f"two runs for {_name(problem, objective)} with seed 3 differ"


def evaluations_are_limited(make: Make) -> None:
    """Check that evaluations stay within the budget plus ``ALLOWED_FOR_RULES``."""
    for problem, objective in _cases(make):
        before = Evaluator.evaluations
        _place(make, problem, objective)
        count, allowed = Evaluator.evaluations - before, EVALUATIONS + ALLOWED_FOR_RULES
        assert count <= allowed, (
            f"{count} evaluations for {_name(problem, objective)}, {allowed} are allowed"
        )


def time_is_limited(make: Make) -> None:
    """Check that at most one step is finished after the time is over."""
    load_compiled_code()
    for problem, objective in _cases(make):
        now_s, at_end = 0.0, Evaluator.evaluations

        def clock() -> float:
            nonlocal now_s, at_end
            now_s += TICK_S
            if now_s <= SECONDS:
                at_end = Evaluator.evaluations
            return now_s

        _place(make, problem, objective, Budget(seconds=SECONDS), clock=clock)
        late = Evaluator.evaluations - at_end
        assert late <= LAST_STEP + ALLOWED_FOR_RULES, (
            f"{late} evaluations for {_name(problem, objective)} after the end"
        )


def stops_are_obeyed(make: Make) -> None:
    """Check that a placer that is asked to stop, at once or later, returns its best so far."""
    for (problem, objective), patience in product(_cases(make), (0, 3)):
        polls, at_stop = 0, Evaluator.evaluations

        def should_stop(patience: int = patience) -> bool:
            nonlocal polls, at_stop
            polls += 1
            if polls <= patience + 1:
                at_stop = Evaluator.evaluations
            return polls > patience

        _place(make, problem, objective, Budget(evaluations=10**9), should_stop=should_stop)
        late = Evaluator.evaluations - at_stop
        assert polls <= patience or late <= LAST_STEP + ALLOWED_FOR_RULES, (
            f"{late} evaluations for {_name(problem, objective)} after a stop was asked for"
        )


def one_evaluation_suffices(make: Make) -> None:
    """Check the objectives, and that one evaluation suffices; progress is a share in 0 .. 1."""
    objectives = make().objectives
    assert objectives, "it names no objective"
    assert set(objectives) <= set(OBJECTIVES), f"{objectives} are not of {', '.join(OBJECTIVES)}"
    shares: list[float] = []

    def progress(share: float, _: str) -> None:
        shares.append(share)

    for problem, objective in _cases(make):
        _place(make, problem, objective, Budget(evaluations=1), progress=progress)
    assert all(0.0 <= share <= 1.0 for share in shares), f"progress is {shares}"


CHECKS: Final[Sequence[Callable[[Make], None]]] = (
    placements_are_complete,
    steps_are_simulated,
    seed_determines_candidates,
    evaluations_are_limited,
    time_is_limited,
    stops_are_obeyed,
    one_evaluation_suffices,
)


def _cases(make: Make) -> Iterator[tuple[Problem, str]]:
    return product(contract_problems(), make().objectives)


def _name(problem: Problem, objective: str) -> str:
    return f"{problem.graph.name!r} under {objective}"


def _place(
    make: Make, problem: Problem, objective: str, budget: Budget = BUDGET, **options: Any
) -> list[Candidate]:
    candidates = make().place(SearchRequest(problem, budget, objective=objective, **options))
    assert candidates, f"no candidate for {_name(problem, objective)}"
    return candidates
