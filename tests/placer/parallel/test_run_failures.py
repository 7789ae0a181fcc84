"""Runs with a rank that is killed, hangs or is stopped: the others name it."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.helpers.ranks import RankError, on_ranks
from tests.helpers.runs import all_ran, arguments, errors_to_file, placed, prepared, ran, rank


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_and_the_run_can_resume(tmp_path: Path) -> None:
    words = partial(
        prepared(tmp_path, dropout=0.2, deadly=2 * 7 + 1),  # rank 1, step 7
        10,
        "deadly",
        timeout_s=300,
        optimizer="adam",
    )
    kept = [*words(checkpoint=tmp_path / "run.json", checkpoint_every=3), "--resume"]
    with pytest.raises(RankError, match="rank 1: it died without a word"):
        on_ranks(2, errors_to_file, tmp_path / "err", kept, joined=False)
    message = errors_of(0, tmp_path)
    assert "rank 0: rank 1 died or hangs: pid " in message
    assert "(step 7 of rank 0 failed: " in message
    again, whole = all_ran(2, kept, words())
    assert again["first_step"] == 6
    assert again["losses"] == whole["losses"]


@pytest.mark.slow
def test_a_rank_that_stands_still_is_named_after_the_timeout(tmp_path: Path) -> None:
    words = prepared(tmp_path, deadly=2 * 7 + 1, signal="SIGSTOP")(10, "deadly", timeout_s=20)
    with pytest.raises(RankError, match="rank 1: it died without a word"):
        on_ranks(2, kills_who_hangs, tmp_path / "err", words, joined=False, timeout_s=300.0)
    assert "rank 0: rank 1 died or hangs: pid " in errors_of(0, tmp_path)


def kills_who_hangs(path: Path, words: list[str]) -> None:
    """Write the error output to a file, then kill the process that it names."""
    errors_to_file(path, words)
    named = re.search(r"died or hangs: pid (\d+)", errors_of(0, path.parent))
    assert named is not None
    os.kill(int(named[1]), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("sync", [{"sync": "bmuf", "period": 5}, {"sync": "asgd"}])
def test_where_ranks_seldom_meet_one_that_is_killed_is_named_by_all(
    sync: dict[str, object], tmp_path: Path
) -> None:
    prepare = prepared(tmp_path, deadly=3 * 7 + 1)  # rank 1, within a block, step 7
    words = prepare(40, "deadly", timeout_s=300, **sync)
    with pytest.raises(RankError, match="rank 1: it died without a word"):
        on_ranks(3, errors_to_file, tmp_path / "err", words, joined=False)
    for other in (0, 2):
        assert f"rank {other}: rank 1 died or hangs: pid " in errors_of(other, tmp_path)


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


@pytest.mark.slow
def test_a_rank_that_is_stopped_while_its_model_is_extracted_says_so(tmp_path: Path) -> None:
    target = tmp_path / "target.py"
    target.write_text(STOPPED)
    placement = placed(f"{target}:build", tmp_path / "placement.json", "cpu")
    options = arguments(str(target), placement, 2, timeout_s=300)
    [(code, _, err)] = on_ranks(1, rank, options, joined=False)
    assert code == 1
    assert err.endswith("placer: rank 0: the launcher stopped this rank\n")


LAUNCHER = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1]])
time.sleep(600)
"""
WATCHING = """
import os, time
from placer.cli.run import exit_with
exit_with(os.getppid())
print(os.getpid(), flush=True)
time.sleep(600)
"""


def test_a_rank_ends_with_a_launcher_that_is_killed() -> None:
    start = [sys.executable, "-c", LAUNCHER, WATCHING]
    with subprocess.Popen(start, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        rank = os.pidfd_open(int(launcher.stdout.readline()))
        launcher.kill()
    ended = select.poll()
    ended.register(rank, select.POLLIN)
    assert ended.poll(60_000)
    os.close(rank)


def errors_of(number: int, folder: Path) -> str:
    return (folder / f"err.{number}").read_text()


@pytest.mark.slow
def test_torchrun_starts_a_run_again_whose_killed_rank_is_named(tmp_path: Path) -> None:
    words = partial(prepared(tmp_path, dropout=0.2, deadly=2 * 7 + 1), 10, "deadly", timeout_s=300)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    kept = words(checkpoint=tmp_path / "run.json", checkpoint_every=3)
    done = subprocess.run(
        [*launcher, "--max-restarts", "1", "-m", "placer.run", *kept, "--resume", "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    assert "placer: rank 0: rank 1 died or hangs: pid " in done.stderr
    again = json.loads(done.stdout)
    assert again["first_step"] == 6
    assert again["losses"] == ran(2, *words())["losses"]
