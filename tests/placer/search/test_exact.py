from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import placer
from envs.hardware.cluster import Sharing, cluster_to_toml
from envs.problem import Problem
from envs.simulator.reasons import memory_shortfall
from tests.helpers.random_problems import best_step_ns, random_problem

pytest.importorskip("ortools")

from envs.simulator import OVERFULL_NS
from graphs.graph_file import save_graph
from graphs.synthetic.shapes import layered
from placer.choose import PlacementError
from placer.cli.main import main
from placer.job import SearchConfig
from placer.pipeline import optimize_problem
from placer.search import exact
from placer.search.candidate import Candidate
from placer.search.exact import LARGEST
from placer.search.registry import placer_named
from placer.search.request import Budget, SearchRequest


def solved(problem: Problem, evaluations: int = 3000) -> Candidate:
    """Return the candidate of the exact search."""
    request = SearchRequest(problem, Budget(evaluations=evaluations))
    [found] = placer_named("exact").place(request)
    return found


@pytest.mark.parametrize("seed", [0, 3, 4])
@pytest.mark.parametrize("sharing", ["none", "egress", "bus"])
def test_it_is_the_best_of_all_plans_of_a_tiny_graph(seed: int, sharing: Sharing) -> None:
    problem = random_problem(
        seed,
        ops=5,
        devices=2,
        unequal=seed % 2 == 1,
        groups=seed > 2,
        pins=seed == 4,
        sharing=sharing,
    )
    found = solved(problem)
    assert found.step_ns == found.bound_ns == best_step_ns(problem)


def test_all_rounds_together_keep_to_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    solvers: list[Any] = []

    def noted(*arguments: Any) -> Any:
        solvers.append(make(*arguments))
        return solvers[-1]

    make = exact._solver
    monkeypatch.setattr(exact, "_solver", noted)
    evaluations = 200
    solved(random_problem(0, ops=30), evaluations)
    used_s = sum(solver.response_proto.deterministic_time for solver in solvers)
    assert solvers
    assert used_s <= 1.2 * evaluations * exact.DETERMINISTIC_S  # the solver looks now and then


def test_a_graph_with_too_many_ops_is_refused_in_a_sentence() -> None:
    problem = random_problem(0, ops=LARGEST + 1)
    with pytest.raises(ValueError, match=r"has 81 ops.*merge them into 80 groups"):
        placer_named("exact").place(SearchRequest(problem, Budget(evaluations=10)))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("share", [0.75, 1.1, 10.0])
def test_no_plan_of_a_tiny_graph_is_below_the_bound_with_activations_or_without(
    seed: int, share: float
) -> None:
    resident = int(random_problem(seed, ops=5).graph.resident_bytes.sum())
    problem = random_problem(seed, ops=5, devices=2, memory_bytes=int(share * resident))
    found = solved(problem, 300)
    best_ns = best_step_ns(problem)
    assert found.bound_ns is not None
    assert found.bound_ns <= best_ns if best_ns < OVERFULL_NS else found.bound_ns > 0


@pytest.mark.slow_repeats
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("sharing", ["egress", "bus"])
def test_the_bound_of_a_solver_that_was_stopped_holds(seed: int, sharing: Sharing) -> None:
    problem = random_problem(seed, ops=18, devices=3, unequal=True, sharing=sharing)
    found = solved(problem, 60)
    annealed = placer_named("annealing").place(
        SearchRequest(problem, Budget(evaluations=8000), seed=seed)
    )
    assert found.bound_ns is not None
    assert found.bound_ns <= annealed[0].step_ns


def test_that_parameters_fit_nowhere_is_proven() -> None:
    problem = random_problem(0, ops=9, devices=2)
    size = np.sort(problem.graph.resident_bytes)
    room = int(size.sum()) // 2 + 1  # enough in total, but no half has exactly this size
    tight = random_problem(0, ops=9, devices=2, memory_bytes=room)
    assert not memory_shortfall(tight)
    search = SearchConfig(placer=placer_named("exact"), budget=Budget(evaluations=3000))
    with pytest.raises(PlacementError, match="fits nowhere"):
        optimize_problem(tight, search)


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    """Return a command that places twelve ops on two devices."""
    graph, cluster = tmp_path / "graph.json", tmp_path / "cluster.toml"
    save_graph(layered(np.random.default_rng(0), ops=12, width=4), graph)
    problem = random_problem(0, ops=2, devices=2)
    cluster.write_text(cluster_to_toml(problem.cluster))
    out = str(tmp_path / "placement.json")
    return ["optimize", str(graph), "--cluster", str(cluster), "--placer", "exact", "--out", out]


@pytest.mark.parametrize("budget", ["3000e", "3e"])
def test_the_command_says_whether_a_placement_is_proven_optimal_or_the_gap(
    budget: str, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*small, "--budget", budget, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    gap = 1 - found["lower_bound_s"] / min(row["predicted_step_s"] for row in found["candidates"])
    assert (gap == 0) == (budget == "3000e")
    expected = "Proven optimal" if gap == 0 else f"stopped with a gap of {gap:.1%}"
    assert expected in found["verdict"]


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    "options", [{"objective": "throughput", "micro_batches": 2}, {"groups": 4}]
)
def test_what_is_not_proven_of_the_objective_or_of_single_ops_is_not_said_to_be(
    options: dict[str, Any], small: list[str]
) -> None:
    _, graph, _, cluster, *_ = small
    search = SearchConfig(placer="exact", budget="3000e", **options)
    result = placer.optimize(graph, cluster, search=search, progress=False)
    assert "roven" not in result.verdict


def test_ctrl_c_ends_the_solver_and_is_still_handled_afterwards() -> None:
    def press() -> bool:
        if any(thread.name.startswith("exact") for thread in threading.enumerate()):
            signal.raise_signal(signal.SIGINT)
        return False

    request = SearchRequest(
        random_problem(1, ops=80, devices=4), Budget(seconds=3600.0), should_stop=press
    )
    assert is_caught(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        placer_named("exact").place(request)
    assert not any(thread.name.startswith("exact") for thread in threading.enumerate())
    assert is_caught(signal.SIGINT)


def is_caught(number: signal.Signals) -> bool:
    """Return whether this process handles a signal, whatever Python takes for its handler."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [mask] = [line.split()[1] for line in lines if line.startswith("SigCgt:")]
    return bool(int(mask, 16) >> (number - 1) & 1)
