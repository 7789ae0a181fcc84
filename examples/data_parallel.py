"""Data parallelism combined with placement: ``python examples/data_parallel.py``.

How many replicas, of how many devices each, are best on eight H100s? The plan for ``8xh100.toml``
needs none of them. Then two replicas train on two cores of this machine, one torchrun rank each,
and reduce their gradients as planned.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import placer

HERE = Path(__file__).parent
WIDTH = 1024
FILE = "replicas.json"


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
            for _ in range(2)
        )
        self.head = nn.Linear(2 * WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.cat([self.left(x), self.right(x)], dim=1))
        return logits


def build() -> tuple[nn.Module, tuple[Tensor, Tensor], Callable[..., Tensor]]:
    """Return the model, example inputs and the loss; ``placer.run`` calls it in every rank."""
    torch.manual_seed(0)
    return TwoTowers(), (torch.randn(64, WIDTH), torch.randint(10, (64,))), F.cross_entropy


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Return batch ``number``, with labels that can be learnt."""
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(number))
    return x, (x[:, 0] > 0).long()


def plan(devices: str | Path, replicas: int | str, budget: str) -> placer.Result:
    model, inputs, loss = build()
    return placer.optimize(
        model,
        inputs,
        loss=loss,
        devices=devices,
        replicas=replicas,
        budget=budget,
        progress=False,
    )


def main() -> None:
    found = plan(HERE / "8xh100.toml", "auto", "2000e")
    assert isinstance(found, placer.ReplicatedResult)
    for split in found.replication.shown:
        told = f"{split.samples_per_s:,.0f} samples/s" if split.step is not None else split.why
        print(f"{split.name}: {told}")
    best = found.replication.best
    print(f"{best.name} is the fastest: a step of {best.step_s * 1e3:.1f} ms")

    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        print("one core alone: nothing is trained")
        return
    plan(",".join(f"core:{core}" for core in cores), 2, "100e").save(FILE)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    run = ["-m", "placer.run", f"{__file__}:build", "--data", f"{__file__}:batch"]
    options = ["--placement", FILE, "--steps", "10", "--optimizer", "adam", "--lr", "0.001"]
    subprocess.run([*torchrun, *run, *options], check=True)


if __name__ == "__main__":
    main()
