"""Runs on fake GPUs of which one is lost: they end with a sentence that names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.fake_cuda import fake_cuda
from tests.fake_cuda.machine import machine
from tests.helpers.ranks import on_ranks
from tests.helpers.runs import placed, rank

LOST = "uncorrectable ECC error encountered"
TARGET = """
import torch
from torch import nn
from torch.nn import functional as F
from tests.placer.parallel.test_lost_gpus import lose

def build():
    return nn.Linear(6, 4), (torch.randn(4, 6), torch.randn(4, 4)), F.mse_loss

def losing(number):
    if number == 3:
        lose()
    return torch.ones(4, 6), torch.ones(4, 4)
"""


def lose() -> None:
    queues, device = machine().queues, machine().devices[1]
    queues.lose(device, f"{LOST}\n" + 100 * "advice of CUDA\n")


def by_gloo(words: list[str], is_lost: bool) -> tuple[int, str, str]:
    """Run a rank on fake GPUs, which NCCL does not know."""
    join = dist.init_process_group

    def joined(_: Any, *arguments: Any, **named: Any) -> None:
        join("gloo", *arguments, **named)

    dist.init_process_group = joined  # type: ignore[assignment]  # takes any arguments, passes them on
    with fake_cuda(2):
        if is_lost:
            lose()
        return rank(words)


def placed_words(folder: Path, *, training: bool = True) -> list[str]:
    """Return the words of a run on the second of two GPUs, which is lost in step 3."""
    path = folder / "target.py"
    path.write_text(TARGET)
    with fake_cuda(2):
        file = placed(f"{path}:build", folder / "placement.json", "cuda:1", training=training)
    mode = [] if training else ["--inference"]
    data = ["--data", f"{path}:losing"]
    return [f"{path}:build", "--placement", str(file), "--steps", "5", *data, *mode]


@pytest.mark.slow_repeats
@pytest.mark.parametrize("when", ["before", "in step 3"])
@pytest.mark.parametrize("mode", ["training", "inference"])
def test_a_gpu_that_is_lost_ends_the_run_with_its_name(
    mode: str, when: str, tmp_path: Path
) -> None:
    training = mode == "training"
    words = placed_words(tmp_path, training=training)
    [(code, out, err)] = on_ranks(1, by_gloo, words, when == "before", joined=False)
    assert code == 1
    assert len(out.splitlines()) == (3 if training and when != "before" else 0)
    where = "rank 0: " if training else ""
    sentence = f"placer: {where}cuda:1 cannot be used: CUDA error: {LOST}"
    assert err.splitlines()[-1] == sentence


def test_a_rank_joins_the_others_when_its_first_gpu_is_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    current: list[int] = []

    def joining(*_: Any, **__: Any) -> None:
        current.append(torch.cuda.current_device())
        raise RuntimeError("that is enough")

    words = placed_words(tmp_path)
    monkeypatch.setattr(dist, "init_process_group", joining)
    with fake_cuda(2):
        assert rank(words)[0] == 1
    assert current == [1]
