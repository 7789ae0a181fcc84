"""Page-locked memory through which tensors of the host are sent to GPUs.

All copies of a process share one buffer of limited size, in turn. Part of it is written again once
the copy that read it is over; a tensor that is larger than a part is sent in pieces.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

import torch

from envs.hardware.host import STAGING_BYTES, STAGING_PARTS

ALIGNMENT: Final = 64


class Staging:
    """A ring of page-locked memory, made when it is used first."""

    def __init__(self, size_bytes: int = STAGING_BYTES) -> None:
        assert size_bytes >= STAGING_PARTS * ALIGNMENT
        self._size_bytes = size_bytes
        self._memory: torch.Tensor | None = None
        self._end = 0  # of what was given out, counted on from the first round
        self._in_flight: deque[tuple[int, torch.cuda.Event]] = deque()  # start, end of its copy
        self._lock = threading.Lock()  # autograd has threads of its own

    @torch.no_grad()
    def send(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
        """Start to copy a tensor of the host to the device of the stream, which is the current one.

        The copy is dense even where elements of the tensor share memory, as in one that was
        expanded. The tensor may be changed at once.
        """
        with self._lock:
            tensor = tensor.detach()
            copy = torch.empty_like(tensor, device=stream.device)
            piece = self._size_bytes // STAGING_PARTS // ALIGNMENT * ALIGNMENT // tensor.itemsize
            if tensor.numel() > piece and tensor.stride() != copy.stride():
                tensor = torch.empty_like(tensor).copy_(tensor)  # pieces are of dense tensors
            if tensor.numel() <= piece:
                self._send(tensor, copy, stream)
                return copy
            whole, there = (each.as_strided((each.numel(),), (1,)) for each in (tensor, copy))
            for start in range(0, len(whole), piece):
                self._send(whole[start : start + piece], there[start : start + piece], stream)
            return copy

    def _send(self, tensor: torch.Tensor, copy: torch.Tensor, stream: torch.cuda.Stream) -> None:
        if self._memory is None:
            self._memory = torch.empty(self._size_bytes, dtype=torch.uint8, pin_memory=True)
        start = self._room(tensor.nbytes)
        at = start % self._size_bytes
        memory = self._memory[at : at + tensor.nbytes].view(tensor.dtype)
        staged = memory.as_strided(copy.shape, copy.stride(), memory.storage_offset())
        staged.copy_(tensor)
        copy.copy_(staged, non_blocking=True)
        self._in_flight.append((start, stream.record_event()))

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
