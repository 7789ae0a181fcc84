"""Memory of fake devices that several processes share."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from envs.executors.device_workers import placed_step
from envs.executors.device_workers.placed_step import PlacedStep
from envs.executors.device_workers.sharing import Handle, Sharing
from envs.torch_runtime import worker_executor
from tests.fake_cuda.machine import Machine, fake_cuda, machine
from tests.fake_cuda.memory import GARBAGE
from tests.fake_cuda.tensors import CudaTensor, Place

LOST: Final = "uncorrectable ECC error encountered"


@dataclass(frozen=True)
class FakeSharing(Sharing):
    """Gives every process of a GPU a fake machine, whose streams have an order of their own."""

    devices: int
    seed: int = 0
    memory_bytes: int = 1 << 40
    losing: int | None = None  # the number of a GPU that is lost once its process has begun

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        if device.type != "cuda":
            yield
            return
        index = device.index or 0
        seed = self.seed if self.seed < 2 else self.seed + 10 * index
        with fake_cuda(self.devices, seed=seed, memory_bytes=self.memory_bytes):
            torch.cuda.set_device(device)
            yield

    def lock_pages(self, memory: Tensor) -> None:
        start = memory.data_ptr()
        machine().locked.append(range(start, start + memory.nbytes))
        if torch.cuda.current_device() == self.losing:
            machine().queues.lose(machine().devices[self.losing], LOST)

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Handle]:
        size_bytes = max(torch.empty(tuple(shape), dtype=dtype).nbytes, 1)
        file = os.memfd_create("fake-gpu")
        os.ftruncate(file, size_bytes)
        path = f"/proc/{os.getpid()}/fd/{file}"
        tensor = opened(path, tuple(shape), dtype, device)
        tensor.place.memory.fill_(GARBAGE)
        return tensor, (opened, (path, tuple(shape), dtype, device))


@contextmanager
def shared_by_processes(memory_bytes: int, devices: int = 1) -> Iterator[None]:
    """Let all processes that drive GPUs have fake ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placed_step, "SHARING", FakeSharing(devices, memory_bytes=memory_bytes))
        yield


def lost_when_placed(fake: Machine, number: int, patch: pytest.MonkeyPatch) -> None:
    """Lose a GPU, here and in the process that drives it, once a placement there is to be run."""
    place = worker_executor.placed_step

    def losing(extraction: Any, calls: Any, devices: Any, *more: Any, **named: Any) -> PlacedStep:
        if fake.devices[number] in devices:
            fake.queues.lose(fake.devices[number], LOST)
            sharing = FakeSharing(len(fake.devices), losing=number)
            patch.setattr(placed_step, "SHARING", sharing)
        return place(extraction, calls, devices, *more, **named)

    patch.setattr(worker_executor, "placed_step", losing)


def opened(
    path: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> CudaTensor:
    """Return a tensor on a fake device in the memory of a file."""
    with open(path, "r+b") as file:  # noqa: PTH123  # Path.open resolves the link
        memory = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
    return CudaTensor(torch.zeros(shape, dtype=dtype), Place(memory, device, None))
