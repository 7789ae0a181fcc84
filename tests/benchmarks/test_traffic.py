"""Bytes that the methods to synchronize replicas send."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from placer.parallel import SyncConfig, make_sync
from placer.parallel.methods.registry import method_named
from tests.helpers.ranks import on_ranks


@contextmanager
def own_network() -> Iterator[Path | None]:
    """Yield a network namespace with only a loopback device, or None where not permitted."""
    if os.geteuid() != 0 or shutil.which("nsenter") is None or shutil.which("ip") is None:
        yield None
        return
    holder = subprocess.Popen(["unshare", "-n", "sleep", "3600"], stderr=subprocess.DEVNULL)
    try:
        namespace = Path("/proc", str(holder.pid), "ns", "net")
        own = Path("/proc/self/ns/net").readlink()
        while holder.poll() is None and namespace.readlink() == own:
            pass  # until unshare has made it
        up = ["nsenter", "-t", str(holder.pid), "-n", "ip", "link", "set", "lo", "up"]
        fails = holder.poll() is not None or subprocess.run(up, check=False).returncode
        yield None if fails else namespace
    finally:
        holder.kill()
        holder.wait()


WIDTHS = (32, 256, 256, 10)
SIZE_BYTES = 4 * sum((a + 1) * b for a, b in pairwise(WIDTHS))
PERIOD = 16


@pytest.fixture(scope="module")
def network() -> Iterator[Path]:
    with own_network() as found:
        if found is None:
            pytest.skip("counting bytes takes a network namespace, which takes root")
        yield found


def model() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in pairwise(WIDTHS):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers)


def received_bytes() -> int:
    """Return the bytes that all sockets of the network have received, without packet headers.

    Unlike the counters of the loopback device they do not depend on how busy the machine is: no
    acknowledgements, no repeated packets.
    """
    dist.barrier()
    sockets = subprocess.run(["ss", "-tinH"], capture_output=True, text=True, check=True).stdout
    dist.barrier()
    return sum(map(int, re.findall(r"bytes_received:(\d+)", sockets)))


def bytes_per_step(name: str, warm_steps: int, steps: int) -> float:
    """Return the bytes that all ranks send in a step, after uncounted warm-up steps."""
    replica = model()
    given: dict[str, Any] = {"period": PERIOD, "warmup_steps": warm_steps}
    options = {k: v for k, v in given.items() if k in method_named(name).options}
    config = SyncConfig(method=name, **options)
    sync = make_sync(replica, partial(torch.optim.SGD, lr=0.01), config)
    begin = 0
    for number in range(warm_steps + steps):
        if number == warm_steps:
            begin = received_bytes()
        sync.zero_grad()
        loss = F.mse_loss(replica(torch.randn(4, WIDTHS[0])), torch.randn(4, WIDTHS[-1]))
        torch.autograd.backward(loss)
        sync.step()
    return (received_bytes() - begin) / steps


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def synchronous(ranks: int, network: Path) -> float:
    """Return the bytes per step of all-reduce in full precision."""
    return on_ranks(ranks, bytes_per_step, "allreduce", 2, PERIOD, network=network)[0]  # type: ignore[no-any-return]


def least_bytes(ranks: int) -> float:
    """Return the total bytes of a ring: each rank sends 2 (p - 1) / p of its gradients."""
    return 2 * (ranks - 1) * SIZE_BYTES


def test_synchronous_replicas_send_what_a_ring_must(ranks: int, synchronous: float) -> None:
    assert least_bytes(ranks) < synchronous < 1.005 * least_bytes(ranks)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("fp16", 1.99, 2.01),
        ("bf16", 1.99, 2.01),
        ("onebit", 25.0, 32.0),
        ("bmuf", PERIOD * 0.99, PERIOD * 1.01),
        ("ma", PERIOD * 0.99, PERIOD * 1.01),
        ("diloco", PERIOD * 0.99, PERIOD * 1.01),
        ("powersgd", 8.0, 40.0),
    ],
)
def test_others_send_so_many_times_less(
    ranks: int, synchronous: float, network: Path, name: str, least: float, most: float
) -> None:
    # whole blocks must be counted, and they start with the first step
    warm = 0 if name in ("bmuf", "ma", "diloco") else 2
    counted = on_ranks(ranks, bytes_per_step, name, warm, PERIOD, network=network)[0]
    assert least <= synchronous / counted <= most
