"""The functions of ``torch.cuda`` on a fake machine."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch

from envs.executors.torch import streams as product_streams
from envs.executors.torch.staging import HostSender
from tests.fake_cuda import streams
from tests.fake_cuda.streams import Event

if TYPE_CHECKING:
    from tests.fake_cuda.machine import Machine


CACHE_BYTES: Final = 1 << 16
SMALL_BYTES: Final = 1 << 6  # tests send tensors below and above
CLASSES: Final = ("Event", "Stream", "device")


class CudaModule:
    """Functions and classes that replace those of the same name in ``torch.cuda``."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    # --- devices

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return len(self._machine.devices)

    def current_device(self) -> int:
        return self._machine.index

    def set_device(self, device: Any) -> None:
        found = self._machine.device(device)
        self._machine.queues.check(found)  # CUDA makes the context of the device here
        self._machine.index = found.index

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before = self._machine.index
        self.set_device(device)
        try:
            yield
        finally:
            self._machine.index = before

    def get_device_name(self, device: Any = None) -> str:
        return self._machine.names[self._machine.device(device).index]

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        found = self._machine.device(device)
        total = self._machine.allocator(found).total_bytes
        major, minor = self.get_device_capability(found)
        return SimpleNamespace(
            name=self.get_device_name(found),
            total_memory=total,
            uuid=f"fake {found.index}",
            L2_cache_size=CACHE_BYTES,
            major=major,
            minor=minor,
        )

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return self._machine.capabilities[self._machine.device(device).index]

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return including_emulation

    # --- streams

    def Stream(self, device: Any = None, priority: int = 0) -> streams.Stream:  # noqa: N802  # torch's
        return self._machine.queues.new_stream(self._machine.device(device))

    def Event(self, enable_timing: bool = False, **_: Any) -> TimedEvent:  # noqa: N802  # torch's
        return TimedEvent(self._machine)

    def current_stream(self, device: Any = None) -> streams.Stream:
        return self._machine.stream_of(self._machine.device(device))

    def default_stream(self, device: Any = None) -> streams.Stream:
        return self._machine.default[self._machine.device(device).index]

    def set_stream(self, stream: streams.Stream) -> None:
        self._machine.index = stream.device.index
        self._machine.current[stream.device.index] = stream

    @contextmanager
    def stream(self, stream: streams.Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        before, there = self.current_stream(), self.current_stream(stream.device)
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(there)
            self.set_stream(before)

    def set_sync_debug_mode(self, mode: str) -> None:
        self._machine.queues.refuses_to_wait = mode == "error"

    def _sleep(self, cycles: int) -> None:
        """Let the current stream sleep, for as long as the host does not wait for it."""
        assert cycles > 0
        self._machine.queues.sleep(self.current_stream())

    def synchronize(self, device: Any = None) -> None:
        self._machine.queues.finish_all(self._machine.device(device))

    # --- memory

    def empty_cache(self) -> None:
        for allocator in self._machine.allocators:
            allocator.empty_cache()

    def memory_allocated(self, device: Any = None) -> int:
        return self._machine.allocator(device).allocated_bytes

    def max_memory_allocated(self, device: Any = None) -> int:
        return self._machine.allocator(device).most_allocated_bytes

    def memory_reserved(self, device: Any = None) -> int:
        return self._machine.allocator(device).reserved_bytes

    def max_memory_reserved(self, device: Any = None) -> int:
        return self._machine.allocator(device).most_reserved_bytes

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self._machine.queues.check()
        found = self._machine.allocator(device)
        found.most_allocated_bytes = found.allocated_bytes
        found.most_reserved_bytes = found.reserved_bytes

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        self._machine.queues.check(self._machine.device(device))
        found = self._machine.allocator(device)
        return found.free_bytes, found.total_bytes

    def get_per_process_memory_fraction(self, device: Any = None) -> float:
        return self._machine.allocator(device).fraction

    def set_per_process_memory_fraction(self, fraction: float, device: Any = None) -> None:
        self._machine.allocator(device).fraction = fraction

    # --- random numbers, which are those of the CPU

    def get_rng_state(self, device: Any = "cuda") -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = "cuda") -> None:
        torch.set_rng_state(state)

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing: torch seeds the CPU itself."""


class TimedEvent(Event):
    """An event that is recorded on the current stream if none is given.

    Its time is that at which the host recorded it: how long work takes means nothing here.
    """

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine
        self._recorded_s = 0.0

    def _current(self) -> streams.Stream:
        return self._machine.current[self._machine.index]

    def record(self, stream: streams.Stream | None = None) -> None:
        super().record(stream or self._current())
        self._recorded_s = time.perf_counter()

    def wait(self, stream: streams.Stream | None = None) -> None:
        super().wait(stream or self._current())

    def elapsed_time(self, end: TimedEvent) -> float:
        for event in (self, end):
            assert event.mark is not None, "the event was not recorded"
            assert event.query(), "the event has not happened"
        return (end._recorded_s - self._recorded_s) * 1e3


def _as_class(name: str, make: Callable[..., Any]) -> type:
    """Return a class whose instances a function makes; others use it in annotations."""

    def new(cls: type, *arguments: Any, **named: Any) -> Any:
        return make(*arguments, **named)

    return type(name, (), {"__new__": new})


def _grouped(lists: list[list[Any]], with_indices: bool = False) -> dict[Any, Any]:
    """Group parallel lists of tensors by device and dtype; to torch's C++ all are the CPU's."""
    groups: dict[Any, tuple[list[list[Any]], list[int]]] = {}
    for index, tensor in enumerate(lists[0]):
        key = (tensor.device, tensor.dtype)
        kept, indices = groups.setdefault(key, ([[] for _ in lists], []))
        for own, given in zip(kept, lists, strict=True):
            own.extend(given[index : index + 1])
        indices += [index] if with_indices else []
    return groups


def put_in_place(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    """Replace the functions of ``torch.cuda``."""
    module = CudaModule(machine)
    for name in dir(module):
        if not name.startswith("_"):
            made = getattr(module, name)
            patch.setattr(torch.cuda, name, _as_class(name, made) if name in CLASSES else made)
    patch.setattr(torch.cuda, "_sleep", module._sleep)
    patch.setattr(torch._C, "_group_tensors_by_device_and_dtype", _grouped)
    patch.setattr(torch.backends.cudnn, "is_acceptable", lambda _: False)
    # only in torch that was built with CUDA
    patch.setattr(torch._C, "_host_emptyCache", machine.page_locked.empty_cache, raising=False)
    patch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    # its streams and page-locked memory are those of the machine
    uncached = product_streams._stream.__wrapped__
    patch.setattr(product_streams, "_stream", functools.cache(uncached))
    sender = HostSender(small_bytes=SMALL_BYTES, thread=machine.thread)
    patch.setattr(product_streams, "_HOST_SENDER", sender)
