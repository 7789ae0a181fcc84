"""Instruction lists: a program split over the devices of a placement, and its CPU-clock time.

Lists are read strictly in order. They follow one order of all ops in which every op comes after
what it reads, so workers that wait for each other always make progress.

The CPU-clock time of a step is its time without contention. On a busy machine a worker loses its
core now and then, and the wall clock counts that. The thread's CPU clock does not: replaying the
lists with CPU times (:func:`cpu_clock_s`) gives the step time on a quiet machine. This holds for
devices of one core: the thread's clock misses the other threads of a core set.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from graphs.extract.program import VIEW, StepProgram


@dataclass(frozen=True, slots=True)
class Run:
    """Run a call, after the views that it is the first to need on this device."""

    call: int
    views: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Send:
    """Copy a value to its shared slot and signal the devices that wait for it."""

    value: int
    destinations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for signal ``number`` (from 1) of ``source``, then read the value's shared slot."""

    value: int
    source: int
    number: int


@dataclass(frozen=True, slots=True)
class Give:
    """Put a result of the step into its shared slot, after the views that it needs."""

    result: int
    views: tuple[int, ...] = ()


Instruction: TypeAlias = Run | Send | Receive | Give


def device_lists(
    program: StepProgram, devices: Sequence[int], order: Sequence[int], device_count: int
) -> list[list[Instruction]]:
    """Return the instruction lists, by device.

    Args:
        program: the step.
        devices: device index of every op, (N,).
        order: all ops, each after the ops it reads from; usually by simulated start time. An op
            that writes in place is moved after all that read what it writes.
        device_count: number of devices; a device without ops gets an empty list.
    """
    return InstructionLists(program, devices, device_count).build(updates_last(program, order))


def single_list(program: StepProgram) -> list[Instruction]:
    """Return the instructions of a step that runs on one device, in program order."""
    return device_lists(program, [0] * program.op_count, range(program.op_count), 1)[0]


def priority_order(program: StepProgram, priority: Sequence[float]) -> list[int]:
    """Return all ops by priority, highest first, but each after those it reads from.

    ``priority`` is by op, (N,); ties go by index.
    """
    producer = program.producers()
    readers: defaultdict[int, set[int]] = defaultdict(set)
    missing = [0] * program.op_count
    for call in program.calls:
        if call.op == VIEW:
            continue
        roots = {program.values[value].root for value in call.reads}
        sources = {program.calls[producer[root]].op for root in roots if root in producer}
        missing[call.op] = len(sources)
        for source in sources:
            readers[source].add(call.op)
    ready = [(-priority[op], op) for op in range(program.op_count) if not missing[op]]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, op = heapq.heappop(ready)
        order.append(op)
        for reader in readers[op]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, (-priority[reader], reader))
    assert len(order) == program.op_count
    return order


def updates_last(program: StepProgram, order: Sequence[int]) -> list[int]:
    """Move ops that write in place after the ops that read what they write.

    They share a device, and nothing reads what the op makes: it can always run later.
    """
    position = {op: i for i, op in enumerate(order)}
    readers = program.overwritten()
    last = {op: max(position[r] for r in (op, *its)) for op, its in readers.items()}
    return sorted(order, key=lambda op: (last.get(op, position[op]), op in last))


