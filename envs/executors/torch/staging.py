"""Page-locked memory through which tensors of the host are sent to GPUs.

All copies of a process share two buffers of limited size, in turn: one for small tensors, which
the thread that sends them writes, and one for the others, which a thread of its own writes
meanwhile. Part of a buffer is written again once the copy that read it is over; a tensor that is
larger than a part is sent in pieces.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Final, TypeAlias

import torch

from envs.hardware.host import SMALL_BYTES, STAGING_BYTES, STAGING_PARTS

ALIGNMENT: Final = 64
SMALL_PARTS: Final = 8
"""Number of tensors of the largest size that the buffer for small ones holds."""
CopyEnd: TypeAlias = "torch.cuda.Event | Future[torch.cuda.Event]"
"""The end of a copy; a future one has an event once the copy is in the queue of its stream."""


class HostSender:
    """Sends tensors of the host to GPUs.

    Args:
        size_bytes: page-locked memory for tensors of more than ``small_bytes``.
        small_bytes: largest tensor that the sending thread writes itself: to hand it to the other
            thread would take as long.
        thread: runs what it gets in order, one after the other; a thread by default.
    """

    def __init__(
        self,
        size_bytes: int = STAGING_BYTES,
        small_bytes: int = SMALL_BYTES,
        thread: Executor | None = None,
    ) -> None:
        self._small_bytes = small_bytes
        self._small = Staging(SMALL_PARTS * max(small_bytes, ALIGNMENT))
        self._large = Staging(size_bytes)
        self._thread = thread or ThreadPoolExecutor(1, "staging")  # started at first use

    def send(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> tuple[torch.Tensor, CopyEnd]:
        """Start to copy a tensor to the device of the stream, which is the current one.

        Return the copy and its end. The tensor must not be changed before the event of a future end
        is there.
        """
        tensor = tensor.detach()
        copy = torch.empty_like(tensor, device=stream.device)
        if tensor.nbytes <= self._small_bytes:
            return copy, self._small.send(tensor, copy, stream)
        inference = torch.is_inference_mode_enabled()  # every thread has a mode of its own

        def send() -> torch.cuda.Event:
            with torch.inference_mode(inference), torch.cuda.stream(stream):
                return self._large.send(tensor, copy, stream)

        return copy, self._thread.submit(send)


class Staging:
    """A ring of page-locked memory, made when it is used first."""

    def __init__(self, size_bytes: int) -> None:
        assert size_bytes >= STAGING_PARTS * ALIGNMENT
        self._size_bytes = size_bytes
        self._memory: torch.Tensor | None = None
        self._end = 0  # of what was given out, counted on from the first round
        self._in_flight: deque[tuple[int, torch.cuda.Event]] = deque()  # start, end of its copy
        self._lock = threading.Lock()  # autograd has threads of its own

    @torch.no_grad()
    def send(
        self, tensor: torch.Tensor, copy: torch.Tensor, stream: torch.cuda.Stream
    ) -> torch.cuda.Event:
        """Copy a tensor of the host to ``copy``, on the current stream; return the end.

        The copy is dense even where elements of the tensor share memory, as in one that was
        expanded. The tensor may be changed at once.
        """
        with self._lock:
            piece = self._size_bytes // STAGING_PARTS // ALIGNMENT * ALIGNMENT // tensor.itemsize
            if tensor.numel() > piece and tensor.stride() != copy.stride():
                tensor = torch.empty_like(tensor).copy_(tensor)  # pieces are of dense tensors
            if tensor.numel() <= piece:
                return self._send(tensor, copy, stream)
            whole, there = (each.as_strided((each.numel(),), (1,)) for each in (tensor, copy))
            starts = range(0, len(whole), piece)
            parts = [slice(start, start + piece) for start in starts]
            return [self._send(whole[part], there[part], stream) for part in parts][-1]

    def _send(
        self, tensor: torch.Tensor, copy: torch.Tensor, stream: torch.cuda.Stream
    ) -> torch.cuda.Event:
        if self._memory is None:
            with torch.inference_mode(False):  # others will write to it, too
                self._memory = torch.empty(self._size_bytes, dtype=torch.uint8, pin_memory=True)
        start = self._room(tensor.nbytes)
        at = start % self._size_bytes
        memory = self._memory[at : at + tensor.nbytes].view(tensor.dtype)
        staged = memory.as_strided(copy.shape, copy.stride(), memory.storage_offset())
        staged.copy_(tensor)
        copy.copy_(staged, non_blocking=True)
        event: torch.cuda.Event = stream.record_event()
        self._in_flight.append((start, event))
        return event

    def _room(self, size_bytes: int) -> int:
        """Return where the next bytes begin, once the copies that read them before are over."""
        start = -(-self._end // ALIGNMENT) * ALIGNMENT
        left = self._size_bytes - start % self._size_bytes
        if left < size_bytes:  # no room before the end of the buffer
            start += left
        self._end = start + size_bytes
        while self._in_flight:
            begins, event = self._in_flight[0]
            if begins < self._end - self._size_bytes:
                event.synchronize()
            elif not event.query():  # type: ignore[no-untyped-call]  # torch leaves it untyped
                break
            self._in_flight.popleft()
        return start
