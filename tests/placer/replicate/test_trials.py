"""Trials of a plan of replicas: selection, learned factors and the winner, by made-up times."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from envs.executors.cores.memory import WORKER_BYTES
from envs.hardware.cluster import Cluster
from envs.hardware.discover import present
from envs.hardware.units import milliseconds
from envs.measurement import Measurement
from envs.placement import Placement
from envs.replication import Replication
from graphs.extract import Workload, extract
from placer.applying import apply
from placer.cli.main import main
from placer.job import Job, SearchConfig
from placer.parallel.trials import Runs
from placer.replicate.fitting import MOST_STEPS, Factors, FittedFactors
from placer.replicate.messages import remarks_of, verdict_of
from placer.replicate.plan import plan_job
from placer.replicate.result import ReplicaPlan, Split, training_of
from placer.replicate.trials import (
    HOST,
    RANK_BYTES,
    can_be_tried,
    core_ranks_bytes,
    ranked,
    ranks_bytes,
    with_factors,
    worth_trying,
)
from placer.report.replicas import plan_to_dict
from tests.helpers.clusters import nodes
from tests.helpers.ranks import on_ranks
from tests.helpers.replica_plans import SEARCH, layers, planned, training, with_rates

CORES = sorted(os.sched_getaffinity(0))[:2]
two_cores = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
FACTORS = st.floats(0.01, 99)


def split(replicas: int, width: int = 1, *, joined: bool = False, step_s: float = 0.0) -> Split:
    """Return replicas of 8 samples each; with a step, measured in three equal rounds."""
    groups = [[f"g{r}.{d}" for d in range(width)] for r in range(replicas)]
    if joined:
        groups = [["+".join(group)] for group in groups]
    measurement = None
    if step_s:
        times = np.full(3, step_s)
        measurement = Measurement(wall_s=times, cpu_clock_s=times)
    return Split(
        groups=tuple(map(tuple, groups)),
        samples=8 * replicas,
        joined=width * joined,
        measurement=measurement,
    )


def names(splits: Sequence[Split]) -> list[str]:
    return [each.name for each in splits]


# --- factors


@given(step_s=FACTORS, share=st.floats(0.01, 1), alone_s=FACTORS, exposed_s=st.floats(0, 10))
def test_fitted_factors_predict_what_was_measured(
    step_s: float, share: float, alone_s: float, exposed_s: float
) -> None:
    simulated_s = alone_s + exposed_s
    fitted = Factors.fitted(step_s, share * step_s, simulated_s, alone_s)
    assert fitted.step_s(simulated_s, alone_s) == pytest.approx(step_s)


def test_a_step_has_its_own_factors_and_a_new_one_the_medians_of_its_kind() -> None:
    fitted = FittedFactors()
    assert fitted.of("placed 2 x 1", "a") == Factors(1.0, 1.0)
    for graph, compute in (("a", 1.0), ("b", 4.0), ("c", 2.0), ("b", 5.0)):
        fitted = fitted.with_trial("placed 2 x 1", graph, Factors(compute, 10 * compute))
    assert fitted.of("placed 2 x 1", "b") == Factors(5.0, 50.0)
    assert fitted.of("placed 2 x 1", "new") == Factors(2.0, 20.0)
    assert fitted.of("placed 1 x 2", "b") == Factors()


def test_factors_are_read_as_written_and_the_oldest_make_room(tmp_path: Path) -> None:
    path = tmp_path / "new" / "replicas.json"
    fitted = FittedFactors()
    for number in range(MOST_STEPS + 2):
        fitted = fitted.with_trial("k", str(number), Factors(1.0 + number, 0.5))
    fitted.save(path)
    assert FittedFactors.load(path) == fitted
    assert list(fitted.by_kind["k"]) == [str(n) for n in range(2, MOST_STEPS + 2)]


def test_factors_that_tell_nothing_leave_the_others_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "replicas.json"
    hidden = Factors.fitted(0.05, 0.04, 0.02001, 0.02)
    assert hidden.communication == pytest.approx(1000)
    known = FittedFactors().with_trial("k", "long", Factors(1.5, 0.5, alone_s=500.0))
    known.with_trial("k", "hidden", hidden).with_trial("k", "n", Factors(1.5, -0.5)).save(path)
    assert FittedFactors.load(path) == known


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"format": "x", "factors": {}}',
     '{"format": "placer-replica-factors/1", "factors": {"k": {"g": [1]}}}',
     '{"format": "placer-replica-factors/1", "factors": {"k": {"g": [0, 1, 1]}}}',
     '{"format": "placer-replica-factors/1", "factors": {"k": {"g": [1, 1e9, 1]}}}'],
)  # fmt: skip
def test_a_damaged_file_of_factors_counts_as_empty(text: str, tmp_path: Path) -> None:
    path = tmp_path / "replicas.json"
    path.write_text(text)
    assert FittedFactors.load(path) == FittedFactors()
    assert FittedFactors.load(tmp_path / "missing.json") == FittedFactors()


def test_trials_of_a_plan_correct_its_next_prediction() -> None:
    found = planned(layers(), nodes(1, 2, inside_bytes_per_s=1e9))
    pair = next(each for each in found.splits if each.name == "2 x 1")
    assert pair.step is not None
    assert pair.step.exposed_s > 0
    runs = Runs(step_s=[0.07, 0.09, 0.08], pass_s=[0.05, 0.06, 0.04])
    fitted = with_factors(FittedFactors(), pair, runs)
    assert pair.result is not None
    again = replace(pair, factors=fitted.of(pair.kind, pair.result.problem.graph.hash))
    assert again.step_s == pytest.approx(0.08)
    assert again.exposed_s == pytest.approx(0.03)
    assert again.samples_per_s == pytest.approx(pair.samples / 0.08)
    costlier = again.factors.for_same(2 * pair.step.alone_s)  # ops were measured again
    doubled_s = pair.step.step_s + pair.step.alone_s
    assert costlier.step_s(doubled_s, 2 * pair.step.alone_s) == pytest.approx(0.08)
    assert Factors(3.0, 1.0).for_same(1.0) == Factors(3.0, 1.0)  # medians
    under_ddp = with_factors(FittedFactors(), replace(pair, joined=1), runs)
    [[of_ddp]] = [list(each.values()) for each in under_ddp.by_kind.values()]
    assert of_ddp.compute == pytest.approx(0.08 / pair.step.step_s)
    assert of_ddp.communication == pytest.approx(of_ddp.compute)
    whole = next(each for each in found.splits if each.name == "1 x 2")
    assert replace(whole, factors=Factors(1.5, 1.0)).efficiency == pytest.approx(whole.efficiency)
    failed = Runs(failure="a rank died")
    assert with_factors(fitted, pair, failed) is with_factors(fitted, pair, Runs()) is fitted


# --- what is run


def test_the_fastest_placed_splits_and_all_unplaced_ones_are_run_as_memory_allows() -> None:
    found = planned(layers(), nodes(1, 4, inside_bytes_per_s=1e13))
    unplaced = replace(found.best, joined=1)
    plan = replace(found, splits=(*found.splits, unplaced))
    by_time = sorted(found.splits, key=lambda each: -each.samples_per_s)
    wanted = ["4 x 1", "4 x 1 unplaced", *names(by_time[1:3])]

    def chosen(memory_bytes: float) -> tuple[list[str], list[str]]:
        held_bytes = {id(each): {HOST: core_ranks_bytes(each, None)} for each in plan.splits}
        found = worth_trying(plan, {HOST: memory_bytes}, lambda each: held_bytes[id(each)])
        return names(found[0]), names(found[1])

    assert chosen(1e15) == (wanted, [])
    assert chosen(core_ranks_bytes(found.best, None)) == (wanted[:1], wanted[1:])
    assert chosen(1.0) == ([], wanted)


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("how", "tried"),
    [({}, True), ({"payload": "fp16"}, True), ({"payload": "1-bit"}, True),
     ({"average_every": 4}, False), ({"accumulate": 3}, True)],
)  # fmt: skip
def test_only_methods_with_equal_steps_are_tried(how: dict[str, object], tried: bool) -> None:
    assert can_be_tried(extract(training()), Replication(**how)) is tried  # type: ignore[arg-type]


def test_graphs_are_not_tried() -> None:
    assert not can_be_tried(None, Replication())


def with_optimizer(step: Workload) -> Workload:
    return Workload.of(step.model, step.inputs, F.mse_loss, optimizer="adam")


def test_other_optimizers_and_reductions_have_factors_of_their_own() -> None:
    adam = extract(with_optimizer(training()))
    fp16 = Replication(payload="fp16")
    assert training_of(Replication(), extract(training())) == training_of(Replication(), None) == ""
    assert training_of(Replication(), adam) == "adam"
    assert training_of(fp16, adam) == "fp16, adam"
    assert training_of(Replication(reduction="tree"), None) == "tree"
    assert replace(split(2), training="adam").kind == "placed 2 x 1, adam"


# --- what wins


def test_the_most_samples_per_second_win_and_not_the_shortest_step() -> None:
    splits = [split(1, step_s=1.0), split(2, step_s=1.8), split(1, 2, step_s=0.95), split(3)]
    assert names(ranked(splits)) == ["2 x 1", "1 x 1", "1 x 2", "3 x 1"]


def test_within_noise_the_unplaced_model_wins_then_fewer_replicas() -> None:
    fast, other = split(2, step_s=1.0), split(1, 2, step_s=0.502)
    unplaced = split(1, 2, joined=True, step_s=0.502)
    assert names(ranked([fast, other, unplaced]))[0] == "1 x 2 unplaced"
    assert names(ranked([fast, other]))[0] == "1 x 2"
    slower = split(1, 2, joined=True, step_s=0.51)
    assert names(ranked([fast, slower]))[0] == "2 x 1"


def test_baselines_failures_and_what_was_not_run_do_not_win() -> None:
    baseline = replace(split(1, 2, step_s=0.1), is_baseline=True)
    failed = replace(
        split(4),
        measurement=Measurement(wall_s=np.empty(0), cpu_clock_s=np.empty(0), failure="it died"),
    )
    assert names(ranked([failed, split(3), baseline, split(2, step_s=1.0)]))[0] == "2 x 1"
    unplaced, not_run = split(1, joined=True), split(3)
    assert names(ranked([unplaced, failed, not_run])) == names([not_run, failed])
    failed_unplaced = replace(failed, joined=1)
    assert ranked([failed_unplaced, split(3)])[0].name == "3 x 1"


# --- what is said


def tried_plan(*times_s: float) -> ReplicaPlan:
    """Return a plan for two devices whose best splits took these times."""
    found = planned(layers(), nodes(1, 2, inside_bytes_per_s=1e13))
    measured = [
        replace(each, measurement=split(1, step_s=time_s).measurement)
        for each, time_s in zip(found.splits, times_s, strict=False)
    ]
    return replace(found, splits=(*measured, *found.splits[len(times_s) :]))


def test_a_plan_that_was_run_says_so_with_measured_numbers() -> None:
    plan = tried_plan(0.02, 0.04)
    first, second = plan.splits[:2]
    gain = (first.samples / 0.02) / (second.samples / 0.04)
    assert f"{first.samples / 0.02:.4g} samples/s, measured" in verdict_of(plan)
    assert f"{gain:.2f}x {second.name}" in verdict_of(plan)
    assert not any("Nothing was run" in remark for remark in remarks_of(plan))
    data = plan_to_dict(plan)["splits"]
    assert data[0]["measured_step_s"] == 0.02
    assert data[0]["rounds"] == 3
    assert "measured_step_s" not in data[2]
    unplaced = replace(first, joined=2, groups=(("core:0-1",),))
    plan = replace(plan, splits=(unplaced, *plan.splits))
    assert verdict_of(plan).startswith("Nothing to gain: leave the model unplaced")
    assert plan.replicas.unplaced
    busy = remarks_of(replace(plan, is_busy=True))
    [remark] = [remark for remark in busy if "Other processes" in remark]
    assert "plan again when `placer machine` says good" in remark


def test_the_file_keeps_what_was_run_and_show_prints_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tried_plan(0.02, 0.04)
    first, second = plan.splits[:2]
    assert plan.result.placement.measured == {
        "step_s": 0.02,
        "clock": "wall",
        "wall_median_s": 0.02,
        "wall_min_s": 0.02,
        "spread": 0.0,
        "rounds": 3,
        "samples": first.samples,
        "trials": {
            first.name: {"step_s": 0.02, "predicted_s": first.step_s, "samples": first.samples},
            second.name: {"step_s": 0.04, "predicted_s": second.step_s, "samples": second.samples},
        },
    }
    path = tmp_path / "placement.json"
    plan.result.save(path)
    assert Placement.load(path, plan.result.placement.device_names) == plan.result.placement
    assert main(["show", str(path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"predicted step: {milliseconds(first.step_s)} ms" in shown
    assert "measured step: 20.00 ms" in shown
    assert f"{second.name} {milliseconds(second.step_s)} 40.00 {second.samples / 0.04:.4g}" in shown
    assert "other processes" not in shown
    replace(plan, is_busy=True).result.save(path)
    assert main(["show", str(path)]) == 0
    assert "on cores that other processes used:" in " ".join(capsys.readouterr().out.split())
    assert replace(plan, splits=plan.splits[2:]).result.placement.measured is None


def test_a_plan_that_was_not_run_says_what_is_assumed() -> None:
    found = planned(layers(), nodes(1, 2))
    assert any("reductions from the latency" in remark for remark in remarks_of(found))
    data = plan_to_dict(found)["splits"][0]
    assert not {"measured_step_s", "rounds", "unplaced"} & set(data)


# --- for real


def cores_cluster() -> Cluster:
    return with_rates(present([f"core:{core}" for core in CORES]))


@pytest.mark.slow
@two_cores
def test_ranks_take_the_memory_of_their_workers_not_only_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACER_CACHE", str(tmp_path))
    plan = planned(training(), cores_cluster(), search=replace(SEARCH, measure=False))
    [pair] = [split for split in plan.splits if split.name == "2 x 1"]
    tensors_bytes = core_ranks_bytes(pair, None)
    extraction = extract(training())
    forks_bytes = core_ranks_bytes(pair, extraction)
    assert forks_bytes > tensors_bytes + 2 * WORKER_BYTES
    assert ranks_bytes(pair, extraction, forked=True) == {HOST: forks_bytes}
    model_bytes = 4 * (16 * 32 + 32 + 32 * 4 + 4)  # new processes load it
    held = {HOST: forks_bytes + 2 * (RANK_BYTES + model_bytes)}
    assert ranks_bytes(pair, extraction, forked=False) == held


def really_tried(folder: str) -> dict[str, object]:
    """Plan replicas of a small model in this process, which has no device besides the CPU."""
    os.environ["PLACER_CACHE"] = folder
    workload = training()
    job = Job(
        source=workload,
        cluster=cores_cluster(),
        search=SearchConfig(policy=None, budget="50e"),
        replicas=Replication(replicas=2, batch="global", accumulate=2, reduction="ring"),
    )
    result = plan_job(job).result
    plan = result.replication
    result.save(Path(folder, "placement.json"))
    loaded = Placement.load(Path(folder, "placement.json"))
    part = tuple(own[: len(own) // 4] for own in workload.inputs)
    with apply(workload.model, loaded, part, loss=workload.loss) as applied:
        loss = float(applied.step(*part))
    return {
        "ran": {each.name: each.measurement.wall_s.tolist()
                for each in plan.splits if each.measurement is not None},
        "failed": [each.measurement.failure for each in plan.splits
                   if each.measurement is not None and each.measurement.failure],
        "best": plan.best.name,
        "efficiency": {each.name: each.efficiency for each in plan.splits},
        "files": sorted(path.name.partition("-")[0] for path in Path(folder).iterdir()),
        "busy": plan.is_busy,
        "finite": bool(torch.isfinite(torch.tensor(loss))),
        "replicas": loaded.replicas is not None and len(loaded.replicas.groups),
        "verdict": verdict_of(plan),
    }  # fmt: skip


@pytest.mark.slow
@two_cores
def test_on_cores_of_this_machine_plans_and_the_unplaced_model_are_really_run(
    tmp_path: Path,
) -> None:
    [found] = on_ranks(1, really_tried, str(tmp_path), joined=False, timeout_s=900.0)
    assert found["failed"] == []
    ran = found["ran"]
    assert set(ran) == {"2 x 1", "1 x 2", "2 x 1 unplaced", "1 x 2 unplaced"}
    assert len({len(times_s) for times_s in ran.values()}) == 1
    assert all(time_s > 0 for times_s in ran.values() for time_s in times_s)
    assert found["best"] in ("2 x 1", "2 x 1 unplaced")  # as two replicas were asked for
    assert found["replicas"] == 2
    assert found["efficiency"]["1 x 2 unplaced"] == pytest.approx(1)
    assert found["finite"]
    assert "measured" in found["verdict"]
    assert found["busy"] or "replicas" in found["files"]


def test_nothing_is_run_without_measuring() -> None:
    if len(CORES) < 2:
        pytest.skip("needs two cores")
    search = SearchConfig(policy=None, budget="50e", measure=False)
    found = planned(training(), cores_cluster(), Replication(replicas=2), search)
    assert not found.was_run
    assert found.collectives is None
    assert not any(each.joined for each in found.splits)
