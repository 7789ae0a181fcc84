"""Memory of fake devices that several processes share."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from envs.executors.device_workers import placed_step
from envs.executors.device_workers.sharing import Handle, Sharing
from tests.fake_cuda.machine import fake_cuda, machine
from tests.fake_cuda.memory import GARBAGE
from tests.fake_cuda.tensors import CudaTensor, Place


@dataclass(frozen=True)
class FakeSharing(Sharing):
    """Gives every process of a GPU a fake machine, whose streams have an order of their own."""

    devices: int
    seed: int = 0
    memory_bytes: int = 1 << 40

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


def opened(
    path: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> CudaTensor:
    """Return a tensor on a fake device in the memory of a file."""
    with open(path, "r+b") as file:  # noqa: PTH123  # Path.open resolves the link
        memory = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
    return CudaTensor(torch.zeros(shape, dtype=dtype), Place(memory, device, None))
