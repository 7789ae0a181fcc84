"""Predicted memory of workers: the simulated heap, pages of the arena, and real workers."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from envs.core_runtime import CoreRuntime
from envs.executors.cores import worker
from envs.executors.cores.arena import Layout, load_example
from envs.executors.cores.compiled_list import CompiledList
from envs.executors.cores.heap import Heap
from envs.executors.cores.instruction_lists import (
    Give,
    Instruction,
    Receive,
    Send,
    device_lists,
    priority_order,
    single_list,
)
from envs.executors.cores.memory import PAGE_BYTES, WorkerMemory, pages
from envs.executors.cores.pool import WorkerPool
from envs.hardware.discover import discover
from envs.placement import Placement
from graphs.extract import Extraction, Workload, extract
from graphs.extract.program import Call, Ref, Result, Source, StepProgram, Value
from graphs.graph import GraphArrays
from tests.helpers import one_process
from tests.helpers.extracted_steps import STEPS, extracted
from tests.helpers.placed_steps import two_cores

CORES = sorted(os.sched_getaffinity(0))
LARGE = {
    *("bert", "distilbert", "inception", "llama", "mixtral", "nasnet", "nmt", "resnet", "t5"),
    *("separate_moe", "stacked_moe", "rnnlm"),
}
NAMES = [
    pytest.param(name, marks=[pytest.mark.slow] if name in LARGE else []) for name in sorted(STEPS)
]


class TestHeap:
    def test_a_block_has_a_header_and_is_aligned_after_the_one_before(self) -> None:
        heap = Heap()  # 112 to 128 would be too small a gap: malloc leaves 32 bytes or none
        assert [heap.allocate(100), heap.allocate(8), heap.allocate(1000)] == [0, 192, 256]
        assert heap.peak_bytes == 256 + 1008

    def test_a_hole_that_just_fits_is_too_small(self) -> None:
        heap = Heap()
        blocks = [heap.allocate(1016) for _ in range(3)]
        assert blocks == [0, 1024, 2048]
        heap.free(blocks[1])
        assert heap.allocate(1016) == 3072
        assert heap.allocate(1016 - 96) == 1024

    def test_the_best_hole_is_used_and_its_rest_stays_free(self) -> None:
        heap = Heap()
        large, _, small, _ = (heap.allocate(size) for size in (1000, 100, 200, 100))
        heap.free(large)
        heap.free(small)
        assert heap.allocate(150) == small
        assert heap.allocate(500) == large
        assert heap.allocate(400) == large + 512
        assert heap.peak_bytes == 1536 + 112

    def test_free_neighbors_merge(self) -> None:
        heap = Heap()
        first, second, third, _ = (heap.allocate(1000) for _ in range(4))
        for block in (first, third, second):
            heap.free(block)
        assert heap.allocate(3000) == first

    def test_the_peak_stays_when_all_is_freed(self) -> None:
        heap = Heap()
        blocks = [heap.allocate(1000) for _ in range(3)]
        for block in blocks:
            heap.free(block)
        assert (heap.end, heap.peak_bytes) == (0, 2 * 1088 + 1008)
        assert heap.allocate(2000) == 0

    @given(st.lists(st.integers(0, 400), max_size=60), st.randoms(use_true_random=False))
    def test_as_a_search_over_all_cells(self, sizes: list[int], randomly: random.Random) -> None:
        heap, twin, blocks = Heap(), CellHeap(), list[int]()
        for size in sizes:
            address = heap.allocate(size)
            assert address == twin.allocate(size)
            blocks.append(address)
            while blocks and randomly.random() < 0.45:
                block = blocks.pop(randomly.randrange(len(blocks)))
                heap.free(block)
                twin.free(block)
            assert (heap.end, heap.peak_bytes) == (16 * twin.end, 16 * twin.peak)


class CellHeap:
    """A plain heap: a list of cells of 16 bytes, searched from the start for every request."""

    def __init__(self) -> None:
        self.cells: list[int | None] = []  # address of the block, None if free
        self.peak = 0

    @property
    def end(self) -> int:
        return len(self.cells)

    def allocate(self, size_bytes: int) -> int:
        count = max(2, (size_bytes + 8 + 15) // 16)
        holes = []
        start = 0
        while start < len(self.cells):
            end = start
            while end < len(self.cells) and self.cells[end] is None:
                end += 1
            if end - start >= count + 6:
                holes.append((end - start, start))
            start = max(end, start + 1)
        _, hole = min(holes, default=(0, len(self.cells)))
        at = next(a for a in range(hole, hole + 8) if a % 4 == 0 and a - hole != 1)
        self.cells += [None] * (at + count - len(self.cells))
        self.cells[at : at + count] = [16 * at] * count
        self.peak = max(self.peak, len(self.cells))
        return 16 * at

    def free(self, address: int) -> None:
        self.cells = [None if owner == address else owner for owner in self.cells]
        while self.cells and self.cells[-1] is None:
            self.cells.pop()


def float_value(shape: tuple[int, ...], stride: tuple[int, ...], root: int = 0) -> Value:
    return Value(shape, stride, torch.float32, root)


def element_pages(value: Value, offset_bytes: int) -> set[int]:
    """Return the pages of every element, one by one."""
    found = set()
    for index in np.ndindex(value.shape):
        at = offset_bytes + 4 * sum(i * s for i, s in zip(index, value.stride, strict=True))
        found |= {at // PAGE_BYTES, (at + 3) // PAGE_BYTES}
    return found


def as_set(found: slice | np.ndarray) -> set[int]:
    return set(range(found.start, found.stop) if isinstance(found, slice) else found.tolist())


class TestPages:
    @given(
        st.lists(st.tuples(st.integers(1, 6), st.integers(0, 1500)), max_size=3),
        st.integers(0, 200),
        st.permutations(range(3)),
    )
    def test_as_element_by_element(
        self, dimensions: list[tuple[int, int]], offset: int, order: list[int]
    ) -> None:
        inner, sized = 1, []
        for size, gap in dimensions:
            sized.append((size, inner + gap))
            inner += (size - 1) * (inner + gap)
        sized = [sized[i] for i in order if i < len(sized)]
        value = float_value(tuple(n for n, _ in sized), tuple(s for _, s in sized))
        assert not value.overlaps
        found = pages(value, 64 * offset)
        assert as_set(found) == element_pages(value, 64 * offset)

    def test_a_column_of_a_large_matrix_leaves_pages_out(self) -> None:
        column = float_value((10, 1), (10_000, 1))
        assert as_set(pages(column, 0)) == {40_000 * row // PAGE_BYTES for row in range(10)}

    def test_an_empty_tensor_has_none(self) -> None:
        assert as_set(pages(float_value((0, 3), (3, 1)), 100)) == set()


def chain(count: int, elements: int) -> StepProgram:
    """Return a program of ops that each read the one before; the last is the result."""
    calls = tuple(
        Call(i, "aten.relu.default", (Ref(i),), {}, (i + 1,), False, (i,)) for i in range(count)
    )
    return StepProgram(
        values=tuple(float_value((elements,), (1,), i) for i in range(count + 1)),
        calls=calls,
        sources=(Source(0, "input", "0"),),
        results=(Result(count, "output", "0"),),
        op_count=count,
        training=False,
    )


def random_lists(extraction: Extraction, seed: int) -> list[list[Instruction]]:
    randomly = random.Random(seed)
    program = extraction.program
    order = priority_order(program, [randomly.random() for _ in range(program.op_count)])
    groups = [data["colocate"] or op for op, data in extraction.graph.nodes(data=True)]
    chosen = {group: randomly.randrange(2) for group in dict.fromkeys(groups)}
    return device_lists(program, [chosen[group] for group in groups], order, 2)


def written(program: StepProgram, instructions: Sequence[Instruction]) -> set[int]:
    """Return the pages of results and sent values, from the layout alone."""
    layout, found = Layout(program), set[int]()
    whole = program.whole_results()
    for instruction in instructions:
        match instruction:
            case Send(value):
                found |= as_set(pages(program.values[value], layout.values[value]))
            case Give(index):
                shown = whole.get(index, program.results[index].value)
                found |= as_set(pages(program.values[shown], layout.results[index]))
    return found


class TestWorkerMemory:
    def test_a_chain_takes_the_room_of_three_tensors_as_one_does_not_fit_in_its_own(self) -> None:
        program = chain(5, 1 << 20)
        heap = WorkerMemory(program).heap(single_list(program))
        assert heap.peak_bytes == 2 * ((4 << 20) + 64) + (4 << 20) + 16

    def test_a_chain_touches_its_input_and_its_result(self) -> None:
        program = chain(5, 1 << 20)
        assert WorkerMemory(program).arena_bytes(single_list(program)) == 8 << 20

    def test_a_moved_tensor_is_in_the_arena_of_both(self) -> None:
        program = chain(2, 1 << 20)
        first, second = device_lists(program, [0, 1], [0, 1], 2)
        memory = WorkerMemory(program)
        assert [memory.arena_bytes(first), memory.arena_bytes(second)] == [8 << 20, 8 << 20]
        assert (memory.arena_pages(first) & memory.arena_pages(second)).sum() == 1 << 10

    def test_an_empty_list_takes_what_a_worker_holds(self) -> None:
        memory = WorkerMemory(chain(1, 100))
        assert memory.peak_bytes([]) == memory.held_bytes(0) < memory.held_bytes()

    @pytest.mark.slow_repeats
    @pytest.mark.parametrize("name", NAMES)
    def test_pages_are_those_of_what_is_written_and_read(self, name: str) -> None:
        program = extracted(name).program
        memory, layout = WorkerMemory(program), Layout(program)
        for instructions in random_lists(extracted(name), seed=1):
            touched = set(np.flatnonzero(memory.arena_pages(instructions)).tolist())
            assert written(program, instructions) <= touched
            received = {i.value for i in instructions if isinstance(i, Receive)}
            places = [source.value for source in program.sources]
            places += [i.value for i in instructions if isinstance(i, Send | Receive)]
            may = written(program, instructions)
            for value in places:
                may |= as_set(pages(program.values[value], layout.values[value]))
            assert touched <= may
            assert received <= set(layout.values)

    @pytest.mark.parametrize("name", NAMES)
    def test_the_heap_holds_what_is_live_when_the_lists_run(self, name: str) -> None:
        extraction = extracted(name)
        lists = random_lists(extraction, seed=2)
        live_bytes, layout = [0] * len(lists), Layout(extraction.program)

        def watch(device: int, compiled: CompiledList) -> None:
            live_bytes[device] = max(live_bytes[device], bytes_outside_arena(compiled, layout))

        one_process.run(extraction, lists, watch=watch)
        memory = WorkerMemory(extraction.program)
        heaps_bytes = [memory.heap(instructions).peak_bytes for instructions in lists]
        assert max(live_bytes) > 0
        assert all(live <= heap for live, heap in zip(live_bytes, heaps_bytes, strict=True))

    @pytest.mark.parametrize("name", NAMES)
    def test_nothing_stays_on_the_heap(self, name: str) -> None:
        program = extracted(name).program
        for instructions in random_lists(extracted(name), seed=3):
            assert WorkerMemory(program).heap(instructions).end == 0


class TestMemoryCount:
    @pytest.fixture(autouse=True)
    def _kernel(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put files with hand-made sizes in the place of the kernel's."""
        rows = {
            "STATUS": "Name: x\nVmHWM: 900 kB\nRssAnon: 500 kB\nRssFile: 300 kB\nThreads: 2\n",
            "ROLLUP": "0-1 ---p 0 00:00 0 [rollup]\nPrivate_Dirty: 200 kB\n",
            "CLEAR_REFS": "",
        }
        for name, text in rows.items():
            (tmp_path / name).write_text(text)
            monkeypatch.setattr(worker, name, tmp_path / name)

    def test_files_and_pages_of_others_do_not_count(self) -> None:
        count = worker.MemoryCount()
        assert count.peak_bytes() == (900 - 300 - (500 - 200)) * 1024

    def test_other_lists_do_not_count(self) -> None:
        count = worker.MemoryCount()
        count.begin(50 * 1024)
        assert count.peak_bytes() == (900 - 300 - (500 - 200) - 50) * 1024

    def test_a_kernel_that_does_not_tell_is_no_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(worker, "CLEAR_REFS", Path("/nowhere/clear_refs"))
        assert worker.MemoryCount().peak_bytes() is None


