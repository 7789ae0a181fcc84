"""Runs of several ranks, from command-line arguments to output."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from envs.hardware.cluster import Link
from envs.hardware.discover import present
from envs.placement import phase_of
from envs.replication import Batch, Replication
from placer.cli.main import main
from placer.job import Job, SearchConfig
from placer.parallel.training import STATE_FORMAT
from placer.replicate.plan import plan_job
from placer.sources.target import load_step
from placer.state_file import read_state
from tests.helpers.ranks import on_ranks
from tests.helpers.runs import (
    all_ran,
    arguments,
    losses_in_one_process,
    prepared,
    ran,
    rank,
    run_in_turn,
    written,
)

NORM = "nn.BatchNorm1d(16), "  # its statistics are per pass


def printed_losses(out: str) -> list[float]:
    return [float(line.split()[-1]) for line in out.splitlines() if line.startswith("step")]


def test_replicas_train_as_one_process_and_rank_0_prints_losses(tmp_path: Path) -> None:
    words = prepared(tmp_path)(5, data="batch")
    (code, out, err), (_, other, _) = on_ranks(2, rank, words, joined=False)
    assert code == 0
    assert err.startswith("2 replicas on 1 device each, kept in sync by allreduce, seed 0")
    expected = losses_in_one_process(f"{tmp_path}/target.py", 5)
    np.testing.assert_allclose(printed_losses(out), expected, rtol=1e-5)
    assert not other


@pytest.mark.slow
def test_a_run_says_when_its_method_begins(tmp_path: Path) -> None:
    remarks = {
        "onebit": "after 200 plain steps, and this run has 2",
        "onebit,warmup-steps=1": "",
        "onebit,warmup-steps=2": "after 2 plain steps",
    }
    words = prepared(tmp_path)
    runs = [(0, words(2, sync=sync)) for sync in remarks]
    [results] = on_ranks(1, run_in_turn, runs, joined=False)
    for remark, (code, _, err) in zip(remarks.values(), results, strict=True):
        assert code == 0, err
        assert remark in err
        assert ("plain steps" in err) is bool(remark)


def planned(target: str, path: Path, names: Sequence[str], wanted: Replication) -> Replication:
    """Write the plan for a target on devices of this machine and return its replicas."""
    cluster = present(names)
    devices = tuple(
        replace(d, memory_bytes=10**12, peak_flop_per_s=1e10, bandwidth_bytes_per_s=1e10)
        for d in cluster.devices
    )
    link = Link(between=tuple(names), latency_s=1e-5, bandwidth_bytes_per_s=1e10)
    cluster = replace(cluster, devices=devices, links=(link,))
    job = Job(
        source=load_step(target, training=True),
        cluster=cluster,
        search=SearchConfig(policy=None, budget="50e"),
        replicas=wanted,
    )
    result = plan_job(job).result
    result.save(path)
    assert result.placement.replicas is not None
    return result.placement.replicas


@pytest.mark.slow
@pytest.mark.parametrize("batch", ["per-replica", pytest.param("global", marks=pytest.mark.slow)])
def test_a_plan_runs_as_it_was_planned(batch: Batch, tmp_path: Path) -> None:
    target = written(tmp_path)
    (tmp_path / "target.py").write_text((tmp_path / "target.py").read_text().replace(NORM, ""))
    path = tmp_path / "placement.json"
    names = [f"core:{core}" for core in sorted(os.sched_getaffinity(0))[:2]]
    wanted = Replication(replicas=2, batch=batch, accumulate=2, reduction="ring")
    plan = planned(f"{target}:build", path, names, wanted)
    assert plan.groups == tuple((name,) for name in names)
    words = arguments(target, path, 4, data=f"{target}:batch")
    (code, out, err), _ = on_ranks(2, rank, words, joined=False)
    assert code == 0, err
    assert "by allreduce, seed 0, 2 passes a step" in err
    assert err.count("the plan assumes ring") == 1
    cut = 4 if batch == "global" else 1
    expected = losses_in_one_process(target, 4, passes=2, cut=cut)
    np.testing.assert_allclose(printed_losses(out), expected, rtol=1e-5)


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("device", "groups", "message", "code"),
    [
        ("cpu", [["cpu"], ["n1:cpu"]], "this run has 1 rank: start torchrun --nnodes=2", 2),
        ("n0:g90", [["n0:g90"]], "rank 0, on cuda:90: there is no device cuda:90", 1),
        ("cuda:91", None, "rank 0, on cuda:91: there is no device cuda:91", 1),
    ],
)
def test_a_plan_for_more_replicas_or_devices_that_are_not_here_is_refused(
    device: str,
    groups: object,
    message: str,
    code: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = prepared(tmp_path)(2)
    path = tmp_path / "placement.json"
    content = json.loads(path.read_text())
    content["devices"] = dict.fromkeys(content["devices"], device)
    if groups:
        content["replicas"] = {"groups": groups}
    path.write_text(json.dumps(content))
    assert message in alone(words, capsys, code)


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_unplaced_replicas_train_the_model_as_it_is(tmp_path: Path) -> None:
    cores = [f"core:{core}" for core in sorted(os.sched_getaffinity(0))[:2]]
    words = prepared(tmp_path, cores[0])(4, data="batch")
    path = tmp_path / "placement.json"
    content = json.loads(path.read_text())
    content["replicas"] = {"groups": [[core] for core in cores], "unplaced": True}
    path.write_text(json.dumps(content))
    (code, out, err), _ = on_ranks(2, rank, words, joined=False)
    assert code == 0, err
    expected = losses_in_one_process(f"{tmp_path}/target.py", 4)
    np.testing.assert_allclose(printed_losses(out), expected, rtol=1e-5)


@pytest.mark.parametrize("group", [["core:0", "core:1"], []])
def test_an_unplaced_replica_has_one_device(group: list[str]) -> None:
    with pytest.raises(ValueError, match="replicas"):
        Replication.from_dict({"groups": [group] if group else [], "unplaced": True}, "replicas")
    with pytest.raises(ValueError, match="neither true nor false"):
        Replication.from_dict({"groups": [["core:0"]], "unplaced": 1}, "replicas")


@pytest.mark.slow
def test_training_by_blocks_stops_at_a_border_and_goes_on_to_the_same_model(
    tmp_path: Path,
) -> None:
    words = partial(prepared(tmp_path, dropout=0.2), data="blocks", sync="bmuf", period=3)
    whole, parts = tmp_path / "whole.json", tmp_path / "parts.json"
    # 4 blocks, 2 sweeps
    all_ran(2, words(12, checkpoint=whole), words(6, checkpoint=parts))
    ran(2, *words(12, checkpoint=parts), "--resume")
    for number in range(2):
        ends = [
            read_state(path.with_name(f"{path.name}.12.{number}"), STATE_FORMAT)
            for path in (whole, parts)
        ]
        assert ends[0]["losses"] == ends[1]["losses"]
        torch.testing.assert_close(ends[0]["module"], ends[1]["module"], rtol=0, atol=0)
        torch.testing.assert_close(ends[0]["sync"], ends[1]["sync"], rtol=0, atol=0)
    names = {path.name for path in tmp_path.glob("parts.json*")}
    assert names == {"parts.json", "parts.json.12.0", "parts.json.12.1"}


@pytest.mark.slow
def test_dropout_on_pinned_cores_goes_on_from_a_checkpoint_and_differs_between_ranks(
    tmp_path: Path,
) -> None:
    core = f"core:{min(os.sched_getaffinity(0))}"
    words = partial(prepared(tmp_path, core, dropout=0.5), data="same")
    kept = tmp_path / "run.json"
    whole, first = all_ran(
        2, words(6, checkpoint=tmp_path / "whole.json"), words(3, checkpoint=kept)
    )
    assert first["losses"] == whole["losses"][:3]
    assert ran(2, *words(6, checkpoint=kept), "--resume")["losses"] == whole["losses"]
    mine, theirs = (
        read_state(tmp_path / f"whole.json.6.{r}", STATE_FORMAT)["losses"][0] for r in range(2)
    )
    assert mine != theirs  # same batch, same model


def with_more_words_on_rank_1(words: list[str], *more: str) -> tuple[int, str, str]:
    return rank([*words, *more] if os.environ["RANK"] == "1" else words)


def with_other_priorities(placement: Path, path: Path) -> str:
    content = json.loads(placement.read_text())
    content["priority"] = dict.fromkeys(content["priority"], 1.0)
    path.write_text(json.dumps(content))
    return str(path)


@pytest.mark.slow
def test_ranks_with_different_placements_are_refused_by_name(tmp_path: Path) -> None:
    words = prepared(tmp_path)(2)
    other = with_other_priorities(tmp_path / "placement.json", tmp_path / "other.json")
    results = on_ranks(3, with_more_words_on_rank_1, words, "--placement", other, joined=False)
    for number, (code, _, err) in enumerate(results):
        assert code == 2
        assert f"rank {number}: placements: ranks differ (ranks 0, 2: " in err


@pytest.mark.slow
def test_ranks_of_which_one_would_resume_are_refused(tmp_path: Path) -> None:
    words = prepared(tmp_path)(2, checkpoint=tmp_path / "run.json")
    for code, _, err in on_ranks(2, with_more_words_on_rank_1, words, "--resume", joined=False):
        assert code == 2
        assert "the options of the run: ranks differ (" in err


def alone(given: list[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    with contextlib.suppress(SystemExit):  # of argparse
        assert main(["run", *given]) == code
    return capsys.readouterr().err


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--placement", "none.json"], "there is no file none.json"),
        (["--resume"], "--checkpoint"),
        (["--checkpoint-every", "2"], "--checkpoint"),
        (["--sync", "fp16,period=4"], "takes no period"),
        (["--checkpoint", "run.json", "--sync", "asgd"], "asgd cannot go on"),
        (["--timeout-s", "0"], "--timeout-s 0.0"),
        (["--timeout-s", "inf"], "--timeout-s inf is not above 0 and at most 1,000,000"),
    ],
)
def test_bad_usage_is_refused_before_anything_starts(
    more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in alone([*prepared(tmp_path)(2), *more], capsys)


def test_a_placement_says_whether_it_is_of_inference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = prepared(tmp_path)(2)
    error = alone([*words, "--inference"], capsys)
    assert "the placement is of a training step: leave --inference out" in error
    path = tmp_path / "placement.json"
    content = json.loads(path.read_text())
    forward = {op for op in content["devices"] if phase_of(op) == "forward"}
    parts = {
        key: {op: value for op, value in content[key].items() if op in forward}
        for key in ("devices", "priority")
    }
    changed(path, **parts)
    at = words.index("--lr")
    del words[at : at + 2]
    for option in (["--resume"], ["--lr", "0.1"], ["--optimizer", "adam"], ["--sync", "bmuf"]):
        assert f"{option[0]} is for training" in alone([*words, *option], capsys)


@pytest.mark.slow
def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    words = prepared(tmp_path)(2, checkpoint=tmp_path / "run.json", sync="ma")
    other = with_other_priorities(tmp_path / "placement.json", tmp_path / "other.json")
    refused = {
        "run with lr 0.1, this one has 0.2": ["--lr", "0.2"],
        "a run with period None, this one has 2": ["--sync", "ma,period=2"],
        "a run with placement ": ["--placement", other],
    }
    runs = [(0, words), *((0, [*words, "--resume", *more]) for more in refused.values())]
    [[(code, _, err), *results]] = on_ranks(1, run_in_turn, runs, joined=False)
    assert code == 0, err
    resumed = on_ranks(2, rank, [*words, "--resume"], joined=False)
    for message, (code, _, err) in [
        *zip(refused, results, strict=True),
        *(("run with 1 ranks, this one has 2", result) for result in resumed),
    ]:
        assert code == 2
        assert message in err


def changed(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.slow
def test_a_placement_of_another_model_is_bad_usage(tmp_path: Path) -> None:
    words = prepared(tmp_path)(2)
    changed(tmp_path / "placement.json", graph="other")
    [(code, out, err)] = on_ranks(1, rank, [*words, "--json"], joined=False)
    assert code == 2
    assert "this placement was made for graph other, not for" in err
    assert out == ""


def test_a_placement_that_cannot_be_run_is_refused_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = prepared(tmp_path)(2)
    (tmp_path / "target.py").write_text("raise RuntimeError('loaded')")
    changed(tmp_path / "placement.json", micro_batches=2)
    error = alone(words, capsys)
    assert "splits a step into 2 micro-batches" in error
    assert "loaded" not in error