class InstructionLists:
    """Builds the lists of a program; tracks what each device has already made or received."""

    def __init__(self, program: StepProgram, devices: Sequence[int], device_count: int) -> None:
        self.program = program
        self.devices = devices
        self.producer = program.producers()
        self.lists: list[list[Instruction]] = [[] for _ in range(device_count)]
        self.here = [{source.value for source in program.sources} for _ in range(device_count)]
        self.signals = Counter[tuple[int, int]]()
        self.number: dict[tuple[int, int], int] = {}
        self.call_of_op = {call.op: i for i, call in enumerate(program.calls) if call.op != VIEW}
        self.wanted = self._destinations()
        self.whole = program.whole_results()
        self.early, self.late = self._results()

    def build(self, order: Sequence[int]) -> list[list[Instruction]]:
        """Return the lists of all ops in an order as in :func:`device_lists`."""
        for op in order:
            self.run(op)
        for index in self.late:
            self._give(index)
        return self.lists

    def _results(self) -> tuple[dict[int, list[int]], list[int]]:
        """Return {tensor: results} to give when it was made, and those to give at the end.

        Late are sources, and tensors that change after they were made.
        """
        written = set(self.program.roots(v for call in self.program.calls for v in call.writes))
        early: defaultdict[int, list[int]] = defaultdict(list)
        late: list[int] = []
        for index, result in enumerate(self.program.results):
            root = self.program.values[result.value].root
            is_early = root in self.producer and root not in written
            (early[root] if is_early else late).append(index)
        return dict(early), late

    def _give(self, index: int) -> None:
        value = self.program.results[index].value
        device = self._home(value)
        views = () if index in self.whole else tuple(self._bring(value, device))
        self.lists[device].append(Give(index, views))

    def _destinations(self) -> dict[int, tuple[int, ...]]:
        """Return {root value: devices other than its own that read it}."""
        wanted: defaultdict[int, set[int]] = defaultdict(set)
        for call in self.program.calls:
            if call.op == VIEW:
                continue
            for value in call.reads:
                root = self.program.values[value].root
                if self._home(root) != self.devices[call.op] and root in self.producer:
                    wanted[root].add(self.devices[call.op])
        return {root: tuple(sorted(devices)) for root, devices in wanted.items()}

    def _home(self, value: int) -> int:
        """Return the device that makes the tensor under a value; 0 for sources."""
        root = self.program.values[value].root
        if root not in self.producer:
            return 0
        return self.devices[self.program.calls[self.producer[root]].op]

    def run(self, op: int) -> None:
        """Add an op to the list of its device, with what it receives before and sends after."""
        device, index = self.devices[op], self.call_of_op[op]
        call = self.program.calls[index]
        views = tuple(view for read in call.reads for view in self._bring(read, device))
        self.lists[device].append(Run(index, views))
        self.here[device].update(call.made)
        for value in call.made:
            if destinations := self.wanted.get(value, ()):
                self.send(value, device, destinations)
        for value in call.made:
            for result in self.early.get(value, ()):
                self._give(result)

    def send(self, value: int, device: int, destinations: tuple[int, ...]) -> None:
        """Add that a device sends a value which it has made."""
        self.lists[device].append(Send(value, destinations))
        for destination in destinations:
            self.signals[device, destination] += 1
            self.number[value, destination] = self.signals[device, destination]

    def receive(self, value: int, source: int, device: int) -> None:
        """Add that a device waits for a value that was sent to it, and reads it."""
        self.lists[device].append(Receive(value, source, self.number[value, device]))
        self.here[device].add(value)

    def _bring(self, value: int, device: int) -> list[int]:
        """Receive the root of a value if needed; return the view calls that then make it here."""
        if value in self.here[device]:
            return []
        root = self.program.values[value].root
        if value == root:
            if (root, device) not in self.number:
                call = self.program.calls[self.producer[root]]
                raise ValueError(f"the order runs a reader of op {call.op} before op {call.op}")
            self.receive(root, self._home(root), device)
            return []
        index = self.producer[value]
        call = self.program.calls[index]
        views = [view for read in call.reads for view in self._bring(read, device)]
        self.here[device].update(call.made)
        return [*views, index]


def stretches(instructions: Sequence[Instruction]) -> list[range]:
    """Return the stretches of a list whose CPU times suffice for :func:`cpu_clock_s`.

    One ends with each send; a receive, which waits, is one of its own.

    >>> stretches([Run(0), Run(1), Send(7, (1,)), Receive(8, 1, 1), Run(2)])
    [range(0, 3), range(3, 4), range(4, 5)]
    """
    ends = [
        k + 1
        for k, (own, after) in enumerate(zip_longest(instructions, instructions[1:]))
        if after is None or isinstance(own, Send | Receive) or isinstance(after, Receive)
    ]
    return [range(start, end) for start, end in pairwise([0, *ends])]


def cpu_clock_s(
    lists: Sequence[Sequence[Instruction]],
    cpu_s: Sequence[NDArray[np.float64]],
    latency_s: float,
) -> float:
    """Return the seconds of a step in which every device runs its list in order.

    Args:
        lists: one instruction list per device, as run.
        cpu_s: per device the CPU seconds of every instruction, or of every stretch at its last one,
            (instructions,).
        latency_s: from the end of a send until a waiting receiver goes on.
    """
    sent_s: dict[int, float] = {}
    clock_s = [0.0] * len(lists)
    position = [0] * len(lists)
    while any(p < len(listed) for p, listed in zip(position, lists, strict=True)):
        before = list(position)
        for d, listed in enumerate(lists):
            while position[d] < len(listed):
                instruction = listed[position[d]]
                if isinstance(instruction, Receive):
                    if instruction.value not in sent_s:
                        break
                    if sent_s[instruction.value] > clock_s[d]:
                        clock_s[d] = sent_s[instruction.value] + latency_s
                clock_s[d] += float(cpu_s[d][position[d]])
                if isinstance(instruction, Send):
                    sent_s[instruction.value] = clock_s[d]
                position[d] += 1
        assert position != before, "the lists wait for each other"
    return max(clock_s, default=0.0)
