"""Devices that torch itself knows: ``cpu`` with all of torch's threads, and ``cuda:0``.

A backend that calls itself by another name (torch's PrivateUse1) counts as well, as ``name:0``.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

import torch

CPU: Final = torch.device("cpu")
Found = TypeVar("Found")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether there was no memory for a tensor; of the host's, torch tells in words only."""
    named = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return named or "can't allocate memory" in str(error)


def own_accelerators() -> list[str]:
    """Names of all CUDA devices that torch can use."""
    if not torch.cuda.is_available():
        return []
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


def torch_device(name: str) -> torch.device:
    """The torch device of a name.

    Raises:
        ValueError: the name has another form, or there is no such device here.
    """
    if name == "cpu":
        return CPU
    backend, _, index = name.partition(":")
    if backend not in ("cuda", torch._C._get_privateuse1_backend_name()):
        raise ValueError(
            f"there is no device {name!r}; write cuda:N, cpu (all cores), core:N or a core set "
            "core:N-M or core:N+M"
        )
    if not index.isdecimal() or not index.isascii():
        raise ValueError(f"there is no device {name!r}; write {backend}:0")
    module = getattr(torch, backend, None)
    count = module.device_count() if module is not None and module.is_available() else 0
    if int(index) >= count:
        raise ValueError(
            f"there is no device {name}: torch {torch.__version__} sees {count or 'no'} "
            f"{backend} devices"
        )
    return torch.device(backend, int(index))


def kind_of(device: torch.device) -> str:
    """Device kind, such as ``cuda:NVIDIA H200`` or ``cpu*16``: one kind shares its op costs."""
    if device.type == "cpu":
        return f"cpu*{torch.get_num_threads()}"
    named = _call(device, "get_device_name", device)
    return device.type if named is None else f"{device.type}:{named}"


def free_bytes(device: torch.device) -> int | None:
    """Memory of an accelerator that is free now, torch's own cache included; None if unknown."""
    found = _call(device, "mem_get_info", device)
    if found is None:
        return None
    reserved = int(_call(device, "memory_reserved", device) or 0)
    return int(found[0]) + reserved - held_bytes(device)


def held_bytes(device: torch.device) -> int:
    """Memory in tensors of this process; 0 where the device does not count it."""
    return int(_call(device, "memory_allocated", device) or 0)


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all that was asked of it; the CPU always has."""
    if device.type != "cpu":
        _call(device, "synchronize", device)


def release(device: torch.device) -> None:
    """Give unused memory back, so that what comes next finds no pieces of it."""
    _call(device, "empty_cache")


def unless_out_of_memory(work: Callable[[], Found], device: torch.device) -> Found | None:
    """What work returns; None where it finds no memory, when what it took is given back."""
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    # Only here is the error gone, and with it the frames that hold tensors.
    gc.collect()
    release(device)
    return None


def reset_peak(device: torch.device) -> None:
    """Forget the peak of the memory in use."""
    _call(device, "reset_peak_memory_stats", device)


def peak_bytes(device: torch.device) -> int | None:
    """Most memory in tensors since the last reset; None where the device does not count it."""
    found = _call(device, "max_memory_allocated", device)
    return None if found is None else int(found)


@contextlib.contextmanager
def limited(limits: dict[torch.device, int]) -> Iterator[None]:
    """Let torch's allocators take only so many bytes more; afterwards as many as before.

    What tensors of this process take already does not count, as in :func:`free_bytes`.
    The limit holds for all that the allocator reserves, the gaps between tensors included, but
    not for the context of the device itself (about half a GB with CUDA). That of the host cannot be
    enforced: this process has more in its memory than the step, so what is to be run is held to it
    by what the simulator predicts.
    """
    cuda = {device: size for device, size in limits.items() if device.type == "cuda"}
    before = {device: torch.cuda.get_per_process_memory_fraction(device) for device in cuda}
    try:
        for device, size in cuda.items():
            release(device)
            total = torch.cuda.get_device_properties(device).total_memory
            share = (size + held_bytes(device)) / total  # torch counts the whole process
            torch.cuda.set_per_process_memory_fraction(min(share, 1.0), device)
        yield
    finally:
        for device, fraction in before.items():
            torch.cuda.set_per_process_memory_fraction(fraction, device)


def _call(device: torch.device, function: str, *arguments: Any) -> Any:
    """What a device's torch module answers; None where it lacks the function."""
    found = getattr(getattr(torch, device.type, None), function, None)
    return None if found is None else found(*arguments)
