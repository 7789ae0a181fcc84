"""Torch devices: ``cpu`` with all of torch's threads, and ``cuda:0``.

A backend renamed through torch's PrivateUse1 counts as well, as ``name:0``.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from envs.hardware.errors import VISIBLE, UnavailableError
from graphs.text import escaped, first_line, suggestion

CPU: Final = torch.device("cpu")
_OUT_OF_MEMORY: Final = re.compile(r"can't allocate memory|out of memory|_ALLOC(ATION)?_FAILED")
"""Texts of the host's allocator, of the driver and NCCL, and of libraries such as cuBLAS."""
LEAST_FREE_BYTES: Final = 500_000_000
"""Free memory below which a GPU is not chosen by itself."""
DRIVER: Final = Path("/sys/module/nvidia/version")
Result = TypeVar("Result")


class DeviceError(RuntimeError):
    """A GPU cannot be used, maybe not any more; ``reason`` is what CUDA says."""

    def __init__(self, devices: Sequence[torch.device], reason: str) -> None:
        super().__init__(f"{', '.join(map(str, devices))} cannot be used: {reason}")
        self.reason = reason


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread within the block, which is faster for small networks."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out.

    Only torch's allocator for CUDA raises an error of its own: the host's, the driver and the
    libraries of CUDA say so in the text of a RuntimeError.
    """
    named = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return named or _OUT_OF_MEMORY.search(str(error)) is not None


def is_of_cuda(error: BaseException) -> bool:
    """Return whether CUDA or one of its libraries raised an error, memory that ran out included."""
    return isinstance(error, torch.AcceleratorError) or str(error).startswith(("CUDA", "cuDNN"))


@contextlib.contextmanager
def failures_named(*devices: torch.device) -> Iterator[None]:
    """Let errors of CUDA within the block say which of these devices fail since then, if any."""
    try:
        yield
    except RuntimeError as error:
        failing = [*kernel_failures(devices)] if is_of_cuda(error) else []
        if not failing:
            raise
        raise DeviceError(failing, first_line(error)) from error


def kernel_failure(device: torch.device) -> str:
    """Return why a GPU does not run a small product now, or "".

    It is lost, or of an architecture that torch was not built for: then copies and questions about
    its memory work. The first product loads CUDA's libraries, whose memory is not free from here
    on.
    """
    try:
        small = torch.ones(8, 8, device=device)
        small = small @ small
        synchronize(device)
        _clear("_cuda_clearCublasWorkspaces")
    except RuntimeError as error:
        if is_of_cuda(error) or is_out_of_memory(error):  # and not of torch's own settings
            return first_line(error)
    return ""


def kernel_failures(devices: Iterable[torch.device]) -> dict[torch.device, str]:
    """Return the GPUs among devices that fail, and why; one without free memory does not."""
    reasons = {device: kernel_failure(device) for device in devices if device != CPU}
    return {
        device: reason
        for device, reason in reasons.items()
        if reason and not _OUT_OF_MEMORY.search(reason)
    }


def cuda_devices() -> list[str]:
    """Return the names of all CUDA devices that torch can use."""
    if not torch.cuda.is_available():
        return []
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


def torch_device(name: str) -> torch.device:
    """Return the torch device of a name, if this machine has it."""
    if name == "cpu":
        return CPU
    backend, _, index = name.partition(":")
    if backend not in ("cuda", torch._C._get_privateuse1_backend_name()):
        raise ValueError(
            f"there is no device {name!r}; write cuda:N, cpu (all cores), core:N or a core set "
            f"core:N-M or core:N+M{_meant(name)}"
        )
    if not index.isdecimal() or not index.isascii():
        raise ValueError(f"there is no device {name!r}; write {backend}:0")
    module = getattr(torch, backend, None)
    count = module.device_count() if module is not None and module.is_available() else 0
    if int(index) >= count:
        visible = os.environ.get(VISIBLE) if backend == "cuda" else None
        selected = "" if visible is None else f" with {VISIBLE}={visible!r}"
        raise UnavailableError(
            f"there is no device {name}: torch {torch.__version__} sees {count or 'no'} "
            f"{backend} devices{selected}"
        )
    return torch.device(backend, int(index))


def _meant(name: str) -> str:
    """Return a hint at the device that a wrong name stands for, with the same number."""
    kind, number = name.rstrip("0123456789"), name[len(name.rstrip("0123456789")) :] or "0"
    known = [f"cuda:{number}", f"core:{number}", "cpu"]
    return suggestion(f"{kind}{number}".replace("gpu", "cuda"), known)


def kind_of(device: torch.device) -> str:
    """Return the device kind, such as ``cuda:NVIDIA H200`` or ``cpu*16``; op costs are by kind."""
    if device.type == "cpu":
        return f"cpu*{torch.get_num_threads()}"
    model = _call(device, "get_device_name", device)
    return device.type if model is None else f"{device.type}:{model}"


def uuid_of(device: torch.device) -> str:
    """Return what identifies a GPU whatever the devices visible to a process; "" for others."""
    properties = None if device.type == "cpu" else _call(device, "get_device_properties", device)
    return str(getattr(properties, "uuid", ""))


def cache_bytes(device: torch.device) -> int:
    """Return the size of the last cache of a GPU; 0 for other devices, and where it is unknown."""
    properties = None if device.type == "cpu" else _call(device, "get_device_properties", device)
    return int(getattr(properties, "L2_cache_size", 0))


def gpu_identities(names: Sequence[str]) -> list[str]:
    """Return what the GPUs among devices are, whatever their numbers: driver, kinds and UUIDs."""
    gpus = [torch_device(name) for name in names if name.startswith("cuda:")]
    return [driver_version(), *map(kind_of, gpus), *map(uuid_of, gpus)] if gpus else []


def kernel_settings() -> tuple[str, ...]:
    """Return the settings of torch that decide which kernels run: times are valid for these."""
    backends: Any = torch.backends  # typed in part
    cudnn, cuda, mkldnn = backends.cudnn, backends.cuda.matmul, backends.mkldnn
    precisions = {
        "cuda.matmul": cuda.fp32_precision,
        "cudnn.conv": cudnn.conv.fp32_precision,
        "cudnn.rnn": cudnn.rnn.fp32_precision,
        "mkldnn.matmul": mkldnn.matmul.fp32_precision,
        "mkldnn.conv": mkldnn.conv.fp32_precision,
    }
    flags = {
        "cudnn.enabled": cudnn.enabled,
        "cudnn.benchmark": cudnn.benchmark,
        "cudnn.deterministic": cudnn.deterministic,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "fp16 reductions": cuda.allow_fp16_reduced_precision_reduction,
        "bf16 reductions": cuda.allow_bf16_reduced_precision_reduction,
    }
    return tuple(f"{name} {value}" for name, value in {**precisions, **flags}.items())


def matmul_precision() -> str:
    """Return torch's precision of float32 products, as named for all backends or that of CUDA."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set for a single backend
        return str(torch.backends.cuda.matmul.fp32_precision)


