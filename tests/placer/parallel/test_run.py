"""Runs of several ranks, from command-line arguments to output."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from envs.hardware.cluster import Link
from envs.hardware.discover import present
from envs.replication import Batch, Replication
from graphs.extract import Workload
from placer.cli.main import main
from placer.job import Job, SearchConfig
from placer.parallel.training import STATE_FORMAT
from placer.replicate.plan import plan_job
from placer.sources.target import load_function, load_step
from placer.state_file import read_state
from tests.helpers.ranks import on_ranks
from tests.helpers.runs import arguments, placed, ran, rank, written

NORM = "nn.BatchNorm1d(16), "  # its statistics are per pass


def losses_in_one_process(
    target: str, steps: int, *, ranks: int = 2, passes: int = 1, cut: int = 1
) -> list[float]:
    """Return mean losses of rank 0's passes while training on the mean loss of all ranks.

    ``cut`` is the number of passes per batch.
    """
    torch.manual_seed(0)
    step = load_step(f"{target}:build", training=True)
    batch = cast("Callable[[int], tuple[Tensor, ...]]", load_function(f"{target}:batch"))
    sgd = torch.optim.SGD(step.model.parameters(), lr=0.1)
    losses = []
    for number in range(steps):
        every = ranks * passes
        shards = [
            [part.chunk(cut)[k] for part in batch((number * every) // cut + i)]
            for i in range(every // cut)
            for k in range(cut)
        ]
        of_passes = [loss_of(step, tuple(shard)) for shard in shards]
        losses.append(torch.stack(of_passes[:passes]).mean().item())
        sgd.zero_grad()
        torch.autograd.backward(torch.stack(of_passes).mean())
        sgd.step()
    return losses


def loss_of(step: Workload, inputs: Any) -> Tensor:
    given = Workload.of(step.model, inputs, step.loss)
    output = step.model(*given.model_inputs, **given.keywords)
    return output if step.loss is None else step.loss(output, given.inputs[-1])


def test_replicas_train_as_one_process_and_say_what_they_do(tmp_path: Path) -> None:
    target = written(tmp_path)
    placement = placed(f"{target}:build", tmp_path / "placement.json", "cpu")
    given = arguments(target, placement, 5, data=f"{target}:batch")
    (code, out, err), (_, other, _) = on_ranks(2, rank, given, joined=False)
    assert code == 0
    assert err.startswith("2 replicas on 1 device each, kept in sync by allreduce, seed 0")
    told = [float(line.split()[-1]) for line in out.splitlines() if line.startswith("step")]
    expected = losses_in_one_process(target, 5)
    np.testing.assert_allclose(told, expected, rtol=1e-5)
    assert not other


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("onebit", "after 200 plain steps, and this run has 2"),
        ("onebit,warmup-steps=1", ""),
        ("onebit,warmup-steps=2", "after 2 plain steps"),
    ],
)
def test_a_run_says_when_its_method_begins(given: str, told: str, tmp_path: Path) -> None:
    target = written(tmp_path)
    placement = placed(f"{target}:build", tmp_path / "placement.json", "cpu")
    options = arguments(target, placement, 2, sync=given)
    [(code, _, err)] = on_ranks(1, rank, options, joined=False)
    assert code == 0, err
    assert told in err
    assert ("plain steps" in err) is bool(told)


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


@pytest.mark.parametrize("batch", ["per-replica", "global"])
def test_a_plan_runs_as_it_was_planned(batch: Batch, tmp_path: Path) -> None:
    target = written(tmp_path)
    (tmp_path / "target.py").write_text((tmp_path / "target.py").read_text().replace(NORM, ""))
    path = tmp_path / "placement.json"
    names = [f"core:{core}" for core in sorted(os.sched_getaffinity(0))[:2]]
    wanted = Replication(replicas=2, batch=batch, accumulate=2, reduction="ring")
    plan = planned(f"{target}:build", path, names, wanted)
    assert plan.groups == tuple((name,) for name in names)
    given = arguments(target, path, 4, data=f"{target}:batch")
    (code, out, err), _ = on_ranks(2, rank, given, joined=False)
    assert code == 0, err
    assert "by allreduce, seed 0, 2 passes a step" in err
    assert err.count("the plan assumes ring") == 1
    told = [float(line.split()[-1]) for line in out.splitlines() if line.startswith("step")]
    cut = 4 if batch == "global" else 1
    expected = losses_in_one_process(target, 4, passes=2, cut=cut)
    np.testing.assert_allclose(told, expected, rtol=1e-5)


def test_a_plan_for_more_replicas_or_devices_that_are_not_here_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = written(tmp_path)
    path = placed(f"{target}:build", tmp_path / "placement.json", "cpu")
    content = json.loads(path.read_text())
    content["replicas"] = {"groups": [["cpu"], ["n1:cpu"]]}
    path.write_text(json.dumps(content))
    given = arguments(target, path, 2)
    told = alone(given, capsys)
    assert "this run has 1 rank: start torchrun --nnodes=2" in told
    content["replicas"] = {"groups": [["n0:g90"]]}
    content["devices"] = dict.fromkeys(content["devices"], "n0:g90")
    path.write_text(json.dumps(content))
    assert "rank 0, on cuda:90: there is no device cuda:90" in alone(given, capsys)
    del content["replicas"]
    content["devices"] = dict.fromkeys(content["devices"], "cuda:91")
    path.write_text(json.dumps(content))
    assert "rank 0, on cuda:91: there is no device cuda:91" in alone(given, capsys)


def test_a_run_that_resumes_from_a_checkpoint_has_the_same_losses(tmp_path: Path) -> None:
    target = written(tmp_path, dropout=0.2)
    placement = placed(f"{target}:build", tmp_path / "placement.json", "cpu")
    checkpoint = tmp_path / "run.json"
    options: dict[str, object] = {"data": f"{target}:batch", "optimizer": "adam"}
    whole = ran(2, *arguments(target, placement, 12, **options))
    options["checkpoint"] = checkpoint
    first = ran(2, *arguments(target, placement, 6, **options), "--resume")
    assert first["losses"] == whole["losses"][:6]
    later = ran(2, *arguments(target, placement, 12, **options), "--resume")
    assert later["first_step"] == 6
    assert later["losses"] == whole["losses"]
    assert sorted(path.name for path in tmp_path.glob("run.json*")) == [
        *("run.json", "run.json.12.0", "run.json.12.1")
    ]


def test_training_by_blocks_stops_at_a_border_and_goes_on_to_the_same_model(
    tmp_path: Path,
) -> None:
    target = written(tmp_path, dropout=0.2)
    placement = placed(f"{target}:build", tmp_path / "placement.json", "cpu")
    options: dict[str, object] = {"sync": "bmuf", "period": 3, "data": f"{target}:blocks"}
    whole, parts = tmp_path / "whole.json", tmp_path / "parts.json"
    ran(2, *arguments(target, placement, 12, checkpoint=whole, **options))  # 4 blocks, 2 sweeps
    ran(2, *arguments(target, placement, 6, checkpoint=parts, **options))
    ran(2, *arguments(target, placement, 12, checkpoint=parts, **options), "--resume")
    for number in range(2):
        ends = [
            read_state(path.with_name(f"{path.name}.12.{number}"), STATE_FORMAT)
            for path in (whole, parts)
        ]
        assert ends[0]["losses"] == ends[1]["losses"]
        torch.testing.assert_close(ends[0]["module"], ends[1]["module"], rtol=0, atol=0)
        torch.testing.assert_close(ends[0]["sync"], ends[1]["sync"], rtol=0, atol=0)


@pytest.mark.slow
def test_dropout_on_pinned_cores_goes_on_from_a_checkpoint_and_differs_between_ranks(
    tmp_path: Path,
) -> None:
    target = written(tmp_path, dropout=0.5)
    core = f"core:{min(os.sched_getaffinity(0))}"
    placement = placed(f"{target}:build", tmp_path / "placement.json", core)
    options: dict[str, object] = {"data": f"{target}:same"}
    kept = tmp_path / "run.json"
    whole = ran(2, *arguments(target, placement, 6, checkpoint=tmp_path / "whole.json", **options))
    first = ran(2, *arguments(target, placement, 3, checkpoint=kept, **options))
    assert first["losses"] == whole["losses"][:3]
    later = ran(2, *arguments(target, placement, 6, checkpoint=kept, **options), "--resume")
    assert later["losses"] == whole["losses"]
    mine, theirs = (
        read_state(tmp_path / f"whole.json.6.{r}", STATE_FORMAT)["losses"][0] for r in range(2)
    )
    assert mine != theirs  # same batch, same model


def with_own_placement(folder: Path, given: list[str]) -> tuple[int, str, str]:
    own = str(folder / f"placement{int(os.environ['RANK']) == 1:d}.json")
    return rank([own if text == "PLACEMENT" else text for text in given])


def test_ranks_with_different_placements_are_refused_by_name(tmp_path: Path) -> None:
    target = written(tmp_path)
    first = placed(f"{target}:build", tmp_path / "placement0.json", "cpu")
    content = json.loads(first.read_text())
    content["priority"] = dict.fromkeys(content["priority"], 1.0)
    (tmp_path / "placement1.json").write_text(json.dumps(content))
    given = arguments(target, Path("PLACEMENT"), 2)
    for number, (code, _, err) in enumerate(
        on_ranks(3, with_own_placement, tmp_path, given, joined=False)
    ):
        assert code == 1
        assert f"rank {number}: placements: ranks differ (ranks 0, 2: " in err


def alone(given: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with contextlib.suppress(SystemExit):  # of argparse
        assert main(["run", *given]) == 2
    return capsys.readouterr().err


def test_bad_usage_is_told_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = written(tmp_path)
    given = arguments(target, tmp_path / "none.json", 2)
    assert "none.json" in alone(given, capsys)
    assert "--checkpoint" in alone([*given, "--resume"], capsys)
    assert "--checkpoint" in alone([*given, "--checkpoint-every", "2"], capsys)
    assert "takes no period" in alone([*given, "--sync", "fp16,period=4"], capsys)
    kept = ["--checkpoint", str(tmp_path / "run.json")]
    assert "asgd cannot go on" in alone([*given, *kept, "--sync", "asgd"], capsys)
    assert "--timeout-s 0.0" in alone([*given, "--timeout-s", "0"], capsys)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    target = written(tmp_path)
    placement = placed(f"{target}:build", tmp_path / "placement.json", "cpu")
    kept = tmp_path / "run.json"
    ran(1, *arguments(target, placement, 2, checkpoint=kept))
    for ranks, options, why in (
        (1, {"lr": 0.2}, "run with lr 0.1, this one has 0.2"),
        (2, {}, "run with 1 ranks, this one has 2"),
    ):
        given = [*arguments(target, placement, 4, checkpoint=kept, **options), "--resume"]
        for code, _, err in on_ranks(ranks, rank, given, joined=False):
            assert code == 1
            assert why in err


def test_a_checkpoint_of_another_placement_or_with_fewer_options_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = written(tmp_path)
    placement = placed(f"{target}:build", tmp_path / "placement.json", "cpu")
    kept = tmp_path / "run.json"
    given = arguments(target, placement, 2, checkpoint=kept, sync="ma")
    ran(1, *given)
    [(code, _, err)] = on_ranks(
        1, rank, [*given, "--resume", "--sync", "ma,period=2"], joined=False
    )
    assert code == 1
    assert "a run with period None, this one has 2" in err
    content = json.loads(placement.read_text())
    content["priority"] = dict.fromkeys(content["priority"], 1.0)
    placement.write_text(json.dumps(content))
    [(code, _, err)] = on_ranks(1, rank, [*given, "--resume"], joined=False)
    assert code == 1
    assert "a run with placement " in err


def with_own_options(given: list[str], *own: str) -> tuple[int, str, str]:
    return rank([*given, *own] if os.environ["RANK"] == "1" else given)


def test_ranks_that_would_resume_otherwise_are_refused(tmp_path: Path) -> None:
    target = written(tmp_path)
    placement = placed(f"{target}:build", tmp_path / "placement.json", "cpu")
    given = arguments(target, placement, 2, checkpoint=tmp_path / "run.json")
    for code, _, err in on_ranks(2, with_own_options, given, "--resume", joined=False):
        assert code == 1
        assert "the options of the run: ranks differ (" in err
