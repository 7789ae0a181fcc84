"""A simulated heap: how far a process's heap grows through a sequence of allocations and frees.

It is a model of glibc's malloc as the workers are started with it (:data:`fork_server.MALLOC`):
everything comes from one heap, which never gives memory back. A free block serves the request that
fits best, its rest stays free, and free neighbors merge. Torch asks for aligned blocks, for which
malloc looks for room for any alignment: a hole that would just fit is not used. Blocks are counted,
no memory is touched.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

GRANULE_BYTES: Final = 16
HEADER_BYTES: Final = 8
SMALLEST_BYTES: Final = 32
ALIGNMENT: Final = 64
SLACK_BYTES: Final = ALIGNMENT + SMALLEST_BYTES
"""Room that malloc wants in a hole beside an aligned block."""


class Heap:
    """Blocks of a heap, by address from its start.

    ``peak_bytes`` is the largest extent so far. Everything below was in use at some time, so it is
    the resident memory of the heap.
    """

    def __init__(self) -> None:
        self.end = 0
        self.peak_bytes = 0
        self._used: dict[int, int] = {}  # sizes by address
        self._free: dict[int, int] = {}  # sizes by address
        self._free_ends: dict[int, int] = {}  # addresses by end
        self._by_size: list[tuple[int, int]] = []  # (size, address), sorted

    def allocate(self, size_bytes: int) -> int:
        """Return the address of a new block."""
        rounded = -(-(size_bytes + HEADER_BYTES) // GRANULE_BYTES) * GRANULE_BYTES
        size = max(rounded, SMALLEST_BYTES)
        index = bisect_left(self._by_size, (size + SLACK_BYTES, 0))
        if index < len(self._by_size):
            found, hole = self._by_size[index]
            self._remove_free(hole, found)
        else:
            found, hole = size + SLACK_BYTES, self.end
            self.end += found
        address = -(-hole // ALIGNMENT) * ALIGNMENT
        if 0 < address - hole < SMALLEST_BYTES:
            address += ALIGNMENT
        self._used[address] = size
        self.peak_bytes = max(self.peak_bytes, address + size)
        if address > hole:
            self._give_back(hole, address - hole)
        if rest := hole + found - address - size:
            self._give_back(address + size, rest)
        return address

    def free(self, address: int) -> None:
        """Free the block at an address."""
        self._give_back(address, self._used.pop(address))

    def _give_back(self, address: int, size: int) -> None:
        if (after := self._free.get(address + size)) is not None:
            self._remove_free(address + size, after)
            size += after
        if (before := self._free_ends.get(address)) is not None:
            self._remove_free(before, address - before)
            size += address - before
            address = before
        if address + size == self.end:
            self.end = address
        else:
            self._add_free(address, size)

    def _add_free(self, address: int, size: int) -> None:
        self._free[address] = size
        self._free_ends[address + size] = address
        insort(self._by_size, (size, address))

    def _remove_free(self, address: int, size: int) -> None:
        del self._free[address], self._free_ends[address + size]
        del self._by_size[bisect_left(self._by_size, (size, address))]
