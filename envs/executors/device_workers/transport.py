"""Tensors on their way between the processes of devices, each with a place of its own.

A tensor that the CPU writes or reads lies in host memory, which all processes map and those of GPUs
page-lock. Between two GPUs it lies on the GPU that reads it, whose memory the other process opens
(CUDA IPC). After the tensor the stream that copied it writes the number of the step into a flag in
host memory, for which the reader's thread looks. So the writer launches on, and whatever the reader
launches after it has seen the flag comes after the copy. A step ends when all devices are idle:
then the places can be written again.
"""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from envs.executors.device_workers.sharing import Sharing
from envs.executors.device_workers.sources import PARENT, Edge

ALIGNMENT: Final = 64
FLAG_BYTES: Final = 8
EAGER_LOOKS: Final = 2000
"""Looks at a flag before the thread sleeps in between."""
SLEEP_S: Final = 20e-6
CPU: Final = torch.device("cpu")


def on_host(edge: Edge, devices: Sequence[torch.device]) -> bool:
    """Return whether the tensor of an edge lies in host memory."""
    ends = (edge.source, edge.destination)
    return any(end == PARENT or devices[end].type == "cpu" for end in ends)


class HostMemory:
    """Memory that all processes map: a flag for every edge, and tensors.

    ``size_bytes`` follows from the edges, so that all processes divide it alike.
    """

    def __init__(self, edges: Sequence[Edge], devices: Sequence[torch.device]) -> None:
        self._edges = edges
        end = FLAG_BYTES * len(edges)
        self._starts: dict[int, int] = {}
        for number, edge in enumerate(edges):
            if on_host(edge, devices):
                end = -(-end // ALIGNMENT) * ALIGNMENT
                self._starts[number] = end
                end += math.prod(edge.shape) * edge.dtype.itemsize
        self.size_bytes = max(end, ALIGNMENT)

    def map(self, descriptor: int) -> None:
        """Map the memory of a file."""
        self._mapped = mmap.mmap(descriptor, self.size_bytes)
        self.bytes = torch.frombuffer(self._mapped, dtype=torch.uint8)
        self.seen = memoryview(self._mapped)[: FLAG_BYTES * len(self._edges)].cast("q")

    def flag(self, edge: int) -> torch.Tensor:
        """Return the flag of an edge, (1,)."""
        return torch.frombuffer(self._mapped, dtype=torch.int64, count=1, offset=FLAG_BYTES * edge)

    def tensors(self) -> dict[int, torch.Tensor]:
        """Return the tensors in this memory by edge.

        None is a view of another: autograd counts writes to a tensor and all its views.
        """
        return {number: self._tensor(start, number) for number, start in self._starts.items()}

    def _tensor(self, start: int, number: int) -> torch.Tensor:
        edge = self._edges[number]
        count = math.prod(edge.shape)
        if not count:
            return torch.empty(edge.shape, dtype=edge.dtype)
        flat = torch.frombuffer(self._mapped, dtype=edge.dtype, count=count, offset=start)
        return flat.view(edge.shape)


class Transport:
    """The ends of all edges of one device.

    Once made, :meth:`shared` and then :meth:`open` are called in all processes, since GPUs open
    each other's memory.
    """

    def __init__(
        self,
        number: int,
        devices: Sequence[torch.device],
        edges: Sequence[Edge],
        memory: HostMemory,
    ) -> None:
        self.device = devices[number]
        self.step = 0
        self._edges = edges
        self._memory = memory
        self._places = memory.tensors()
        self._received = [
            n for n, e in enumerate(edges) if e.destination == number and not on_host(e, devices)
        ]
        if self.device.type == "cuda":
            sent = (n for n, edge in enumerate(edges) if edge.source == number)
            self._flags = {n: memory.flag(n) for n in sent}
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # torch leaves it so
            self._count = torch.zeros(1, dtype=torch.int64, device=self.device)

    def shared(self, sharing: Sharing) -> dict[int, Any]:
        """Allocate the places on this device; return by edge what another process opens."""
        handles: dict[int, Any] = {}
        for number in self._received:
            edge = self._edges[number]
            self._places[number], handles[number] = sharing.allocate(
                edge.shape, edge.dtype, self.device
            )
        return handles

    def open(self, sharing: Sharing, handles: Mapping[int, Any]) -> None:
        """Open the places on other GPUs to which this device writes."""
        for number, handle in handles.items():
            self._places[number] = sharing.open(handle)

    def begin(self, step: int) -> None:
        """Begin a step; steps count from 1."""
        self.step = step
        if self.device.type == "cuda":
            self._count.fill_(step)

    def end(self) -> None:
        """Wait until everything has been computed and sent."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.no_grad()
    def send(self, edge: int, value: torch.Tensor) -> None:
        """Start to send a value, which may be freed at once."""
        place = self._places[edge]
        if (value.shape, value.dtype) != (place.shape, place.dtype):
            raise RuntimeError(
                f"a tensor of {value.dtype} and shape {tuple(value.shape)} was to be {place.dtype} "
                f"and {tuple(place.shape)}"
            )
        if self.device.type != "cuda":
            place.copy_(value)
            self._memory.seen[edge] = self.step  # x86 lets no other process see it before the copy
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            place.copy_(value, non_blocking=True)
            self._flags[edge].copy_(self._count, non_blocking=True)
        value.record_stream(self._stream)

    def receive(self, edge: int) -> torch.Tensor:
        """Wait until a value is there, and return it on this device; do not write to it."""
        seen, step = self._memory.seen, self.step
        looks = 0
        while seen[edge] != step:
            self._look_at_device()
            looks += 1
            if looks > EAGER_LOOKS:
                time.sleep(SLEEP_S)
        return self.taken(edge)

    def taken(self, edge: int) -> torch.Tensor:
        """Return a value that is there."""
        place = self._places[edge]
        return place.to(self.device, non_blocking=True)

    def _look_at_device(self) -> None:
        """Raise the error of a device that has failed meanwhile."""
        if self.device.type == "cuda":
            self._stream.query()
