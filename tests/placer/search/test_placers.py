"""All placers by name: the contract tests, the lookup of names, and the interfaces to them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import placer
from envs.hardware.cluster import Cluster, Device, Link, cluster_to_toml
from envs.simulator import INFEASIBLE_NS
from placer.cli.main import main
from placer.placers import contract, listings, placer_named, registry
from placer.placers.contract import CHECKS, Make, contract_problems
from placer.placers.objectives import Objective
from placer.placers.portfolio import Annealed
from placer.placers.rules import Rule, Single, Turns
from placer.placers.samplers import Sampling
from placer.policies import load
from placer.search.budget import Budget
from placer.search.candidate import Candidate, Kind
from placer.search.evaluator import BudgetedEvaluator, Evaluator
from placer.search.request import LATENCY, STEPS, SearchRequest
from tests.helpers.in_turn import in_turn
from tests.helpers.random_problems import random_problem

POLICY = load("generalist")
NAMES = [listing.name for listing in registry.OWN]
BASELINES = ("exact", "sequence-to-sequence")
"""Slow, because they learn or prove."""
Files = Callable[..., tuple[Path, Path]]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", in_turn(NAMES, slow=BASELINES))
def test_every_placer_keeps_the_contract(name: str, check: Callable[[Make], None]) -> None:
    check(lambda: placer_named(name, POLICY))


@pytest.mark.parametrize("name", ["portfolio", "annealing"])
def test_a_search_keeps_to_memory_where_it_is_short(name: str) -> None:
    [problem] = [p for p in contract_problems() if p.graph.name == "short of memory"]
    single = placer_named("single-device").place(SearchRequest(problem, Budget(evaluations=1)))
    assert single[0].step_ns == INFEASIBLE_NS
    found = placer_named(name, POLICY).place(SearchRequest(problem, Budget(evaluations=400)))
    assert found[0].step_ns < INFEASIBLE_NS


class Anywhere(Rule):
    """Ignores where ops are allowed to run."""

    def candidates(self, evaluator: Evaluator) -> list[Candidate]:
        count = evaluator.problem.op_count
        return [evaluator.candidate(Kind.OTHER, np.zeros(count, np.int32), np.zeros(count))]


class Boastful(Turns):
    """Reports shorter steps than the real ones."""

    def place(self, request: SearchRequest) -> list[Candidate]:
        return [replace(plan, step_ns=plan.step_ns // 2) for plan in super().place(request)]


class Optimist(Turns):
    """Reports infeasible candidates as feasible."""

    def place(self, request: SearchRequest) -> list[Candidate]:
        return [
            replace(plan, step_ns=0 if plan.step_ns == INFEASIBLE_NS else plan.step_ns)
            for plan in super().place(request)
        ]


class Moody(Sampling):
    """Uses its own random numbers, whatever the seed."""

    name: ClassVar[str] = "moody"
    random: ClassVar[np.random.Generator] = np.random.default_rng(0)

    def sample(self, budgeted: BudgetedEvaluator, seed: int) -> None:
        problem = budgeted.evaluator.problem
        home = problem.allowed.argmax(axis=1).astype(np.int32)
        budgeted.evaluate(home, self.random.random(problem.op_count))


class Tireless(Sampling):
    """Evaluates a thousand placements, whatever the budget and requests to stop."""

    name: ClassVar[str] = "tireless"

    def sample(self, budgeted: BudgetedEvaluator, seed: int) -> None:
        problem = budgeted.evaluator.problem
        home = problem.allowed.argmax(axis=1).astype(np.int32)
        budgeted.meter.over()
        for _ in range(1000):
            budgeted.evaluate(home, np.zeros(problem.op_count))


class Unbalanced(Annealed):
    """Exceeds the budget a hundredfold for the max-load objective."""

    def place(self, request: SearchRequest) -> list[Candidate]:
        if request.objective == "max-load":
            seconds, evaluations = request.budget.seconds, request.budget.evaluations
            budget = Budget(seconds and 100 * seconds, evaluations and 100 * evaluations)
            request = replace(request, budget=budget)
        return super().place(request)


class Backward(Single):
    """Returns the worst candidate first."""

    def place(self, request: SearchRequest) -> list[Candidate]:
        return super().place(request)[::-1]


class Silent(Turns):
    """Returns no candidates."""

    def place(self, request: SearchRequest) -> list[Candidate]:
        return []


@pytest.mark.parametrize(
    ("make", "check", "message"),
    [
        (Anywhere, contract.plans_are_whole, "may not run where it is"),
        (Boastful, contract.steps_are_the_simulators, "the simulator"),
        (Optimist, contract.steps_are_the_simulators, "the simulator"),
        (Moody, contract.same_seed_same_plans, "with seed 3 differ"),
        (Tireless, contract.evaluations_are_kept, "evaluations for"),
        (Tireless, contract.seconds_are_kept, "after the end"),
        (Unbalanced, contract.evaluations_are_kept, "max-load, 54"),
        (Unbalanced, contract.seconds_are_kept, "max-load after"),
        (Tireless, contract.a_stop_is_heard, "after a stop was asked for"),
        (Backward, contract.steps_are_the_simulators, "not the best first"),
        (Backward, contract.objectives_are_served, "not the smallest load first"),
        (Silent, contract.small_budgets_give_plans, "no plan for"),
    ],
)
def test_the_contract_notices_who_breaks_it(
    make: Make, check: Callable[[Make], None], message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        check(make)


def test_a_check_leaves_the_clock_and_the_judges_as_they_were() -> None:
    before = (Evaluator.costs, time.perf_counter)
    contract.seconds_are_kept(Turns)
    assert before == (Evaluator.costs, time.perf_counter)


@pytest.mark.parametrize(
    "name", in_turn(["cross-entropy", "evolution", "sequence-to-sequence"], slow=BASELINES)
)
def test_libraries_and_compiled_code_are_loaded_before_the_budget_begins(name: str) -> None:
    code = f"""
