"""The caching allocator of a fake device: memory belongs to the stream that it was allocated on.

Freed memory is reused by its stream at once, so from there on in its queue it holds garbage, even
if another stream is still to read it. If other streams were recorded (``record_stream``), it waits
until they have done what they had been given by then. New memory holds garbage, too: bytes of 255,
which are NaN as floats and -1 as signed integers.

Unlike torch's allocator it does not cut large pieces of memory into small ones: what is reserved
beyond tensors is what was freed and is kept for the next tensor of that size.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch

from tests.fake_cuda.streams import Mark, Queues, Stream, plainly

GARBAGE: Final = 255
ROUND_BYTES: Final = 512
MOST_WASTE: Final = 2
"""Kept memory serves a tensor of at least one such part of its size."""


@dataclass(slots=True, eq=False)
class Block:
    """Memory of a tensor and its views; freed with the last of them."""

    allocator: Allocator
    memory: torch.Tensor  # bytes
    stream: Stream
    users: dict[Stream, None] = field(default_factory=dict)  # in order, as no set is

    def record(self, stream: Stream) -> None:
        """Keep the memory from being reused before this stream has done its work."""
        if stream is not self.stream:
            self.users[stream] = None

    def __del__(self) -> None:
        self.allocator.free(self)


@dataclass(slots=True, eq=False)
class _Kept:
    """Freed memory that may be reused once all marks are done."""

    memory: torch.Tensor
    stream: Stream
    marks: list[Mark]


class Allocator:
    """Memory of one device."""

    def __init__(self, queues: Queues, device: torch.device, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.fraction = 1.0
        self.allocated_bytes = self.most_allocated_bytes = 0
        self.reserved_bytes = self.most_reserved_bytes = 0
        self._queues = queues
        self._device = device
        self._free: defaultdict[Stream, list[torch.Tensor]] = defaultdict(list)
        self._waiting: list[_Kept] = []
        self.is_open = True

    @property
    def limit_bytes(self) -> int:
        return int(self.total_bytes * self.fraction)

    def allocate(self, size_bytes: int, stream: Stream) -> Block:
        """Return memory for work on a stream.

        Raises:
            torch.OutOfMemoryError: there is not enough, even without what is kept.
        """
        self._queues.check()
        size_bytes = -(-size_bytes // ROUND_BYTES) * ROUND_BYTES
        self._collect()
        memory = self._reused(size_bytes, stream)
        if memory is None:
            if self.reserved_bytes + size_bytes > self.limit_bytes:
                self.empty_cache()
            self._check_room(size_bytes)
            with plainly():
                memory = torch.full((size_bytes,), GARBAGE, dtype=torch.uint8)
            self.reserved_bytes += size_bytes
            self.most_reserved_bytes = max(self.most_reserved_bytes, self.reserved_bytes)
        self.allocated_bytes += memory.nbytes
        self.most_allocated_bytes = max(self.most_allocated_bytes, self.allocated_bytes)
        return Block(self, memory, stream)

    def free(self, block: Block) -> None:
        """Take memory back; called when its last tensor is gone, so it must not raise."""
        self.allocated_bytes -= block.memory.nbytes
        if not self.is_open or self._queues.error:
            return
        kept = _Kept(block.memory, block.stream, [stream.end for stream in block.users])
        self._waiting.append(kept)
        if not kept.marks:
            self._collect()

    def empty_cache(self) -> None:
        """Give back what no tensor uses; the host waits for the streams that still do."""
        for kept in self._waiting:
            for mark in kept.marks:
                self._queues.finish(mark)
        self._collect()
        for stream, memories in self._free.items():
            self._queues.finish(stream.end)
            self.reserved_bytes -= sum(memory.nbytes for memory in memories)
        self._free.clear()

    def _collect(self) -> None:
        """Offer what was freed for reuse, and overwrite it where its stream might."""
        waiting, self._waiting = self._waiting, []
        for kept in waiting:
            if all(mark.is_done for mark in kept.marks):
                self._free[kept.stream].append(kept.memory)
                self._queues.issue(kept.stream, partial(kept.memory.fill_, GARBAGE))
            else:
                self._waiting.append(kept)

    def _reused(self, size_bytes: int, stream: Stream) -> torch.Tensor | None:
        fitting = [
            memory
            for memory in self._free[stream]
            if size_bytes <= memory.nbytes <= MOST_WASTE * size_bytes
        ]
        if not fitting:
            return None
        memory = min(reversed(fitting), key=lambda memory: memory.nbytes)
        self._free[stream] = [other for other in self._free[stream] if other is not memory]
        return memory

    def _check_room(self, size_bytes: int) -> None:
        if self.reserved_bytes + size_bytes <= self.limit_bytes:
            return
        raise torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {size_bytes} bytes. {self._device} allows "
            f"{self.limit_bytes} bytes, of which {self.allocated_bytes} are allocated"
        )
