"""The measured backend's rounds, failures and interrupts, with a made-up executor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from envs.backend import measurements
from envs.hardware.cluster import Cluster
from envs.measured import DevicesLostError, Failure, Measured, TimedStep, turn
from envs.measurement import tied
from envs.placement import Placement
from envs.problem import Problem, toy_problem
from envs.simulator import Simulated

Outcome = TimedStep | Failure | BaseException


@dataclass
class MadeUp:
    """Runs of steps that take a second, unless ``outcome(name, run number)`` says otherwise."""

    problem: Problem
    outcome: Callable[[str, int], Outcome | None] = lambda name, number: None
    joined: Cluster | None = None

    def __post_init__(self) -> None:
        self.names: dict[int, str] = {}
        self.runs: list[str] = []
        self.closed: list[str] = []

    def load(self, placement: Placement) -> MadeUpStep:
        return MadeUpStep(self, self.names[id(placement)])

    def close(self) -> None:
        self.closed.append("executor")


@dataclass
class MadeUpStep:
    executor: MadeUp
    name: str

    def warm_up(self) -> Failure | None:
        step = self.run()
        return step if isinstance(step, Failure) else None

    def run(self) -> TimedStep | Failure:
        self.executor.runs.append(self.name)
        outcome = self.executor.outcome(self.name, self.executor.runs.count(self.name))
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome or TimedStep(wall_s=1.0, peak_memory_bytes={"d0": 7})

    def close(self) -> None:
        self.executor.closed.append(self.name)


Setup = tuple[MadeUp, list[Placement]]


@pytest.fixture
def setup() -> Setup:
    """Return an executor and three placements a, b, c."""
    problem = toy_problem()
    executor = MadeUp(problem)
    zeros = np.zeros(problem.op_count)
    placements = [
        Placement.of(problem.graph, problem.cluster, zeros.astype(int), zeros + i) for i in range(3)
    ]
    executor.names = {
        id(placement): name for placement, name in zip(placements, "abc", strict=True)
    }
    return executor, placements


def test_candidates_take_turns_and_each_begins_a_round(setup: Setup) -> None:
    executor, placements = setup
    progress: list[tuple[int, int]] = []
    with Measured(executor, rounds=3, warm_up=1) as backend:
        results = backend.evaluate(placements, lambda *at: progress.append(at))
    assert "".join(executor.runs) == "abc" + "bca" + "cab" + "abc"
    assert progress == [(i + 1, 12) for i in range(12)]
    assert executor.closed == ["c", "b", "a", "executor"]
    assert not backend.interrupted
    for result in results:
        assert (result.feasible, result.step_s) == (True, 1.0)
        assert result.peak_memory_bytes["d0"] == 7, "what was measured, not what was predicted"
        assert result.parts.keys() == {"median_s", "min_s", "spread", "cpu_clock_s", "contention"}
        assert result.measurement is not None
        assert len(result.measurement.wall_s) == 3


@pytest.mark.parametrize(("seconds", "rounds"), [(18.0, 5), (17.9, 4), (1.0, 3), (1e9, 7)])
def test_rounds_end_with_their_time_but_not_before_three(
    setup: Setup, seconds: float, rounds: int
) -> None:
    executor, placements = setup
    measured = Measured(
        executor, rounds=7, seconds=seconds, clock=lambda: float(len(executor.runs))
    )
    results = measured.evaluate(placements)  # the warm-up and each round take 3 s
    assert [len(each.wall_s) for each in measurements(results)] == 3 * [rounds]
    assert len(executor.runs) == 3 * (1 + rounds)


def test_the_unplaced_model_runs_in_the_same_rounds_on_its_own_device(setup: Setup) -> None:
    executor, placements = setup
    (device, *_) = executor.problem.cluster.devices
    cluster = Cluster(name="all", devices=(replace(device, name="all"),))
    unplaced = replace(placements[1], cluster="all", device_names=("all",))
    executor.names[id(unplaced)] = "u"
    [refused] = Measured(executor, rounds=1).evaluate([unplaced])
    assert "was made for devices all" in refused.why
    executor.joined = cluster
    results = Measured(executor, rounds=2, warm_up=1).evaluate([placements[0], unplaced])
    assert "".join(executor.runs) == "auuaau"
    assert [result.feasible for result in results] == [True, True]
    assert results[1].peak_memory_bytes == {"d0": 7}, "the simulator does not know its device"


def test_a_failed_candidate_runs_no_more_and_the_others_go_on(setup: Setup) -> None:
    executor, placements = setup
    full = Failure(reason="no room", overfull=True, peak_memory_bytes={"d0": 9})
    executor.outcome = lambda name, number: full if (name, number) == ("b", 2) else None
    a, b, c = Measured(executor, rounds=2).evaluate(placements)
    assert (b.feasible, b.step_s, b.why, b.peak_memory_bytes) == (
        False,
        np.inf,
        "no room",
        {"d0": 9},
    )
    assert b.measurement is not None
    assert b.measurement.overfull
    assert a.feasible, a.why
    assert c.feasible, c.why
    assert executor.runs.count("b") == 2
    assert [len(own.wall_s) for own in measurements([a, c])] == [2, 2]


def test_what_does_not_fit_the_problem_is_never_loaded(setup: Setup) -> None:
    executor, (good, *_) = setup
    foreign, in_parts = replace(good, graph="0" * 64), replace(good, micro_batches=4)
    results = Measured(executor, rounds=1).evaluate([foreign, good, in_parts])
    assert [result.feasible for result in results] == [False, True, False]
    assert "made for graph 000000" in results[0].why
    assert "4 micro-batches" in results[2].why


def test_ctrl_c_keeps_the_rounds_that_are_complete(setup: Setup) -> None:
    executor, placements = setup
    executor.outcome = lambda name, number: KeyboardInterrupt() if len(executor.runs) == 9 else None
    backend = Measured(executor, rounds=3)
    results = backend.evaluate(placements)
    assert backend.interrupted
    assert [len(own.wall_s) for own in measurements(results)] == [1, 1, 1]
    backend.evaluate(placements)
    assert not backend.interrupted


def test_ctrl_c_in_the_warm_up_leaves_nothing(setup: Setup) -> None:
    executor, placements = setup
    executor.outcome = lambda name, number: KeyboardInterrupt() if len(executor.runs) == 2 else None
    results = Measured(executor).evaluate(placements)
    assert not any(own.counts for own in measurements(results))
    assert not any(result.feasible for result in results)


def test_without_devices_what_was_measured_counts_and_the_rest_failed(setup: Setup) -> None:
    executor, placements = setup

    def outcome(name: str, number: int) -> Outcome | None:
        if (name, number) == ("c", 2):
            return Failure(reason="it died")
        return DevicesLostError("no new workers") if (name, number) == ("a", 2) else None

    executor.outcome = outcome
    a, b, c = measurements(Measured(executor, rounds=3).evaluate(placements))
    assert (a.failure, b.failure, c.failure) == ("no new workers", "", "it died")
    assert len(b.wall_s) == 1


def test_a_backend_without_noise_is_compared_by_a_single_time(setup: Setup) -> None:
    problem = setup[0].problem
    index = np.arange(problem.op_count)
    placements = [
        Placement.of(problem.graph, problem.cluster, devices, -index.astype(float))
        for devices in (np.zeros_like(index), index % 2)
    ]
    results = Simulated(problem).evaluate(placements)
    exact = measurements(results)
    assert [own.step_s() for own in exact] == [result.step_s for result in results]
    assert results[0].step_s != results[1].step_s
    assert not tied(*exact), "a single exact time is compared, unlike a single run"


@pytest.mark.parametrize(
    ("times_s", "median_s", "count"),
    [
        ([0.15, 9.0], 0.15, 1),  # long: a turn by itself
        ([0.14, 0.06, 9.0], 0.06, 2),  # the first one is not counted
        ([0.05, 0.02, 0.02, 0.03, 9.0], 0.02, 4),  # until 0.06 s have passed
        ([0.001] + [0.005, 0.01] * 10, 0.0075, 9),
    ],
)
def test_a_turn_is_the_median_of_steps_in_a_loop(
    times_s: list[float], median_s: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envs.measured.TURN_S", 0.06)
    left = iter(times_s)
    steps: list[TimedStep] = []

    def run() -> TimedStep:
        wall_s = next(left)
        steps.append(TimedStep(wall_s=wall_s, cpu_clock_s=wall_s / 2, peak_memory_bytes={"d": 1}))
        return steps[-1]

    whole = turn(run)
    assert (whole.wall_s, whole.cpu_clock_s) == pytest.approx((median_s, median_s / 2))
    assert whole.peak_memory_bytes == {"d": 1}
    assert len(steps) == count


def test_a_turn_without_cpu_clock_has_none() -> None:
    assert turn(lambda: TimedStep(wall_s=0.02)) == TimedStep(wall_s=0.02)