import sys
from placer.placers import placer_named
from placer.placers.contract import contract_problems
from placer.search.budget import Budget
from placer.search.compilation import load_compiled_code
from placer.search.request import SearchRequest

def loaded():
    return {{name for name in sys.modules if name.startswith(("torch.", "numba.", "scipy."))}}

def meter(request, meter=SearchRequest.meter):
    global before
    before = loaded() if load_compiled_code.cache_info().currsize else None
    return meter(request)
SearchRequest.meter = meter
placer_named({name!r}).place(SearchRequest(contract_problems()[0], Budget(evaluations=20)))
print(sorted(loaded() - before))
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


def test_a_wrong_name_is_answered_with_what_there_is() -> None:
    with pytest.raises(
        ValueError, match=r"'anealing': .*portfolio, .*exact; did you mean annealing"
    ):
        placer_named("anealing")


@pytest.mark.parametrize(("name", "module"), [("exact", "ortools"), ("min-cut", "pymetis")])
def test_what_is_not_installed_is_told_with_what_installs_it(name: str, module: str) -> None:
    code = (
        f"import sys; sys.modules[{module!r}] = None\n"
        "from placer.placers import placer_named\n"
        f"try:\n placer_named({name!r})\nexcept ValueError as error:\n print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"{module}: pip install 'device-placer[bench]'" in done.stdout


def plugged(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    points = [EntryPoint(name, value, registry.GROUP) for name, value in values.items()]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)


def test_a_plug_in_is_listed_and_used_but_replaces_nothing(
    monkeypatch: pytest.MonkeyPatch, files: Files, tmp_path: Path
) -> None:
    plugged(
        monkeypatch,
        mine=f"{__name__}:Turns",
        heft=f"{__name__}:Turns",
    )
    assert [listing.name for listing in listings()] == [*NAMES, "mine"]
    assert type(placer_named("mine")) is Turns
    assert type(placer_named("heft")) is not Turns
    graph, cluster = files()
    arguments = ["optimize", str(graph), "--cluster", str(cluster), "--placer", "mine"]
    assert main([*arguments, "--out", str(tmp_path / "p.json")]) == 0


class Demanding(Turns):
    """Cannot be made without arguments."""

    def __init__(self, patience: int) -> None:
        self.patience = patience


class Listless:
    """Has a string instead of a list of objectives."""

    objectives: ClassVar[str] = LATENCY


class Idle:
    """Has no method ``place``."""

    objectives: ClassVar[tuple[str, ...]] = STEPS


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (
            f"{__name__}:np",
            f"{__name__}:np is no class of placers",
        ),
        (
            f"{__name__}:Listless",
            f"{__name__}:Listless is no class of placers",
        ),
        ("no_such_module:Mine", "No module named"),
        (f"{__name__}:Nobody", "Nobody"),
        (__name__, "no attribute"),
        (f"{__name__}:Sampling", "TypeError: .*abstract"),
        (f"{__name__}:Demanding", "TypeError: .*patience"),
        (
            f"{__name__}:Idle",
            f"{__name__}:Idle has no method place",
        ),
    ],
)
def test_a_plug_in_that_is_no_placer_is_refused(
    value: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugged(monkeypatch, mine=value)
    with pytest.raises(ValueError, match=f"'mine' of a plug-in cannot be loaded: .*{why}"):
        placer_named("mine")


def installed(folder: Path, **values: str) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Install a package with placers and return a function that runs commands with it."""
    code = "from placer.placers.rules import Turns as Mine\n\ndef broken(): pass\n"
    (folder / "my_placer.py").write_text(code)
    metadata = folder / "my_package-0.1.dist-info"
    metadata.mkdir()
    text = "Metadata-Version: 2.1\nName: my-package\nVersion: 0.1\nSummary: Placers of mine\n"
    (metadata / "METADATA").write_text(text)
    points = "".join(f"{name} = {value}\n" for name, value in values.items())
    (metadata / "entry_points.txt").write_text(f"[{registry.GROUP}]\n{points}")
    path = os.pathsep.join([str(folder), *sys.path])

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "placer.cli.main", *arguments]
        environment = {**os.environ, "PYTHONPATH": path}
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    return run


def test_an_installed_package_is_listed_with_its_name_and_summary(tmp_path: Path) -> None:
    run = installed(tmp_path, mine="my_placer:Mine")
    *_, listed = json.loads(run("placers", "--json").stdout)
    assert (listed["name"], listed["summary"]) == ("mine", "Placers of mine")
    assert run("placers").stdout.splitlines()[-1].split()[0] == "mine"


@pytest.mark.slow
def test_an_installed_package_is_used_or_its_fault_told_in_a_line(
    files: Files, tmp_path: Path
) -> None:
    (tmp_path / "no_licence.py").write_text("raise RuntimeError('no licence')\n")
    run = installed(tmp_path, mine="my_placer:Mine", broken="no_licence:Mine", f="my_placer:broken")
    graph, cluster = files()
    arguments = ["optimize", str(graph), "--cluster", str(cluster), "--budget", "20e"]
    arguments += ["--out", str(tmp_path / "p.json"), "--placer"]
    assert run(*arguments, "mine").returncode == 0
    for name, why in (("broken", "RuntimeError: no licence"), ("f", "my_placer:broken")):
        refused = run(*arguments, name)
        assert refused.returncode == 2
        (fault,) = refused.stderr.splitlines()
        assert why in fault


def test_placers_are_listed_without_loading_any(capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import sys\nfrom placer.cli.main import main\nmain(['placers'])\n"
        "print(sorted({'torch', 'numpy', 'numba', 'rich', 'ortools'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = out.stdout.splitlines()
    assert lines[-1] == "[]"
    assert [line.split()[0] for line in lines[1 : 1 + len(NAMES)]] == NAMES
    assert main(["placers", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in listed] == NAMES


@pytest.mark.parametrize("name", ["portfolio", "heft", "single-device", "annealing"])
def test_whatever_the_placer_heuristics_take_part(name: str) -> None:
    problem = random_problem(3, ops=25, devices=3)
    found = Objective().search(
        SearchRequest(problem, Budget(evaluations=20)), placer_named(name, POLICY)
    )
    names = [plan.name for plan in found]
    heuristics = [f"single device:{d}" for d in range(3)] + ["layer split", "HEFT", "ETF"]
    assert all(names.count(name) == 1 for name in heuristics)
    steps = [plan.step_ns for plan in found]
    assert steps == sorted(steps)


@pytest.mark.parametrize("name", in_turn(NAMES, slow=BASELINES))
def test_micro_batches_and_loads_are_placed_or_refused(name: str) -> None:
    problem = random_problem(1, ops=10, devices=2)
    for objective in (
        Objective(micro_batches=2),
        Objective(name="throughput", micro_batches=3),
        Objective(name="max-load"),
    ):
        if objective.name == "max-load" and placer_named(name, POLICY).objectives == STEPS:
            with pytest.raises(ValueError, match="not max-load; 'portfolio' serves all"):
                placer_named(name, POLICY, objective=objective.name)
            continue
        searcher = placer_named(name, POLICY, objective=objective.name)
        plans = objective.search(SearchRequest(problem, Budget(evaluations=30)), searcher)
        assert {plan.devices.shape for plan in plans} == {(10,)}


def test_the_command_refuses_what_it_cannot_have(
    files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph, cluster = files()
    arguments = ["optimize", str(graph), "--cluster", str(cluster), "--out", str(tmp_path / "p")]
    assert main([*arguments, "--placer", "heff"]) == 2
    assert "did you mean heft" in capsys.readouterr().err
    assert main([*arguments, "--placer", "policy", "--policy", "none"]) == 2
    assert "is nothing without a trained policy" in capsys.readouterr().err
    for name in ("heft", "policy"):
        assert main([*arguments, "--placer", name, "--objective", "max-load"]) == 2
        assert "'portfolio' serves all" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--placer", "heft"], ["--objective", "max-load"]])
def test_a_policy_that_nobody_would_ask_is_refused(
    options: list[str], files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph, cluster = files()
    arguments = ["optimize", str(graph), "--cluster", str(cluster), "--budget", "20e", *options]
    arguments += ["--out", str(tmp_path / "p.json")]
    assert main([*arguments, "--policy", "generalist"]) == 2
    assert "asks no policy" in capsys.readouterr().err
    assert main([*arguments, "--policy", "none"]) == 0


def test_a_policy_is_loaded_for_who_asks_it_only(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []

    def load_and_tell(name: str) -> Any:
        loaded.append(name)
        return load(name)

    monkeypatch.setattr("placer.job.load", load_and_tell)
    graph, cluster = files()
    arguments = ["optimize", str(graph), "--cluster", str(cluster), "--budget", "20e"]
    arguments += ["--out", str(tmp_path / "p.json")]
    for more in (["--placer", "heft"], ["--objective", "max-load"], ["--policy", "none"]):
        assert main([*arguments, *more]) == 0
    assert loaded == []
    for more in ([], ["--placer", "policy"], ["--policy", "synthetic-only"]):
        assert main([*arguments, *more]) == 0
    assert loaded == ["generalist", "generalist", "synthetic-only"]


def test_a_model_is_placed_by_the_placer_that_is_named(tmp_path: Path) -> None:
    names = ("cuda:6", "cuda:7")
    device = Device(
        name="any",
        kind="gpu",
        memory_bytes=10**10,
        peak_flop_per_s=1e13,
        bandwidth_bytes_per_s=1e12,
    )
    cluster = Cluster(
        name="elsewhere",
        devices=tuple(replace(device, name=name) for name in names),
        links=(Link(between=names, latency_s=1e-5, bandwidth_bytes_per_s=1e10),),
    )
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def place(devices: str | Path | Cluster = cluster, **search: Any) -> placer.Result:
        return placer.optimize(
            model,
            torch.ones(2, 8),
            training=False,
            devices=devices,
            search=placer.SearchConfig(budget="20e", **search),
            progress=False,
        )

    found = place(placer="cross-entropy")
    assert {"cross-entropy", "single cuda:6", "HEFT"} <= {row.name for row in found.candidates}
    assert not {"annealing", "evolution", "policy"} & {row.name for row in found.candidates}
    mine = place(placer=placer_named("heft"))
    assert mine.best.predicted_s == place(placer="heft").best.predicted_s
    with pytest.raises(ValueError, match="'Heft' asks no policy"):
        place(placer=placer_named("heft"), policy="mine")
    file = tmp_path / "cluster.toml"
    file.write_text(cluster_to_toml(cluster))
    from_file = place(placer="heft", devices=str(file))
    assert from_file.problem.cluster == cluster
    assert place(placer="heft", devices=file).placement == from_file.placement
    limited = placer.Constraints(memory={"cuda:6": "1GiB"})
    with pytest.raises(ValueError, match="leave memory out"):
        placer.optimize(model, torch.ones(2, 8), devices=file, constraints=limited)
    with pytest.raises(ValueError, match="there is no placer 'cem'"):
        place(placer="cem")
