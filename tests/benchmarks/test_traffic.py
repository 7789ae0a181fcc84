"""Bytes that the methods to synchronize replicas send."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
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
from tests.helpers.ranks import each, on_ranks

WIDTHS = (32, 256, 256, 10)
SIZE_BYTES = 4 * sum((a + 1) * b for a, b in pairwise(WIDTHS))
PERIOD = 16


def model() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in pairwise(WIDTHS):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers)


def tcp_sockets() -> Iterator[socket.socket]:
    """Yield the TCP sockets of this process, those of gloo's threads included."""
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if not str(path.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(path.name))) as one:
                if one.family == socket.AF_INET and one.type == socket.SOCK_STREAM:
                    yield one


def received_bytes() -> int:
    """Return the bytes that the sockets of this rank have received, without packet headers.

    Unlike the counters of the loopback device they do not depend on how busy the machine is: no
    acknowledgements, no repeated packets.
    """
    dist.barrier()
    infos = [one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192) for one in tcp_sockets()]
    dist.barrier()
    # tcpi_bytes_received of struct tcp_info in linux/tcp.h
    return sum(int.from_bytes(info[128:136], sys.byteorder) for info in infos)


def bytes_per_step(name: str, warm_steps: int, steps: int) -> float:
    """Return the bytes that a rank receives in a step, after uncounted warm-up steps."""
    replica = model()
    short: dict[str, Any] = {"period": PERIOD, "warmup_steps": warm_steps}
    options = {k: v for k, v in short.items() if k in method_named(name).options}
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


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest) -> int:
    return int(request.param)


FEWER = {  # {method: least and most times that it sends less}
    "fp16": (1.99, 2.01),
    "bf16": (1.99, 2.01),
    "onebit": (25.0, 32.0),
    "bmuf": (PERIOD * 0.99, PERIOD * 1.01),
    "ma": (PERIOD * 0.99, PERIOD * 1.01),
    "diloco": (PERIOD * 0.99, PERIOD * 1.01),
    "powersgd": (8.0, 40.0),
}


@pytest.fixture(scope="module")
def sent(ranks: int) -> dict[str, float]:
    """Return the bytes that all ranks send per step of each method."""
    # whole blocks must be counted, and they start with the first step
    warm = {name: 0 if name in ("bmuf", "ma", "diloco") else 2 for name in ("allreduce", *FEWER)}
    cases = {name: (bytes_per_step, name, steps, PERIOD) for name, steps in warm.items()}
    of_ranks = on_ranks(ranks, each, cases)
    return {name: float(sum(own[name] for own in of_ranks)) for name in cases}


@pytest.mark.slow
def test_synchronous_replicas_send_what_a_ring_must(ranks: int, sent: dict[str, float]) -> None:
    least = 2 * (ranks - 1) * SIZE_BYTES  # each rank sends 2 (p - 1) / p of its gradients
    assert least < sent["allreduce"] < 1.005 * least


@pytest.mark.slow
@pytest.mark.parametrize("name", FEWER)
def test_others_send_so_many_times_less(name: str, sent: dict[str, float]) -> None:
    least, most = FEWER[name]
    assert least <= sent["allreduce"] / sent[name] <= most
