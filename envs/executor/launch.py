"""The order in which one process launches the calls of a forward pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush

import torch

from graphs.extract.forward import ForwardProgram


class LaunchOrder:
    """Dependencies between placed calls, found once; calls are numbered as in the program.

    A call comes after those whose results it reads and after earlier writes to storage that it
    reads, and before later writes. Calls that draw random numbers keep their order, so that a seed
    gives the same numbers in any launch order.
    """

    def __init__(self, program: ForwardProgram) -> None:
        self.placed = [i for i, call in enumerate(program.calls) if not call.is_free]
        self.number = {program.calls[i].key: i for i in self.placed}
        self.waits_for = _waits_for(program)
        self.followers: defaultdict[int, list[int]] = defaultdict(list)
        for call in self.placed:
            for earlier in self.waits_for[call]:
                self.followers[earlier].append(call)

    def of(self, devices: Mapping[str, torch.device], order: Sequence[str]) -> list[int]:
        """Return all placed calls in launch order.

        Of those that may come next the first in ``order`` is launched first, calls that are not in
        it last. Without an order, work for accelerators is launched before work on the CPU, which
        would delay further launches.
        """
        rank = {self.number[key]: i for i, key in enumerate(order)}
        last = len(rank)
        on_cpu = {i for key, i in self.number.items() if devices[key].type == "cpu"}
        left = {call: len(self.waits_for[call]) for call in self.placed}
        ready = [(rank.get(i, last), i in on_cpu, i) for i in self.placed if not left[i]]
        heapify(ready)
        launched = []
        while ready:
            _, _, call = heappop(ready)
            launched.append(call)
            for later in self.followers[call]:
                left[later] -= 1
                if not left[later]:
                    heappush(ready, (rank.get(later, last), later in on_cpu, later))
        assert len(launched) == len(self.placed)
        return launched


def _waits_for(program: ForwardProgram) -> dict[int, set[int]]:
    made_by: dict[int, set[int]] = {}  # by value: placed calls it depends on
    last_write: dict[int, int] = {}
    reads_since: defaultdict[int, set[int]] = defaultdict(set)
    waits_for: dict[int, set[int]] = {}
    last_random: set[int] = set()
    for i, call in enumerate(program.calls):
        earlier = {source for value in call.reads for source in made_by.get(value, ())}
        if not call.is_free:
            for storage in call.touches:
                earlier |= {last_write[storage]} if storage in last_write else set()
                if storage in call.writes:
                    earlier |= reads_since.pop(storage, set())
                    last_write[storage] = i
                else:
                    reads_since[storage].add(i)
            if call.is_random:
                earlier |= last_random
                last_random = {i}
            waits_for[i] = earlier
            earlier = {i}
        made_by |= {value: earlier for value in call.outputs if value is not None}
    return waits_for