def driver_version(file: Path = DRIVER) -> str:
    """Return the version of the driver of NVIDIA's GPUs, "" without one."""
    try:
        return escaped(file.read_text(encoding="ascii").strip())
    except (OSError, ValueError):
        return ""


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of an accelerator, torch's own cache included; None if unknown.

    No more than torch's allocator may take: a process can be limited to a share of the device.

    Raises:
        DeviceError: the device cannot be used.
    """
    try:
        free_and_total = _call(device, "mem_get_info", device)
    except RuntimeError as error:  # as of every call of a device that fails or is another's
        raise DeviceError([device], first_line(error)) from error
    if free_and_total is None:
        return None
    free, total = map(int, free_and_total)
    reserved, held = int(_call(device, "memory_reserved", device) or 0), held_bytes(device)
    share = _call(device, "get_per_process_memory_fraction", device)
    allowed = free + reserved if share is None else min(free + reserved, int(share * total))
    return max(allowed - held, 0)


def unusable_reason(name: str) -> str:
    """Return why a CUDA device is of no use now, or ""; another process may have it, or its memory.

    Measuring its speeds alone takes 0.3 GB.
    """
    device = torch_device(name)
    try:
        free = free_bytes(device)
    except DeviceError as error:
        return error.reason
    if free is not None and free < LEAST_FREE_BYTES:
        return f"only {free / 1e6:.0f} MB of its memory are free"
    return kernel_failure(device)


def held_bytes(device: torch.device) -> int:
    """Return the memory in tensors of this process; 0 if the device does not report it."""
    return int(_call(device, "memory_allocated", device) or 0)


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished all work; returns at once for the CPU."""
    if device.type != "cpu":
        _call(device, "synchronize", device)


