"""The caching allocator of a fake device: memory belongs to the stream that it was allocated on.

Freed memory is reused by its stream at once, so from there on in its queue it holds garbage, even
if another stream is still to read it. If other streams were recorded (``record_stream``), it waits
until they have done what they had been given by then. New memory holds garbage, too: bytes of 255,
which are NaN as floats and -1 as signed integers.

What is reserved beyond tensors is what was freed and is kept for the next tensor of that size. With
``segment_bytes`` tensors of up to half a segment are cut out of segments, as by torch's allocator:
a segment with a tensor in it is reserved, and gaps in it may be too small for the next one.

Page-locked memory of the host is counted, too.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

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
    segment: Segment | None = None
    users: dict[Stream, None] = field(default_factory=dict)  # in order, as no set is

    def record(self, stream: Stream) -> None:
        """Keep the memory from being reused before this stream has done its work."""
        if stream is not self.stream:
            self.users[stream] = None

    def __del__(self) -> None:
        self.allocator.free(self)


@dataclass(slots=True, eq=False)
class Segment:
    """Memory that is cut into blocks, and its gaps, (start, end) in order."""

    memory: torch.Tensor
    gaps: list[tuple[int, int]]

    @property
    def is_free(self) -> bool:
        return self.gaps == [(0, self.memory.nbytes)]

    def smallest_gap(self, size_bytes: int) -> tuple[int, int] | None:
        """Return the smallest gap that is as large as this."""
        large = [gap for gap in self.gaps if gap[1] - gap[0] >= size_bytes]
        return min(large, key=lambda gap: gap[1] - gap[0], default=None)

    def cut(self, gap: tuple[int, int], size_bytes: int) -> torch.Tensor:
        """Return the first bytes of a gap."""
        start, end = gap
        rest = [(start + size_bytes, end)] if end - start > size_bytes else []
        at = self.gaps.index(gap)
        self.gaps[at : at + 1] = rest
        return self.memory[start : start + size_bytes]

    def take_back(self, memory: torch.Tensor) -> None:
        """Join what was cut out with the gaps beside it."""
        start = int(memory.storage_offset())
        joined: list[tuple[int, int]] = []
        for begin, end in sorted([*self.gaps, (start, start + memory.nbytes)]):
            if joined and joined[-1][1] == begin:
                joined[-1] = (joined[-1][0], end)
            else:
                joined.append((begin, end))
        self.gaps = joined


@dataclass(slots=True, eq=False)
class _Kept:
    """Freed memory that may be reused once all marks are done."""

    memory: torch.Tensor
    stream: Stream
    segment: Segment | None
    marks: list[Mark]


class Allocator:
    """Memory of one device."""

    def __init__(self, queues: Queues, device: torch.device, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.segment_bytes = 0
        self.library_bytes = 0  # that libraries take at the first product, beside tensors
        self.loaded_bytes = 0
        self.fraction = 1.0
        self.allocated_bytes = self.most_allocated_bytes = 0
        self.reserved_bytes = self.most_reserved_bytes = 0
        self._queues = queues
        self._device = device
        self._free: defaultdict[Stream, list[torch.Tensor]] = defaultdict(list)
        self._waiting: list[_Kept] = []
        self._segments: defaultdict[Stream, list[Segment]] = defaultdict(list)
        self.is_open = True

    @property
    def limit_bytes(self) -> int:
        return min(int(self.total_bytes * self.fraction), self.total_bytes - self.loaded_bytes)

    @property
    def free_bytes(self) -> int:
        """Return what neither this allocator nor the libraries have taken."""
        return self.total_bytes - self.loaded_bytes - self.reserved_bytes

    def load_libraries(self) -> None:
        """Take the memory of libraries, once."""
        if self.loaded_bytes == self.library_bytes:
            return
        if self.library_bytes > self.free_bytes:
            raise torch.AcceleratorError("CUDA error: out of memory")
        self.loaded_bytes = self.library_bytes

    def allocate(self, size_bytes: int, stream: Stream) -> Block:
        """Return memory for work on a stream.

        Raises:
            torch.OutOfMemoryError: there is not enough, even without what is kept.
        """
        self._queues.check(self._device)
        size_bytes = -(-size_bytes // ROUND_BYTES) * ROUND_BYTES
        self._collect()
        segment = None
        if size_bytes <= self.segment_bytes // 2:
            segment, memory = self._cut(size_bytes, stream)
        else:
            reused = self._reused(size_bytes, stream)
            memory = self._reserved(size_bytes) if reused is None else reused
        self.allocated_bytes += memory.nbytes
        self.most_allocated_bytes = max(self.most_allocated_bytes, self.allocated_bytes)
        return Block(self, memory, stream, segment)

    def _reserved(self, size_bytes: int) -> torch.Tensor:
        """Return new memory; if the limit leaves no room, what is kept is given back first."""
        if self.reserved_bytes + size_bytes > self.limit_bytes:
            self.empty_cache()
        self._check_room(size_bytes)
        self.reserved_bytes += size_bytes
        self.most_reserved_bytes = max(self.most_reserved_bytes, self.reserved_bytes)
        with plainly():
            return torch.full((size_bytes,), GARBAGE, dtype=torch.uint8)

    def _cut(self, size_bytes: int, stream: Stream) -> tuple[Segment, torch.Tensor]:
        """Return memory in a segment of the stream, and the segment."""
        gaps = [
            (gap[1] - gap[0], number, gap)
            for number, segment in enumerate(self._segments[stream])
            if (gap := segment.smallest_gap(size_bytes)) is not None
        ]
        if not gaps:
            memory = self._reserved(self.segment_bytes)
            self._segments[stream].append(Segment(memory, [(0, memory.nbytes)]))
            gaps = [(memory.nbytes, -1, (0, memory.nbytes))]
        _, number, gap = min(gaps)
        segment = self._segments[stream][number]
        with plainly():
            return segment, segment.cut(gap, size_bytes)

    def free(self, block: Block) -> None:
        """Take memory back; called when its last tensor is gone, so it must not raise."""
        self.allocated_bytes -= block.memory.nbytes
        if not self.is_open or self._queues.error or self._device in self._queues.lost:
            return
        marks = [stream.end for stream in block.users]
        kept = _Kept(block.memory, block.stream, block.segment, marks)
        self._waiting.append(kept)
        if not kept.marks:
            self._collect()

    def empty_cache(self) -> None:
        """Give back what no tensor uses; the host waits for the streams that still do."""
        self._queues.check(self._device)
        for kept in self._waiting:
            for mark in kept.marks:
                self._queues.finish(mark)
        self._collect()
        for stream, memories in self._free.items():
            self._queues.finish(stream.end)
            self.reserved_bytes -= sum(memory.nbytes for memory in memories)
        self._free.clear()
        for stream, segments in self._segments.items():
            unused = [segment for segment in segments if segment.is_free]
            if unused:
                self._queues.finish(stream.end)
            self.reserved_bytes -= len(unused) * self.segment_bytes
            self._segments[stream] = [segment for segment in segments if segment not in unused]

    def _collect(self) -> None:
        """Offer what was freed for reuse, and overwrite it where its stream might."""
        waiting, self._waiting = self._waiting, []
        for kept in waiting:
            if all(mark.is_done for mark in kept.marks):
                if kept.segment is None:
                    self._free[kept.stream].append(kept.memory)
                else:
                    kept.segment.take_back(kept.memory)
                fill = partial(kept.memory.fill_, GARBAGE)
                self._queues.issue(kept.stream, fill, poisons=True)
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


class PageLocked:
    """Page-locked memory of the host, as torch's allocator for it keeps it.

    Sizes are rounded up to powers of two, and what was freed is kept for tensors of its size.
    """

    def __init__(self) -> None:
        self._used: dict[int, StorageWeakRef] = {}  # by address
        self._sizes: dict[int, int] = {}
        self._free: list[int] = []

    @property
    def bytes(self) -> int:
        """Return the bytes that are page-locked, used by a tensor or not."""
        self._collect()
        return sum(self._sizes.values()) + sum(self._free)

    def add(self, storage: torch.UntypedStorage) -> None:
        """Count the memory of a tensor as page-locked."""
        self._collect()
        size_bytes = 1 << max(storage.nbytes() - 1, 0).bit_length()
        if size_bytes in self._free:
            self._free.remove(size_bytes)
        address = storage.data_ptr()
        self._used[address] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # torch leaves it so
        self._sizes[address] = size_bytes

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Return whether memory is page-locked."""
        self._collect()
        return storage.data_ptr() in self._used

    def empty_cache(self) -> None:
        """Give back what no tensor uses."""
        self._collect()
        self._free.clear()

    def _collect(self) -> None:
        for address in [a for a, used in self._used.items() if used.expired()]:  # type: ignore[no-untyped-call]  # torch leaves it so
            del self._used[address]
            self._free.append(self._sizes.pop(address))