def wide() -> Extraction:
    """Return a training step of 12 MB of weights, whose tensors outweigh all constants."""
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    inputs = (torch.randn(512, 1024), torch.randn(512, 1024))
    return extract(Workload.of(nn.Sequential(*layers), inputs, nn.functional.mse_loss))


def bytes_outside_arena(compiled: CompiledList, layout: Layout) -> int:
    """Return the bytes of the tensors that a list holds in memory of their own."""
    source, offset = next(iter(layout.values.items()))
    start = compiled.table[source].data_ptr() - offset
    storages = [tensor.untyped_storage() for tensor in compiled.table.values()]
    sizes_bytes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(
        size_bytes
        for address, size_bytes in sizes_bytes.items()
        if not start <= address < start + layout.size_bytes
    )


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
class TestRealWorkers:
    @pytest.mark.slow
    def test_a_worker_takes_about_as_much_as_predicted(self) -> None:
        extraction = wide()
        memory = WorkerMemory(extraction.program)
        with WorkerPool(extraction.program, two_cores().devices) as pool:
            load_example(pool.arena, extraction.step)
            for seed in (1, 2):
                lists = random_lists(extraction, seed)
                number = pool.load(lists)
                pool.run(number)
                pool.count_memory(number)
                pool.run(number)
                for instructions, peak in zip(
                    lists, pool.peak_memory_bytes().values(), strict=False
                ):
                    assert peak / 2 < memory.peak_bytes(instructions) < peak * 2

    def test_the_runtime_predicts_the_lists_that_it_runs(self) -> None:
        extraction, cluster = wide(), two_cores()
        graph = GraphArrays.from_graph(extraction.graph)
        count = len(graph)
        order = list(range(count))
        devices = np.zeros(count, np.int32)
        placement = Placement.of(graph, cluster, devices, -np.arange(count, dtype=np.float64))
        found = CoreRuntime(extraction, cluster).peak_memory_bytes(placement, order)
        memory = WorkerMemory(extraction.program)
        lists: list[list[Instruction]] = [single_list(extraction.program), []]
        sizes = [memory.peak_bytes(instructions) for instructions in lists]
        assert found == dict(zip(cluster.names, sizes, strict=True))

    def test_the_memory_of_the_unplaced_model_is_not_that_of_workers(self) -> None:
        extraction = wide()
        graph = GraphArrays.from_graph(extraction.graph)
        both = discover(f"core:{CORES[0]}-{CORES[1]}")
        devices = np.zeros(len(graph), np.int32)
        placement = Placement.of(graph, both, devices, np.zeros(len(graph)))
        runtime, order = CoreRuntime(extraction, both), list(range(len(graph)))
        assert runtime.peak_memory_bytes(placement, order) is None