def release(device: torch.device) -> None:
    """Release unused cached memory, to avoid fragmentation for what comes next.

    With CUDA this includes the workspaces of cuBLAS, and page-locked memory of the host. CUDA
    releases memory of all devices: errors of another one do not count.
    """
    try:
        if device.type == "cuda":
            _clear("_cuda_clearCublasWorkspaces")
            _clear("_host_emptyCache")
        _call(device, "empty_cache")
    except RuntimeError as error:
        if not is_of_cuda(error) or kernel_failures([device]):
            raise


def _clear(function: str) -> None:
    """Call one of torch's own functions, which a build may lack."""
    getattr(torch._C, function, lambda: None)()


def forked_rng(devices: Iterable[torch.device]) -> contextlib.AbstractContextManager[None]:
    """Restore the random states of the host, and of the CUDA devices among these, on exit.

    Of no others: CUDA may count devices that this process cannot use.
    """
    gpus = [device for device in devices if device.type == "cuda"]
    return torch.random.fork_rng(gpus, device_type="cuda")


def unless_out_of_memory(work: Callable[[], Result], device: torch.device) -> Result | None:
    """Return the result of ``work``, or None if it runs out of memory; then releases its memory."""
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    # only here the error is gone, and with it the frames that hold tensors
    gc.collect()
    release(device)
    return None


def reset_peak(device: torch.device) -> None:
    """Reset the peak memory statistics."""
    _call(device, "reset_peak_memory_stats", device)


def peak_bytes(device: torch.device) -> int | None:
    """Return the peak memory in tensors since the last reset; None if the device cannot tell."""
    peak = _call(device, "max_memory_allocated", device)
    return None if peak is None else int(peak)


def peak_reserved_bytes(device: torch.device) -> int | None:
    """Return the most that its allocator held since the last reset, gaps between tensors included.

    It is what limits are about; None if the device cannot tell.
    """
    peak = _call(device, "max_memory_reserved", device)
    return None if peak is None else int(peak)


@contextlib.contextmanager
def limited(limits: dict[torch.device, int]) -> Iterator[None]:
    """Limit how many more bytes torch's CUDA allocators may take; restore the old limits on exit.

    As in :func:`free_bytes`, memory already in tensors of this process does not count. The limit
    covers everything that the allocator reserves, fragmentation included, but not the context of
    the device (about 0.5 GB with CUDA). A lower limit that the process has already stays. Host
    memory cannot be limited, since this process holds more than the step: there, callers check
    placements against the simulator's prediction instead.
    """
    cuda = {device: size for device, size in limits.items() if device.type == "cuda"}
    before = {device: torch.cuda.get_per_process_memory_fraction(device) for device in cuda}
    try:
        for device, size in cuda.items():
            release(device)
            total = torch.cuda.get_device_properties(device).total_memory
            share = (size + held_bytes(device)) / total  # torch counts the whole process
            torch.cuda.set_per_process_memory_fraction(min(share, before[device]), device)
        yield
    finally:
        for device, fraction in before.items():
            torch.cuda.set_per_process_memory_fraction(fraction, device)


def _call(device: torch.device, function: str, *arguments: Any) -> Any:
    """Call a function of the device's torch module; return None if it has no such function."""
    call = getattr(getattr(torch, device.type, None), function, None)
    return None if call is None else call(*arguments)
