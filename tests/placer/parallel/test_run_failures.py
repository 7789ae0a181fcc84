"""Runs with a rank that is killed, hangs or is stopped: the others name it."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.ranks import RankError, on_ranks
from tests.helpers.runs import arguments, placed, ran, rank, told_to, written


def test_a_rank_that_is_killed_is_named_and_the_run_can_resume(tmp_path: Path) -> None:
    ranks = 2
    target = written(tmp_path, dropout=0.2, deadly=ranks * 7 + 1)  # rank 1, step 7
    placement = placed(f"{target}:build", tmp_path / "placement.json", "cpu")
    options: dict[str, object] = {"checkpoint": tmp_path / "run.json", "checkpoint_every": 3}
    data = f"{target}:deadly"
    given = arguments(target, placement, 10, data=data, timeout_s=60, **options)
    with pytest.raises(RankError, match="rank 1: it died without a word"):
        on_ranks(ranks, told_to, tmp_path / "told", given, joined=False)
    for other in {*range(ranks)} - {1}:
        told = told_by(other, tmp_path)
        assert f"rank {other}: rank 1 died or hangs: pid " in told
        assert f"(step 7 of rank {other} failed: " in told
    again = ran(ranks, *given, "--resume")
    assert again["first_step"] == 6
    assert again["losses"] == ran(ranks, *given[: given.index("--checkpoint")])["losses"]


@pytest.mark.slow
def test_a_rank_that_stands_still_is_named_after_the_timeout(tmp_path: Path) -> None:
    target = written(tmp_path, deadly=2 * 7 + 1, signal="SIGSTOP")
    placement = placed(f"{target}:build", tmp_path / "placement.json", "cpu")
    given = arguments(target, placement, 10, data=f"{target}:deadly", timeout_s=20)
    with pytest.raises(RankError, match="rank 1: it died without a word"):
        on_ranks(2, told_and_killing, tmp_path / "told", given, joined=False, timeout_s=300.0)
    assert "rank 0: rank 1 died or hangs: pid " in told_by(0, tmp_path)


def told_and_killing(path: Path, given: list[str]) -> None:
    """Write the error output to a file, then kill the process that it names."""
    told_to(path, given)
    found = re.search(r"died or hangs: pid (\d+)", told_by(0, path.parent))
    assert found is not None
    os.kill(int(found[1]), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["bmuf", "asgd"])
def test_where_ranks_seldom_meet_one_that_is_killed_is_named_by_all(
    sync: str, tmp_path: Path
) -> None:
    target = written(tmp_path, deadly=3 * 7 + 1)  # rank 1, within a block, step 7
    placement = placed(f"{target}:build", tmp_path / "placement.json", "cpu")
    options: dict[str, object] = {"period": 5} if sync == "bmuf" else {}
    given = arguments(
        target, placement, 40, data=f"{target}:deadly", timeout_s=60, sync=sync, **options
    )
    with pytest.raises(RankError, match="rank 1: it died without a word"):
        on_ranks(3, told_to, tmp_path / "told", given, joined=False)
    for other in (0, 2):
        assert f"rank {other}: rank 1 died or hangs: pid " in told_by(other, tmp_path)


STOPPED = """
import os, signal, torch
from torch import nn
from torch.nn import functional as F

class StoppedInForward(nn.Linear):
    def forward(self, x):
        if "RANK" in os.environ:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().forward(x)

def build():
    return StoppedInForward(6, 4), (torch.randn(4, 6), torch.randn(4, 4)), F.mse_loss
"""


def test_a_rank_that_is_stopped_while_its_model_is_extracted_says_so(tmp_path: Path) -> None:
    target = tmp_path / "target.py"
    target.write_text(STOPPED)
    placement = placed(f"{target}:build", tmp_path / "placement.json", "cpu")
    options = arguments(str(target), placement, 2, timeout_s=60)
    [(code, _, err)] = on_ranks(1, rank, options, joined=False)
    assert code == 1
    assert err.endswith("placer: rank 0: the launcher stopped this rank\n")


LAUNCHER = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1]])
time.sleep(60)
"""
WATCHING = """
import os, time
from placer.cli.run import exit_with
exit_with(os.getppid())
print(os.getpid(), flush=True)
time.sleep(60)
"""


def test_a_rank_ends_with_a_launcher_that_is_killed() -> None:
    start = [sys.executable, "-c", LAUNCHER, WATCHING]
    with subprocess.Popen(start, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        rank = os.pidfd_open(int(launcher.stdout.readline()))
        launcher.kill()
    ended = select.poll()
    ended.register(rank, select.POLLIN)
    assert ended.poll(30_000)
    os.close(rank)


def told_by(number: int, folder: Path) -> str:
    return (folder / f"told.{number}").read_text()


@pytest.mark.slow
def test_torchrun_starts_a_run_again_whose_killed_rank_is_named(tmp_path: Path) -> None:
    target = written(tmp_path, dropout=0.2, deadly=2 * 7 + 1)
    placement = placed(f"{target}:build", tmp_path / "placement.json", "cpu")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    kept: dict[str, object] = {"checkpoint": tmp_path / "run.json", "checkpoint_every": 3}
    given = arguments(target, placement, 10, data=f"{target}:deadly", timeout_s=60, **kept)
    found = subprocess.run(
        [*launcher, "--max-restarts", "1", "-m", "placer.run", *given, "--resume", "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert found.returncode == 0, found.stderr
    assert "placer: rank 0: rank 1 died or hangs: pid " in found.stderr
    again = json.loads(found.stdout)
    assert again["first_step"] == 6
    assert again["losses"] == ran(2, *given[: given.index("--checkpoint")])["losses"]
