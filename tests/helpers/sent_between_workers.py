"""Scenarios of the transport between workers, in one process.

Two workers with a fake GPU each, and the parent, take turns. As in
:mod:`tests.helpers.overlapping` each takes the seed of the order in which streams run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Final

import pytest
import torch
from torch import Tensor

from envs.executors.device_workers import transport
from envs.executors.device_workers.sources import PARENT, Edge
from envs.executors.device_workers.transport import HostMemory, Transport
from tests.fake_cuda import fake_cuda
from tests.fake_cuda.sharing import FakeSharing
from tests.helpers.overlapping import FIRST, OTHER, SIZE, assert_equal, busy

DEVICES: Final = (FIRST, OTHER)
ACROSS, OUT = 0, 1
EDGES: Final = (
    Edge(0, 1, (SIZE,), torch.float32),
    Edge(0, PARENT, (SIZE,), torch.float32),
)


@contextmanager
def workers(seed: int) -> Iterator[tuple[Transport, Transport, HostMemory]]:
    """Yield the transports of both workers, and their memory; a thread must not sleep for long."""
    sharing = FakeSharing(len(DEVICES), seed)
    with fake_cuda(len(DEVICES), seed=seed), pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "time", SimpleNamespace(sleep=never_there))
        memory = HostMemory(EDGES, DEVICES)
        file = os.memfd_create("host")
        os.ftruncate(file, memory.size_bytes)
        memory.map(file)
        os.close(file)
        sharing.lock_pages(memory.bytes)
        sender, reader = (Transport(number, DEVICES, EDGES, memory) for number in range(2))
        sender.open(sharing, reader.shared(sharing))
        yield sender, reader, memory


def never_there(_: float) -> None:
    raise AssertionError("the flag does not come")


def made(factor: int) -> Tensor:
    return torch.arange(float(SIZE)).to(FIRST) * factor


def steps_of_two_workers(seed: int) -> None:
    """The sender frees what it sent, and places are written again in the next step."""
    with workers(seed) as (sender, reader, memory), torch.no_grad():
        results, on_host = [], []
        # every process has streams of its own on all devices
        of_sender: torch.cuda.Stream = torch.cuda.Stream(OTHER)  # type: ignore[no-untyped-call]  # torch leaves it so
        for step in range(1, 4):
            for worker in (sender, reader):
                worker.begin(step)
            for edge in (ACROSS, OUT):
                with torch.cuda.stream(of_sender):
                    sender.send(edge, made(step))
                busy(FIRST)
            results.append(reader.receive(ACROSS) * 3)
            for worker in (sender, reader):
                worker.end()
            on_host.append(memory.tensors()[OUT].clone())
        for step, (found, sent) in enumerate(zip(results, on_host, strict=True), 1):
            assert_equal(found, torch.arange(float(SIZE)) * step * 3)
            assert_equal(sent, torch.arange(float(SIZE)) * step)


def sending_leaves_compute_alone(_: int) -> None:
    """Check that a GPU which has sent something goes on computing during the copy."""
    with workers(0) as (sender, _reader, memory), torch.no_grad():
        sender.begin(1)  # of all orders only the latest, seed 0, leaves the copy pending
        sender.send(OUT, made(1))
        busy(FIRST)
        torch.cuda.current_stream(FIRST).synchronize()
        assert memory.seen[OUT] == 0, "the copy is still to come"
        sender.end()
        assert memory.seen[OUT] == 1


TRANSPORT: Final[dict[str, Callable[[int], None]]] = {
    work.__name__: work for work in (steps_of_two_workers, sending_leaves_compute_alone)
}
