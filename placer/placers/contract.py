"""Contract tests for placers, for their authors to run, and the small problems they use.

::

    import pytest

    @pytest.mark.parametrize("check", CHECKS)
    def test_my_placer_keeps_the_contract(check):
        check(MyPlacer)

A check takes a factory of the placer (its class, or a function without arguments) and raises an
AssertionError that names the fault and the problem; each problem has one difficulty. Evaluations
are counted in :class:`placer.search.evaluator.Evaluator`, :class:`envs.simulator.Simulator`,
:class:`placer.search.annealing.step_time.Annealing` and
:class:`placer.search.annealing.max_load.MaxLoadAnnealing`. For time budgets the checks replace the
clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, Final, TypeAlias

import networkx as nx
import numpy as np

from envs.hardware.cluster import Cluster, Device, Link, Sharing
from envs.problem import Problem
from envs.simulator import Simulator
from envs.simulator.max_load import max_load_ns
from graphs.graph import GraphArrays, add_edge, add_op, new_graph
from placer.placers.placer import Placer
from placer.search.annealing.max_load import MaxLoadAnnealing
from placer.search.annealing.step_time import Annealing
from placer.search.budget import Budget
from placer.search.candidate import Candidate
from placer.search.compilation import load_compiled_code
from placer.search.evaluator import Evaluator
from placer.search.request import ALL, MAX_LOAD, SearchRequest


@cache
def contract_problems() -> tuple[Problem, ...]:
    """Return problems with one op, one device, no edges, separate parts, pins and groups, ..."""
    mixed = _random("pins and groups", pins=True, groups=True)
    return (
        _problem(_random("one op", ops=1), devices=3),
        _problem(_random("one device", ops=9), devices=1),
        _problem(_random("no edges", degree=0), devices=3),
        _problem(_random("two parts", parts=2), devices=3),
        _problem(_chain("chain"), devices=3),
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


def _chain(name: str) -> nx.DiGraph[str]:
    graph = new_graph(name)
    for i in range(12):
        add_op(
            graph,
            str(i),
            cost_s={"*": 1e-4 * (1 + i % 3)},
            output_bytes=1000 * (1 + i % 5),
            parameter_bytes=100_000,
        )
        if i:
            add_edge(graph, str(i - 1), str(i))
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
    kinds: Sequence[str] = ("fast", "slow") if unequal else ("fast", "fast")
    links = (
        [Link(between=names, latency_s=1e-5, bandwidth_bytes_per_s=1e9, sharing=sharing)]
        if devices > 1
        else []
    )
    cluster = Cluster(
        name="contract",
        devices=tuple(
            Device(name=name, kind=kinds[d % 2], memory_bytes=memory_bytes)
            for d, name in enumerate(names)
        ),
        links=tuple(links),
    )
    return Problem.of(GraphArrays.from_graph(graph), cluster)


Make: TypeAlias = Callable[[], Placer]

EVALUATIONS: Final = 30
TICK_S: Final = 0.05
ALLOWED_FOR_RULES: Final = 24
"""Evaluations on top of the budget: heuristics run in full, and the best are evaluated again."""
LAST_STEP: Final = 64
"""Evaluations that may be under way when the budget ends or a stop is requested."""


def plans_are_whole(make: Make) -> None:
    """Check that every op is on an allowed device, with a priority, and groups share a device."""
    for problem, objective in _cases(make):
        for plan in _placed(make, problem, objective):
            what = f"plan {plan.name!r} for {_told(problem, objective)}"
            count = problem.op_count
            assert plan.devices.shape == plan.priority.shape == (count,), f"{what}: wrong shape"
            assert plan.devices.dtype == np.int32, f"{what}: devices are {plan.devices.dtype}"
            assert np.isfinite(plan.priority).all(), f"{what}: a priority is not finite"
            inside = (plan.devices >= 0) & (plan.devices < problem.device_count)
            assert inside.all(), f"{what}: op {int((~inside).argmax())} has no device"
            may = problem.allowed[np.arange(count), plan.devices]
            assert may.all(), f"{what}: op {int((~may).argmax())} may not run where it is"
            for group in range(int(problem.graph.group.max(initial=-1)) + 1):
                homes = set(plan.devices[problem.graph.group == group].tolist())
                assert len(homes) == 1, f"{what}: group {group} is on devices {homes}"


def steps_are_the_simulators(make: Make) -> None:
    """Check that step times, and infeasibility, match the simulator, and the best comes first."""
    for problem, objective in _cases(make):
        found, simulator = _placed(make, problem, objective), Simulator(problem)
        for plan in found:
            step_ns = int(simulator.step_ns(plan.devices, plan.priority)[0])
            assert plan.step_ns == step_ns, (
                f"plan {plan.name!r} for {_told(problem, objective)} says {plan.step_ns} ns, the "
                f"simulator {step_ns}"
            )
        steps = [plan.step_ns for plan in found]
        assert objective == MAX_LOAD or steps == sorted(steps), (
            f"plans for {_told(problem, objective)} are not the best first"
        )


def same_seed_same_plans(make: Make) -> None:
    """Check that with a budget of evaluations the seed determines the candidates exactly."""
    for problem, objective in _cases(make):
        first, again = (
            [(p.name, p.step_ns, p.devices.tobytes(), p.priority.tobytes()) for p in plans]
            for plans in (_placed(make, problem, objective, seed=3) for _ in range(2))
        )
        assert first == again, f"two runs for {_told(problem, objective)} with seed 3 differ"


def evaluations_are_kept(make: Make) -> None:
    """Check that evaluations stay within the budget plus ``ALLOWED_FOR_RULES``."""
    for problem, objective in _cases(make):
        with _counting() as count:
            _placed(make, problem, objective)
        allowed = EVALUATIONS + ALLOWED_FOR_RULES
        assert count.evaluations <= allowed, (
            f"{count.evaluations} evaluations for {_told(problem, objective)}, {allowed} are "
            "allowed"
        )


def seconds_are_kept(make: Make) -> None:
    """Check that at most one step is finished after the time is over."""
    for problem, objective in _cases(make):
        placer = make()
        with _counting(over_after_s=20 * TICK_S) as count:
            budget = Budget(seconds=20 * TICK_S)
            found = placer.place(SearchRequest(problem, budget, objective=objective))
        assert found, f"no plan for {_told(problem, objective)}"
        late = count.evaluations - count.when_over
        allowed = LAST_STEP + ALLOWED_FOR_RULES
        assert late <= allowed, f"{late} evaluations for {_told(problem, objective)} after the end"


def a_stop_is_heard(make: Make) -> None:
    """Check that a placer that is asked to stop, at once or later, returns its best so far."""
    for problem, objective in _cases(make):
        for patience in (0, 3):
            with _counting() as count:
                asked = _Asked(patience, count)
                budget = Budget(evaluations=10**9)
                request = SearchRequest(problem, budget, objective=objective, should_stop=asked)
                found = make().place(request)
            assert found, f"no plan for {_told(problem, objective)}"
            late = count.evaluations - asked.when_said
            assert not asked.said or late <= LAST_STEP + ALLOWED_FOR_RULES, (
                f"{late} evaluations for {_told(problem, objective)} after a stop was asked for"
            )


def small_budgets_give_plans(make: Make) -> None:
    """Check that one evaluation suffices for a candidate, and progress is a share in 0 .. 1."""
    for problem, objective in _cases(make):
        told: list[float] = []

        def hear(share: float, _: str, told: list[float] = told) -> None:
            told.append(share)

        budget = Budget(evaluations=1)
        request = SearchRequest(problem, budget, objective=objective, progress=hear)
        found = make().place(request)
        assert found, f"no plan for {_told(problem, objective)}"
        assert all(0.0 <= share <= 1.0 for share in told), f"progress is {told}"


def objectives_are_served(make: Make) -> None:
    """Check that there are candidates for every objective of the placer, best first."""
    placer = make()
    assert placer.objectives, "it names no objective"
    for objective in placer.objectives:
        assert objective in ALL, f"{objective!r} is none of {', '.join(ALL)}"
        for problem in contract_problems():
            request = SearchRequest(problem, Budget(evaluations=1), objective=objective)
            found = placer.place(request)
            assert found, f"no plan for {problem.graph.name!r} under {objective}"
            if objective == MAX_LOAD:
                loads = max_load_ns(problem, np.array([plan.devices for plan in found])).tolist()
                assert loads == sorted(loads), (
                    f"{problem.graph.name!r}: not the smallest load first"
                )


CHECKS: Final[Sequence[Callable[[Make], None]]] = (
    plans_are_whole,
    steps_are_the_simulators,
    same_seed_same_plans,
    evaluations_are_kept,
    seconds_are_kept,
    a_stop_is_heard,
    small_budgets_give_plans,
    objectives_are_served,
)


def _cases(make: Make) -> Iterator[tuple[Problem, str]]:
    return product(contract_problems(), make().objectives)


def _told(problem: Problem, objective: str) -> str:
    return f"{problem.graph.name!r} under {objective}"


def _placed(make: Make, problem: Problem, objective: str, seed: int = 0) -> list[Candidate]:
    budget = Budget(evaluations=EVALUATIONS)
    found = make().place(SearchRequest(problem, budget, seed=seed, objective=objective))
    assert found, f"no plan for {_told(problem, objective)}"
    return found


@dataclass(slots=True)
class _Count:
    """Replaced clock and number of evaluations, also at the time when the budget ended."""

    now_s: float
    evaluations: int = 0
    when_over: int = 0


class _Asked:
    """Returns True from some call on, and stores the number of evaluations at that time."""

    def __init__(self, patience: int, count: _Count) -> None:
        self.patience = patience
        self.count = count
        self.said = False
        self.when_said = 0

    def __call__(self) -> bool:
        self.patience -= 1
        if self.patience < 0 and not self.said:
            self.said, self.when_said = True, self.count.evaluations
        return self.said


@contextmanager
def _counting(over_after_s: float | None = None) -> Iterator[_Count]:
    """Count evaluations; with ``over_after_s`` each look at the clock advances it by a tick."""
    load_compiled_code()
    count = _Count(now_s=time.perf_counter())  # meters may have looked at the real clock
    end_s = count.now_s + (over_after_s or np.inf)

    def counted(of: type, name: str, size: Callable[..., int]) -> tuple[Any, str, Any]:
        original = getattr(of, name)

        def wrapper(self: object, *args: Any, **named: Any) -> Any:
            count.evaluations += size(*args)
            return original(self, *args, **named)

        return of, name, wrapper

    def clock() -> float:
        count.now_s += TICK_S
        if count.now_s <= end_s:
            count.when_over = count.evaluations
        return count.now_s

    patches: list[tuple[Any, str, Any]] = [
        counted(Evaluator, "costs", lambda devices, *_: len(devices)),
        counted(Simulator, "step_ns", lambda devices, *_: len(np.atleast_2d(devices))),
        counted(Simulator, "run", lambda *_: 1),
        counted(Annealing, "run", lambda steps, *_: steps),
        counted(MaxLoadAnnealing, "run", lambda steps, *_: steps),
    ]
    if over_after_s is not None:
        patches.append((time, "perf_counter", clock))
    before = [getattr(of, name) for of, name, _ in patches]
    try:
        for of, name, patch in patches:
            setattr(of, name, patch)
        yield count
    finally:
        for (of, name, _), original in zip(patches, before, strict=True):
            setattr(of, name, original)
