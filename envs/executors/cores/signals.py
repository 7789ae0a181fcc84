"""Hand-offs between workers: one kernel counter (eventfd) for each ordered pair of devices.

A sender adds one per value, in the order of its list; so a receiver that has counted ``number``
signals knows that the value with that number, and all before it, are in the shared arena.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Mapping
from typing import Final

SPIN_NS: Final = 200_000
"""Time for which a receiver polls before it sleeps: waking a sleeping core takes several times
as long as going on. ``placer devices --again`` prints the latency of a hop."""


class Signals:
    """One device's ends of the counters, whose descriptors must not block."""

    def __init__(self, device: int, counters: Mapping[tuple[int, int], int]) -> None:
        """Take the counters of all pairs, {(source, destination): file descriptor}."""
        self.out = {d: fd for (s, d), fd in counters.items() if s == device}
        self.into = {s: fd for (s, d), fd in counters.items() if d == device}
        self.arrived = dict.fromkeys(self.into, 0)
        self._sleep = {source: select.poll() for source in self.into}
        for source, descriptor in self.into.items():
            self._sleep[source].register(descriptor, select.POLLIN)

    def reset(self) -> None:
        """Reset the counts; all signals of the last step were received."""
        self.arrived = dict.fromkeys(self.into, 0)

    def send(self, destinations: tuple[int, ...]) -> None:
        """Signal devices that the next value for them is there."""
        for destination in destinations:
            os.eventfd_write(self.out[destination], 1)

    def wait(self, source: int, number: int) -> None:
        """Return once ``source`` has sent ``number`` signals in this step."""
        while self.arrived[source] < number:
            self.arrived[source] += self._next(source)

    def _next(self, source: int) -> int:
        """Wait for at least one new signal; return how many came."""
        spin_until_ns = time.perf_counter_ns() + SPIN_NS
        while True:
            try:
                return os.eventfd_read(self.into[source])
            except BlockingIOError:
                if time.perf_counter_ns() > spin_until_ns:
                    self._sleep[source].poll()
