"""Memory that the parent and all workers share: one anonymous file, mapped by each of them.

It has no name in the file system, so nothing is left behind however the processes end. Every source
and result of a step, and every tensor that may move between devices, has a fixed place in it; a
result that is all of a computed tensor lies in that tensor's place. Pages that are never touched
take no memory. The functions copy the state and the batch of a step into it.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from typing import IO, Any

import torch
from torch.utils._pytree import tree_leaves

from envs.executors.state_devices import STATE_ROLES
from graphs.extract import Workload
from graphs.extract.program import StepProgram, Value

ALIGNMENT = 64  # as torch's own allocator


class Layout:
    """Offsets of the shared tensors of a program in bytes, by value and by result index.

    Sources and everything that may move between devices have a place; views have none.
    """

    def __init__(self, program: StepProgram) -> None:
        self.program = program
        self.values: dict[int, int] = {}
        self.results: list[int] = []
        end = 0
        tied: dict[str, int] = {}
        for source in program.sources:
            name = program.ties.get(source.name, source.name)
            if source.role in STATE_ROLES and name in tied:
                self.values[source.value] = tied[name]
                continue
            self.values[source.value] = tied[name] = end
            end += self._room_bytes(source.value)
        for value in (value for call in program.calls for value in call.made):
            if program.values[value].root == value:
                self.values[value] = end
                end += self._room_bytes(value)
        whole = program.whole_results()
        for index, result in enumerate(program.results):
            if index in whole:
                self.results.append(self.values[whole[index]])
            else:
                self.results.append(end)
                end += self._room_bytes(result.value)
        self.size_bytes = max(end, ALIGNMENT)

    def _room_bytes(self, value: int) -> int:
        size_bytes = memory_bytes(self.program.values[value])
        return -(-max(size_bytes, 1) // ALIGNMENT) * ALIGNMENT


class Arena:
    """Tensors at fixed offsets of a shared mapping, by value and by result index of a program."""

    def __init__(self, program: StepProgram, descriptor: int | None = None) -> None:
        """Map the arena of a program: a new one, or the one behind a file descriptor."""
        self.program = program
        layout = Layout(program)
        self.values, self.results, size = layout.values, layout.results, layout.size_bytes
        new = descriptor is None
        if descriptor is None:
            descriptor = os.memfd_create("placer-arena", os.MFD_CLOEXEC)
        self.file: IO[bytes] = os.fdopen(descriptor, "rb", buffering=0)
        try:
            if new:
                _resize(descriptor, size)
            self._mapping: mmap.mmap | None = mmap.mmap(descriptor, size)
        except BaseException:
            self.file.close()
            raise

    def value(self, value: int) -> torch.Tensor:
        """Return the shared tensor of a source, or of an op's output."""
        return self._tensor(self.program.values[value], self.values[value])

    def result(self, index: int) -> torch.Tensor:
        """Return the shared tensor that receives a result of the step."""
        return self._tensor(
            self.program.values[self.program.results[index].value], self.results[index]
        )

    def let_go(self) -> None:
        """Drop the pages from this process until they are read again; their content stays."""
        if self._mapping is not None:
            self._mapping.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Release the mapping, which ends with the last tensor on it; safe to call twice."""
        self.file.close()
        self._mapping = None

    def _tensor(self, value: Value, offset: int) -> torch.Tensor:
        """Return a tensor with a storage of its own: saving it must not save the whole arena."""
        assert self._mapping is not None, "the arena was closed"
        count = _elements(value)
        if count == 0:
            return torch.empty(value.shape, dtype=value.dtype)
        flat = torch.frombuffer(self._mapping, dtype=value.dtype, count=count, offset=offset)
        if value.overlaps:
            return flat.view(value.shape)
        return flat.as_strided(value.shape, value.stride)


def load_example(arena: Arena, step: Workload) -> None:
    """Copy the parameters, buffers and example inputs of a step into the arena.

    An optimizer starts, and stays, at its first step with a learning rate of 0: it does all its
    work, but the parameters stay as they are however often the step runs.
    """
    load_state(arena, step)
    load_batch(arena, tree_leaves((step.step_inputs, dict(step.keywords))))
    begin_updates(arena, learning_rate=0.0)
    count_update(arena)


def begin_updates(arena: Arena, learning_rate: float) -> None:
    """Reset the state of the step's optimizer, if it has one, and set its learning rate."""
    for source in arena.program.sources:
        if source.role in ("optimizer", "step_count"):
            arena.value(source.value).zero_()
        elif source.role == "learning_rate":
            arena.value(source.value).fill_(learning_rate)


def count_update(arena: Arena) -> None:
    """Increment the optimizer's step counts for the next step."""
    for source in arena.program.sources:
        if source.role == "step_count":
            arena.value(source.value).add_(1.0)


def load_state(arena: Arena, step: Workload) -> None:
    """Copy the parameters and buffers of a step into the arena."""
    state = step.named_state()
    for source in arena.program.sources:
        if source.role in STATE_ROLES:
            arena.value(source.value).copy_(state[source.name].detach())


def load_batch(arena: Arena, leaves: Sequence[Any]) -> None:
    """Copy the tensors of a batch into the arena; leaves are as :class:`ExampleForm` has them."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    for source in arena.program.sources:
        if source.role == "input":
            arena.value(source.value).copy_(tensors[int(source.name)].detach())


def _resize(descriptor: int, size: int) -> None:
    try:
        os.ftruncate(descriptor, size)
    except OSError as error:
        hint = " (ulimit -f limits it, too)" if error.errno == errno.EFBIG else ""
        raise OSError(
            f"shared memory of {size / 1e6:.1f} MB cannot be made: {error.strerror}{hint}"
        ) from error


def memory_bytes(value: Value) -> int:
    """Return the bytes of a tensor with its original strides, gaps included."""
    return _elements(value) * value.dtype.itemsize


def _elements(value: Value) -> int:
    """Return the elements of a value with its original strides, gaps included.

    Kernels sum in an order that depends on strides: packed, a moved part of a tensor would give
    results that differ in the last bits.
    """
    return value.numel if value.overlaps else value.span
