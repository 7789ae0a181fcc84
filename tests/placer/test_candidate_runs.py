"""Runs of candidates, with set times: a few rounds of all, then more of the fastest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import pytest

from envs.executors.cores.errors import WorkerError
from envs.hardware.cluster import Cluster
from envs.measurement import Measurement
from envs.placement import Placement
from envs.runtime import Runtime
from placer.choose import choose, finalists, runs_contended
from placer.interrupt import Interrupt
from placer.pipeline.candidate_runs import CandidateRuns
from placer.progress import Silent
from placer.search.candidate import Candidate, Kind
from tests.helpers.timed_machine import (
    AGAIN_S,
    ANNEALING,
    COUNT,
    DEVICES,
    FIRST_S,
    HEFT,
    JOINED,
    POLICY,
    PROBLEM,
    SINGLE,
    Machine,
    candidates,
)


def run(
    machine: Machine, *, seconds: float = math.inf, lower_bound_s: float = 0.0
) -> list[Candidate]:
    with Interrupt() as interrupt:
        runs = CandidateRuns(
            backend=cast(Runtime, machine),
            interrupt=interrupt,
            progress=Silent(),
            seconds=seconds,
        )
        return runs.final(PROBLEM, runs.best(PROBLEM, candidates(), lower_bound_s))


def kinds_that_ran(ran: Sequence[Candidate]) -> set[Kind]:
    return {each.kind for each in ran if each.measurement}


@pytest.mark.parametrize(
    ("seconds", "kinds"),
    [
        # Five runs of 2, 1, 1.2 and 1.4 s, and 0.8 s to start, are half of 57.6 s.
        (57.7, {SINGLE, ANNEALING, HEFT, POLICY}),
        (57.5, {SINGLE, ANNEALING, HEFT}),
        (1.0, {SINGLE, ANNEALING}),
    ],
)
def test_as_many_placements_run_as_half_of_the_time_allows(
    seconds: float, kinds: set[Kind]
) -> None:
    assert kinds_that_ran(run(Machine(FIRST_S, FIRST_S), seconds=seconds)) == kinds


@pytest.mark.parametrize(("bound_s", "count"), [(1.9, 4), (1.97, 1)])
def test_placements_that_the_bound_says_cannot_win_are_not_run(bound_s: float, count: int) -> None:
    ran = run(Machine(FIRST_S, FIRST_S), lower_bound_s=bound_s)
    assert len(kinds_that_ran(ran)) == count


def slowed_down(candidate: Candidate) -> Candidate:
    """Return a candidate whose runs other processes slowed down to half of their speed."""
    runs = candidate.measurement
    assert runs is not None
    return replace(candidate, measurement=replace(runs, wall_s=2 * runs.cpu_clock_s))


def rounds_of(candidate: Candidate) -> int:
    assert candidate.measurement is not None
    return len(candidate.measurement.wall_s)


def test_the_fastest_runs_again_beside_the_baseline_and_only_new_times_count() -> None:
    machine = Machine(FIRST_S, AGAIN_S)
    ran = run(machine)
    assert machine.rounds == [3, 5, 5]
    assert {each.kind: rounds_of(each) for each in ran} == {
        SINGLE: 10,
        HEFT: 3,
        ANNEALING: 10,
        POLICY: 3,
    }
    assert {each.kind for each in ran if each.eliminated} == {HEFT, POLICY}
    # HEFT's time is shorter, but by other rounds.
    best = choose(ran)
    assert best.kind is ANNEALING
    assert best.ranking_s(contended=False) == pytest.approx(1.3)


@pytest.mark.parametrize(
    ("seconds", "placements", "starts", "rounds"),
    [
        # Five steps of 2 and 1 s, three of which count, and a start take 15.8 s.
        (31.7, 1, [3, 5, 5], {SINGLE: 10, ANNEALING: 10}),
        (31.5, 1, [3, 5], {SINGLE: 8, ANNEALING: 8}),
        (31.5, 2, [3, 5], {SINGLE: 5, ANNEALING: 5, HEFT: 3}),
        (15.7, 1, [3], {SINGLE: 3, ANNEALING: 3}),
    ],
)
def test_the_last_runs_are_as_many_as_the_time_allows(
    seconds: float, placements: int, starts: list[int], rounds: dict[Kind, int]
) -> None:
    machine = Machine(FIRST_S)
    some = [
        each for each in candidates() if each.kind in [SINGLE, ANNEALING, HEFT][: placements + 1]
    ]
    with Interrupt() as interrupt:
        runs = CandidateRuns(
            backend=cast(Runtime, machine), interrupt=interrupt, progress=Silent(), seconds=seconds
        )
        first = runs._run(PROBLEM, some, range(len(some)))
        ran = runs.final(PROBLEM, first)
    assert machine.rounds == starts
    assert {each.kind: rounds_of(each) for each in ran} == rounds
    assert runs.unconfirmed == (len(starts) == 1)


def test_the_last_runs_are_as_many_in_the_second_workers_as_in_the_first() -> None:
    machine = Machine(FIRST_S, AGAIN_S, done=[3, 4, 4])
    ran = run(machine)
    assert machine.rounds == [3, 5, 4]
    assert [rounds_of(each) for each in ran if not each.eliminated] == [8, 8]


def test_three_last_rounds_alone_are_said_to_be_few() -> None:
    with Interrupt() as interrupt:
        runs = CandidateRuns(
            backend=cast(Runtime, Machine(FIRST_S, done=[3, 3])),
            interrupt=interrupt,
            progress=Silent(),
            seconds=31.0,  # five steps of 2 and 1 s and a start, but not twice
        )
        several = runs._run(PROBLEM, candidates(), range(4))
        ran = runs.final(PROBLEM, several)
    assert runs.unconfirmed
    assert rounds_of(choose(ran)) == 3


@pytest.mark.parametrize(("done", "unconfirmed"), [(1, True), (3, False)])
def test_one_round_on_a_busy_machine_is_said_to_be_few(done: int, unconfirmed: bool) -> None:
    with Interrupt() as interrupt:
        runs = CandidateRuns(
            backend=cast(Runtime, Machine(FIRST_S)), interrupt=interrupt, progress=Silent()
        )
        first = runs._run(PROBLEM, candidates(), range(4), done)
        disturbed = [slowed_down(each) for each in first]
        assert runs.final(PROBLEM, disturbed) is disturbed, "nothing runs again"
    assert runs.unconfirmed is unconfirmed


@pytest.mark.parametrize(("seconds", "fits"), [(41.7, True), (41.5, False)])
def test_a_second_search_needs_time_to_run_what_it_finds(seconds: float, fits: bool) -> None:
    with Interrupt() as interrupt:
        runs = CandidateRuns(
            backend=cast(Runtime, Machine(FIRST_S)),
            interrupt=interrupt,
            progress=Silent(),
            seconds=seconds,
        )
        first = runs.best(PROBLEM, candidates())
        # Five steps of 2 and 1 s, and of one more of 1 s, and a start are half of 41.6 s.
        assert runs.has_time_for_further(first) == fits


@pytest.mark.parametrize(("final", "share"), [(10, 1 / 2), (0, 1)])
def test_the_first_runs_leave_half_of_the_time_where_there_are_last_ones(
    final: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Machine, "final_rounds", lambda *_: final)
    machine = Machine(FIRST_S)
    run(machine, seconds=100.0)
    assert machine.seconds[0] == 100.0 * share


@pytest.mark.parametrize(
    ("seconds", "rounds"),
    # Five runs of 2, 1 and 2.5 s and a start take 28.3 s, three runs 17.3 s.
    [(28.4, [3, 3, 3]), (28.2, [1, 1, 1]), (17.2, [1, 1, 0]), (0.1, [1, 1, 0])],
)
def test_where_time_is_shorter_one_round_runs_then_one_baseline_only(
    seconds: float, rounds: list[int]
) -> None:
    single, _, fastest, _ = candidates()
    itself = replace(_predicted(single, 2.0), kind=Kind.UNPLACED, name="unplaced")
    together = replace(_predicted(single, 2.5), kind=Kind.UNPLACED, name="on all devices")
    with Interrupt() as interrupt:
        runs = CandidateRuns(
            backend=cast(Runtime, Machine(FIRST_S)),
            interrupt=interrupt,
            progress=Silent(),
            seconds=seconds,
        )
        some = [_predicted(single, 3.0), fastest, itself, together]
        slow, *ran = runs.best(PROBLEM, some)
    assert slow.measurement is None
    assert [0 if each.measurement is None else rounds_of(each) for each in ran] == rounds


@pytest.mark.parametrize(("placed_s", "wins"), [(8.0, False), (1.0, True)])
def test_beside_torchs_threads_alone_wall_times_count_on_a_busy_machine(
    placed_s: float, wins: bool
) -> None:
    """Threads have no CPU clock, by which the placement would be compared with nothing."""
    single, _, fastest, _ = candidates()
    all_cores = Cluster(name="all", devices=(JOINED,))
    joined = Placement.of(PROBLEM.graph, all_cores, DEVICES[SINGLE], np.zeros(COUNT))
    assert single.prediction is not None
    itself = replace(
        single,
        kind=Kind.UNPLACED,
        prediction=replace(single.prediction, placement=replace(joined, unplaced=True)),
        measurement=Measurement(wall_s=np.array([2.0]), cpu_clock_s=np.array([np.nan])),
    )
    assert itself.is_on_threads
    runs = Measurement(wall_s=np.array([placed_s]), cpu_clock_s=np.array([placed_s / 1.8]))
    assert runs_contended([placed := _with(fastest, runs), itself])
    assert choose([placed, itself]) is (placed if wins else itself)


@pytest.mark.parametrize(("single_s", "count"), [(2.1, 2), (1.9, 3)])
def test_where_time_is_short_a_device_slower_than_the_model_itself_is_not_run(
    single_s: float, count: int
) -> None:
    single, heft, *_ = candidates()
    itself = replace(_predicted(single, 2.0), kind=Kind.UNPLACED, name="unplaced")
    single = _predicted(single, single_s)
    with Interrupt() as interrupt:
        for seconds, expected in ((27.0, count), (math.inf, 3)):
            runs = CandidateRuns(
                backend=cast(Runtime, Machine(FIRST_S)),
                interrupt=interrupt,
                progress=Silent(),
                seconds=seconds,
            )
            ran = runs.best(PROBLEM, [single, heft, itself])
            assert sum(each.measurement is not None for each in ran) == expected
            assert ran[1].measurement is not None
            assert ran[2].measurement is not None


def test_runs_that_take_longer_than_their_time_are_announced() -> None:
    remarks: list[str] = []

    class Noted(Silent):
        def remark(self, text: str) -> None:
            remarks.append(text)

    for seconds in (9.9, 9.0):  # three runs of 2 and 1 s, and a start, take 9.8 s
        with Interrupt() as interrupt:
            runs = CandidateRuns(
                backend=cast(Runtime, Machine(FIRST_S)),
                interrupt=interrupt,
                progress=Noted(),
                seconds=seconds,
            )
            runs.best(PROBLEM, candidates())
    [remark] = remarks
    assert "the runs take about 10 s instead of 9 s" in remark


@pytest.mark.parametrize(("lead", "rounds"), [(1.2, [3]), (1.1, [3, 5, 5])])
def test_a_baseline_that_is_far_ahead_needs_no_final(lead: float, rounds: list[int]) -> None:
    first_s = {**FIRST_S, SINGLE: FIRST_S[ANNEALING] / lead}
    machine = Machine(first_s, {**AGAIN_S, SINGLE: first_s[SINGLE]})
    ran = run(machine)
    assert machine.rounds == rounds
    assert choose(ran).kind is SINGLE


def test_a_lead_that_was_luck_is_lost_in_the_final() -> None:
    assert choose(run(Machine(FIRST_S, {SINGLE: 2.0, ANNEALING: 2.0}))).kind is SINGLE


def test_a_lead_that_only_some_workers_have_is_noise() -> None:
    ahead, behind = {SINGLE: 2.0, ANNEALING: 1.7}, {SINGLE: 2.0, ANNEALING: 2.05}
    for first, second in ((ahead, behind), (behind, ahead)):
        assert choose(run(Machine(FIRST_S, first, second))).kind is SINGLE
    assert choose(run(Machine(FIRST_S, ahead, ahead))).kind is ANNEALING


def test_the_first_rounds_count_if_the_final_does_not_end() -> None:
    interrupted = Machine(FIRST_S, AGAIN_S)
    with Interrupt() as interrupt:
        runs = CandidateRuns(
            backend=cast(Runtime, interrupted), interrupt=interrupt, progress=Silent()
        )
        first = runs.best(PROBLEM, candidates())
        interrupted.interrupted = True
        assert runs.final(PROBLEM, first) is first
    lost = run(Machine(FIRST_S, AGAIN_S, error=WorkerError("the worker of a died")))
    for ran in (first, lost):
        assert [rounds_of(each) for each in ran] == 4 * [3]
        assert not any(each.eliminated for each in ran)


def test_a_placement_within_noise_of_a_simpler_one_runs_again_beside_it() -> None:
    ran = run(Machine({**FIRST_S, HEFT: 1.0002}, {**AGAIN_S, HEFT: 1.31}))
    assert {each.kind for each in ran if each.eliminated} == {POLICY}


def test_what_other_processes_disturb_is_not_run_again() -> None:
    [*ran] = run(Machine(FIRST_S, AGAIN_S))
    assert len(finalists(ran)) == 2
    runs_s = np.array([2.0, 2.1, 2.0])
    busy = Measurement(wall_s=runs_s, cpu_clock_s=runs_s / 1.5)
    assert finalists([_with(each, busy) for each in ran]) == []


def test_the_first_rounds_count_if_other_processes_disturb_the_final() -> None:
    ran = run(Machine(FIRST_S, AGAIN_S, busy=True))
    assert [rounds_of(each) for each in ran] == 4 * [3]
    assert choose(ran).kind is ANNEALING


def test_a_placement_that_fails_in_the_final_does_not_win() -> None:
    ran = run(Machine(FIRST_S, AGAIN_S, fails=ANNEALING))
    assert {each.kind for each in ran if each.failure} == {ANNEALING}
    assert not any(each.eliminated for each in ran)
    assert choose(ran).kind is HEFT


def _predicted(candidate: Candidate, step_s: float) -> Candidate:
    assert candidate.prediction is not None
    return replace(candidate, prediction=replace(candidate.prediction, objective_s=step_s))


def _with(candidate: Candidate, runs: Measurement) -> Candidate:
    return replace(candidate, measurement=runs)
