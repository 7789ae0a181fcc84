"""Predicted memory of workers: the resident memory that a step takes, from its instruction lists.

It is what :meth:`envs.executors.cores.pool.WorkerPool.peak_memory_bytes` measures in workers that
have run the step before, and has three parts:

* What a worker holds before its first step: the interpreter, the program, its instructions, and
  what libraries keep.
* Pages of the arena that the list reads or writes: sources, values that move, results.
* The heap: outputs that stay on the device, from the op that makes them until their last use, and
  what kernels allocate while they run. Freed memory is never given back, and fragmentation keeps
  some of it from being used again.

``python -m benchmarks memory`` compares both with measurements and fits the constants.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from envs.executors.cores.arena import Layout, memory_bytes
from envs.executors.cores.compiled_list import slot_writers, sums_in_place
from envs.executors.cores.heap import Heap
from envs.executors.cores.instruction_lists import Give, Instruction, Receive, Run, Send
from graphs.extract.program import VIEW, Call, StepProgram, Value

HEAP_FACTOR: Final = 1.14
"""Heap of a worker over the simulated one: small long-lived blocks (the libraries' caches, Python's
objects) lie in the way of large ones."""
WORKER_BYTES: Final = 6_200_000
"""Memory of a worker that has started: pages of the interpreter and of libraries that it wrote."""
CALL_BYTES: Final = 4_000
"""Memory of a worker per call of the program."""
INSTRUCTION_BYTES: Final = 4_800
"""Memory of a worker per instruction of its list."""
PAGE_BYTES: Final = 4096
FAULT_AROUND_PAGES: Final = 16
"""Pages that Linux maps at once where one of a shared mapping is read."""

CONVOLUTIONS: Final = frozenset(
    f"aten.{name}.default" for name in ("convolution", "conv1d", "conv2d", "conv3d")
)
CONVOLUTION_BACKWARD: Final = "aten.convolution_backward.default"
EMBEDDING: Final = "aten.embedding.default"
RESULT_COPIES: Final = {
    "aten.native_batch_norm_backward.default": 1,
    "aten.max_pool2d.default": 2,  # the indices, which are 64-bit integers
}
"""Size of what kernels allocate beside their result, in sizes of the result."""


@dataclass(frozen=True, slots=True)
class _Phase:
    """A part of a kernel: copies of operands are freed before the results are allocated."""

    copy_bytes: tuple[int, ...]
    beside_bytes: tuple[int, ...]  # until the results are complete
    results: tuple[int, ...]


class WorkerMemory:
    """Predicts the memory of workers that run instruction lists of one program."""

    def __init__(self, program: StepProgram) -> None:
        self.program = program
        self._layout = Layout(program)
        self._size_bytes = [memory_bytes(value) for value in program.values]
        self._pages: dict[int, slice | NDArray[np.int64]] = {}  # of places, by value
        self._sources = {source.value for source in program.sources}
        self._whole = program.whole_results()
        self._slot_writers = slot_writers(program)
        self._operands = [_operands(program, call) for call in program.calls]

    def peak_bytes(self, instructions: Sequence[Instruction]) -> int:
        """Return the memory of a worker that runs the list."""
        held_bytes = self.held_bytes(len(instructions))
        heap_bytes = round(HEAP_FACTOR * self.heap(instructions).peak_bytes)
        return held_bytes + self.arena_bytes(instructions) + heap_bytes

    def held_bytes(self, instruction_count: int | None = None) -> int:
        """Return what a worker holds before its first step; by default, of one that runs all."""
        calls = len(self.program.calls)
        count = calls if instruction_count is None else instruction_count
        return WORKER_BYTES + CALL_BYTES * calls + INSTRUCTION_BYTES * count

    def arena_bytes(self, instructions: Sequence[Instruction]) -> int:
        """Return the bytes of all pages of the arena that the list reads or writes."""
        return int(np.count_nonzero(self.arena_pages(instructions))) * PAGE_BYTES

    def arena_pages(self, instructions: Sequence[Instruction]) -> NDArray[np.bool_]:
        """Return whether the list reads or writes a page, for all pages of the arena."""
        touched = np.zeros(-(-self._layout.size_bytes // PAGE_BYTES), np.bool_)
        shared = self._shared(instructions)
        storage = self._storage(instructions)
        in_slot = self._in_slot(instructions)
        sent = {i.value for i in instructions if isinstance(i, Send)}
        for instruction in instructions:
            match instruction:
                case Run(index):
                    call = self.program.calls[index]
                    for value in self._operands[index]:
                        root = storage.get(value, value)
                        if root not in shared:
                            continue
                        if call.target == EMBEDDING and value == call.reads[0]:
                            touched[self._rows(call)] = True
                        else:
                            touched[self._pages_of(root)] = True
                    for value in in_slot.intersection(call.made):
                        touched[self._pages_of(value)] = True
                case Send(value):
                    touched[self._pages_of(value)] = True
                case Give(result):
                    whole = self._whole.get(result)
                    if whole is None:
                        value = self.program.results[result].value
                        offset = self._layout.results[result]
                        touched[pages(self.program.values[value], offset)] = True
                        root = storage.get(value, value)
                        if root in shared:
                            touched[self._pages_of(root)] = True
                    elif whole not in in_slot and whole not in sent:
                        touched[self._pages_of(whole)] = True
        return touched

    def heap(self, instructions: Sequence[Instruction]) -> Heap:
        """Return the simulated heap after a run of the list."""
        in_slot = self._in_slot(instructions)
        heap, blocks = Heap(), dict[int, int]()
        taken = sums_in_place(self.program, instructions)
        for instruction, dying in zip(instructions, self._last_uses(instructions), strict=True):
            if isinstance(instruction, Run):
                for phase in self._phases(self.program.calls[instruction.call]):
                    copies = [heap.allocate(size) for size in phase.copy_bytes]
                    beside = [heap.allocate(size) for size in phase.beside_bytes]
                    for block in copies:
                        heap.free(block)
                    for value in phase.results:
                        if value in in_slot or not self._size_bytes[value]:
                            continue
                        if value in taken:
                            blocks[value] = blocks.pop(self.program.values[taken[value]].root)
                        else:
                            blocks[value] = heap.allocate(self._size_bytes[value])
                    for block in beside:
                        heap.free(block)
            for value in dying:
                if value in blocks:
                    heap.free(blocks.pop(value))
        return heap

    def _shared(self, instructions: Sequence[Instruction]) -> set[int]:
        """Return the values that a worker reads in the arena."""
        return self._sources | {i.value for i in instructions if isinstance(i, Receive)}

    def _in_slot(self, instructions: Sequence[Instruction]) -> set[int]:
        given = [self._whole.get(i.result) for i in instructions if isinstance(i, Give)]
        return self._slot_writers.intersection(value for value in given if value is not None)

    def _calls(self, instruction: Instruction) -> list[int]:
        match instruction:
            case Run(call, views):
                return [*views, call]
            case Give(_, views):
                return list(views)
            case _:
                return []

    def _storage(self, instructions: Sequence[Instruction]) -> dict[int, int]:
        """Return {value: value whose memory it shows} of views made on the device."""
        storage: dict[int, int] = {}
        for instruction in instructions:
            for index in self._calls(instruction):
                call = self.program.calls[index]
                if call.op == VIEW or call.shows_part:
                    shown = storage.get(call.reads[0], call.reads[0])
                    storage |= dict.fromkeys(call.made, shown)
        return storage

    def _last_uses(self, instructions: Sequence[Instruction]) -> list[list[int]]:
        """Return the tensors whose memory is free after each instruction."""
        storage = self._storage(instructions)
        last: dict[int, int] = {}
        for position, instruction in enumerate(instructions):
            for index in self._calls(instruction):
                call = self.program.calls[index]
                for value in (*call.reads, *call.made):
                    last[storage.get(value, value)] = position
            match instruction:
                case Send(value) | Receive(value):
                    last[storage.get(value, value)] = position
                case Give(result):
                    value = self._whole.get(result, self.program.results[result].value)
                    last[storage.get(value, value)] = position
        dying: list[list[int]] = [[] for _ in instructions]
        for value, position in last.items():
            dying[position].append(value)
        return dying

    def _pages_of(self, value: int) -> slice | NDArray[np.int64]:
        """Return the pages of a value's place in the arena."""
        if value not in self._pages:
            self._pages[value] = pages(self.program.values[value], self._layout.values[value])
        return self._pages[value]

    def _rows(self, call: Call) -> NDArray[np.int64]:
        """Return pages of a table, as many as are mapped on average for random rows of it."""
        table = self.program.values[call.reads[0]]
        first, end = _page_range(self._size_bytes[table.root], self._layout.values[table.root])
        windows = -(-(end - first) // FAULT_AROUND_PAGES)
        rows = sum(self.program.values[value].numel for value in call.reads[1:]) or 1
        row_bytes = self._size_bytes[call.reads[0]] // max(table.shape[0], 1)
        touched = rows * max(-(-row_bytes // (FAULT_AROUND_PAGES * PAGE_BYTES)), 1)
        share = -math.expm1(touched * math.log1p(-1 / windows)) if windows > 1 else 1.0
        chosen = np.linspace(0, windows - 1, max(round(windows * share), 1)).astype(np.int64)
        found = first + chosen[:, None] * FAULT_AROUND_PAGES + np.arange(FAULT_AROUND_PAGES)
        return found[found < end]

    def _phases(self, call: Call) -> list[_Phase]:
        """Return what a kernel allocates: the backward pass of a convolution is two of them.

        oneDNN copies operands and results of convolutions into layouts of its own, unless the
        filter has one element.
        """
        if call.shows_part or call.writes:
            return []
        if call.target in CONVOLUTIONS:
            filters = call.reads[1]
            parts = [(call.reads[:2], call.made)]
        elif call.target == CONVOLUTION_BACKWARD:
            gradient, given, filters = call.reads[0], call.reads[-2], call.reads[-1]
            of_input, *of_filter = call.outputs
            parts = [
                ((gradient, filters), () if of_input is None else (of_input,)),
                ((gradient, given), tuple(value for value in of_filter if value is not None)),
            ]
        else:
            factor = RESULT_COPIES.get(call.target, 0)
            result_bytes = sum(self._size_bytes[value] for value in call.made)
            return [_Phase((), (factor * result_bytes,) if factor else (), call.made)]
        sizes = self._size_bytes
        if math.prod(self.program.values[filters].shape[2:]) == 1:
            return [_Phase((), (), results) for _, results in parts]
        return [
            _Phase(tuple(sizes[v] for v in operands), tuple(sizes[v] for v in results), results)
            for operands, results in parts
            if results
        ]


def pages(value: Value, offset_bytes: int) -> slice | NDArray[np.int64]:
    """Return the pages under the elements of a tensor at an offset."""
    run, outer = 1, list[tuple[int, int]]()
    if value.overlaps:
        run = value.numel
    else:
        gap = PAGE_BYTES // value.dtype.itemsize  # smaller ones have no page of their own
        for stride, size in sorted(zip(value.stride, value.shape, strict=True)):
            if size > 1 and stride < run + gap:
                run += (size - 1) * stride
            elif size > 1:
                outer.append((stride, size))
    if not value.numel:
        return slice(0, 0)
    starts = np.zeros(1, np.int64)
    for stride, size in outer:
        starts = np.add.outer(starts, stride * np.arange(size)).ravel()
    ranges = [
        _page_range(run * value.dtype.itemsize, offset_bytes + start * value.dtype.itemsize)
        for start in starts.tolist()
    ]
    if len(ranges) == 1:
        return slice(*ranges[0])
    return np.unique(np.concatenate([np.arange(*each) for each in ranges]))


def _page_range(size_bytes: int, offset_bytes: int) -> tuple[int, int]:
    """Return the first page of a range of bytes, and the one after the last."""
    return offset_bytes // PAGE_BYTES, (offset_bytes + max(size_bytes, 1) - 1) // PAGE_BYTES + 1


def _operands(program: StepProgram, call: Call) -> tuple[int, ...]:
    """Return the values whose elements a call reads, its own results aside.

    Of a convolution's input and filter, a backward pass reads the one whose gradient it does not
    compute; of the other one only the shape.
    """
    if call.op == VIEW or call.shows_part:
        return ()
    if call.target != CONVOLUTION_BACKWARD or len(call.reads) != 3:
        return call.reads
    gradient, given, filters = call.reads
    of_input, of_filter = call.args[-1][:2]
    return (gradient, *([filters] if of_input else []), *([given] if of_filter else []))
