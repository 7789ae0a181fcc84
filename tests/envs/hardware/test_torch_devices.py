"""Torch devices: lookup by name, memory limits, and measurement."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from envs.costs import torch_speeds
from envs.costs.torch_speeds import seconds_per_call
from envs.hardware import discover as discovery
from envs.hardware import torch_devices
from envs.hardware.discover import check_devices, discover
from envs.hardware.errors import DeviceWarning, UnavailableError
from envs.hardware.torch_devices import DeviceError
from envs.runtime import calibrated
from tests.fake_cuda import fake_cuda
from tests.helpers.folders import ROOT

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_every_gpu_has_the_memory_that_is_free_on_it() -> None:
    total = 1 << 20
    with fake_cuda(2, memory_bytes=total):
        held = torch.empty(1 << 14, dtype=torch.uint8, device="cuda:0")
        found = discover("cuda:0,cuda:1").devices
    assert [each.memory_bytes for each in found] == [total - held.nbytes, total]


def test_what_libraries_take_at_the_first_product_is_no_free_memory() -> None:
    total, libraries = 1 << 20, 1 << 18
    with fake_cuda(2, memory_bytes=total) as machine:
        for allocator in machine.allocators:
            allocator.library_bytes = libraries
        [found] = discover("cuda:0").devices
        assert found.memory_bytes == total - libraries
        full = torch.empty(found.memory_bytes - 512 * 3, dtype=torch.uint8, device="cuda:0")
        small = torch.ones(4, 4, device="cuda:0")
        assert (small @ small).sum().item() == 64
        del full, small
        assert discover("cuda:0").devices == (found,), "they are there once"
        held = torch.empty(total - libraries // 2, dtype=torch.uint8, device="cuda:1")
        with pytest.raises(RuntimeError, match="cuda:1 cannot be used: CUDA error: out of memory"):
            discover("cuda:1")
        del held


def test_memory_of_the_cpu_is_all_that_is_free_or_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "available_memory_bytes", lambda: 1 << 40)
    (cpu,) = discover("cpu").devices
    assert (cpu.name, cpu.kind) == ("cpu", f"cpu*{torch.get_num_threads()}")
    assert cpu.memory_bytes == 1 << 40
    for name in ("cpu", "core:0"):
        assert discover(name, {name: 1000}).devices[0].memory_bytes == 1000
    with pytest.raises(ValueError, match="cpu cannot have 1"):
        discover("cpu", {"cpu": 10**18})
    with pytest.raises(ValueError, match="memory of gpu"):
        discover("cpu", {"gpu": 1})


def test_auto_takes_all_cuda_devices_and_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "available_memory_bytes", lambda: 1001)
    with fake_cuda(2, memory_bytes=1 << 30):
        held = torch.empty(1 << 20, dtype=torch.uint8, device="cuda:1")
        cluster = discover("auto")
    assert cluster.names == ("cuda:0", "cuda:1", "cpu")
    memory_bytes = [device.memory_bytes for device in cluster.devices]
    assert memory_bytes == [1 << 30, (1 << 30) - held.nbytes, 1001]


@pytest.mark.filterwarnings("always")
def test_gpus_that_cannot_be_used_are_left_out_unless_they_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fake_cuda(3, memory_bytes=1 << 30):
        torch.cuda.set_per_process_memory_fraction(0.1, 0)
        with pytest.warns(DeviceWarning, match=r"cuda:0 is left out: only 107 MB of its memory"):
            assert discover("auto").names == ("cuda:1", "cuda:2", "cpu")
        info = torch.cuda.mem_get_info

        def busy(device: torch.device) -> tuple[int, int]:
            if device.index != 2:
                raise torch.AcceleratorError("CUDA error: devices are busy\nCompile with ...")
            return info(device)

        monkeypatch.setattr(torch.cuda, "mem_get_info", busy)
        with pytest.warns(DeviceWarning, match="left out: CUDA error: devices are busy$"):
            assert discover("auto").names == ("cuda:2", "cpu")
        with pytest.raises(
            RuntimeError, match=r"^cuda:1 cannot be used: CUDA error: devices are bu"
        ):
            discover("cuda:1,cpu")
        monkeypatch.setattr(torch_devices, "cuda_devices", lambda: ["cuda:0", "cuda:1"])
        with pytest.warns(DeviceWarning, match="left out"):
            assert discover("auto").names[0].startswith("core:")


NO_KERNELS = "no kernel image is available for execution on the device"


@pytest.mark.filterwarnings("always")
def test_a_gpu_that_torch_has_no_kernels_for_is_left_out_or_refused() -> None:
    with fake_cuda(2) as machine:
        machine.refuses_kernels[machine.devices[0]] = NO_KERNELS
        assert torch_devices.free_bytes(machine.devices[0]), "its memory alone works"
        with pytest.warns(DeviceWarning, match=f"cuda:0 is left out: CUDA error: {NO_KERNELS}$"):
            assert discover("auto").names == ("cuda:1", "cpu")
        with pytest.raises(DeviceError, match=f"^cuda:0 cannot be used: CUDA error: {NO_KERNELS}$"):
            discover("cuda:0,cuda:1,cpu")
        assert discover("cuda:1,cpu").names == ("cuda:1", "cpu")


def test_an_error_of_cuda_names_the_gpu_that_fails_and_others_stay_as_they_are() -> None:
    with fake_cuda(3) as machine:
        first, second, _ = machine.devices
        machine.queues.lose(second, "uncorrectable ECC error encountered")
        with (
            pytest.raises(
                DeviceError, match=r"^cuda:1 cannot be used: CUDA error: uncorrectable ECC error en"
            ) as failed,
            torch_devices.failures_named(first, second, torch_devices.CPU),
        ):
            torch.ones(1, device=first).to(second)
        assert failed.value.reason == "CUDA error: uncorrectable ECC error encountered"
        with pytest.raises(RuntimeError, match=r"^mat1"), torch_devices.failures_named(first):
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


@pytest.mark.parametrize("count", [1, 2])
def test_an_error_of_cuda_that_leaves_all_gpus_working_stays_as_it_is(count: int) -> None:
    error = RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED\nThis error may appear if ...")
    with (
        fake_cuda(2) as machine,
        pytest.raises(RuntimeError) as failed,
        torch_devices.failures_named(*machine.devices[:count]),
    ):
        raise error
    assert failed.value is error


def test_a_gpu_without_free_memory_does_not_fail() -> None:
    with fake_cuda(3, memory_bytes=1 << 20) as machine:
        _, full, lost = machine.devices
        held = torch.empty(1 << 20, dtype=torch.uint8, device=full)
        machine.queues.lose(lost, "unknown error")
        assert "out of memory" in torch_devices.kernel_failure(full)
        failing = torch_devices.kernel_failures([*machine.devices, torch_devices.CPU])
        assert failing == {lost: "CUDA error: unknown error"}
        del held


NO_GPUS = "from envs.hardware.discover import discover; print(discover('auto').names); "
REFUSED = "discover('cuda:0')"


@pytest.mark.slow_repeats
@pytest.mark.parametrize("visible", ["", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "MIG-5c3e"])
def test_without_a_visible_gpu_there_are_cores(visible: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_GPUS + REFUSED],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": visible},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("('core:")
    selected = f"CUDA_VISIBLE_DEVICES={visible!r}"
    warning = f"DeviceWarning: there is no GPU that {selected} names: cores are used\n"
    assert done.stderr.count(warning) == bool(visible)
    assert "UnavailableError: there is no device cuda:0: torch " in done.stderr.splitlines()[-1]
    assert done.stderr.endswith(f" sees no cuda devices with {selected}\n")


@pytest.mark.gpu
@needs_cuda
def test_gpus_may_be_made_visible_by_their_uuid() -> None:
    uuid = torch_devices.uuid_of(torch.device("cuda:0"))
    done = subprocess.run(
        [sys.executable, "-c", NO_GPUS],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": f"GPU-{uuid}"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "('cuda:0', 'cpu')\n"


def test_a_device_that_this_torch_does_not_see_is_refused() -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    with pytest.raises(ValueError, match=f"there is no device cuda:{count}: torch "):
        check_devices(["cpu", f"cuda:{count}"])


def test_speeds_of_the_host_are_measured_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACER_CACHE", str(tmp_path))
    monkeypatch.setattr(torch_speeds, "STREAM_BYTES", 8 << 20)

    def seconds(work: Any, _: object) -> float:
        work()
        (tensor, *_) = work.args
        return {(1,): 5e-6, (512, 512): 3e-3, (2 << 20,): 1e-3}[tuple(tensor.shape)]

    monkeypatch.setattr(torch_speeds, "seconds_per_call", seconds)
    monkeypatch.setattr(  # products of 256 rows are too short
        torch_speeds, "burst", lambda work, *_: 1e-3 if len(work.args[0]) < 512 else 3e-3
    )
    first = calibrated(discover("cpu", {"cpu": 1 << 20}))
    (cpu,) = first.devices
    assert cpu.memory_bytes == 1 << 20
    assert cpu.launch_s == 5e-6
    assert cpu.peak_flop_per_s == pytest.approx(2 * 512**3 / 3e-3)
    assert cpu.bandwidth_bytes_per_s == pytest.approx(2 * (8 << 20) / 1e-3)
    assert "float32 matmul precision" in cpu.source
    assert first.links == ()
    assert calibrated(discover("cpu", {"cpu": 1 << 20})) == first


@pytest.mark.gpu
@needs_cuda
def test_a_limit_of_cuda_memory_holds_and_is_lifted() -> None:
    device = torch.device("cuda:0")
    with torch_devices.limited({device: 64 << 20}), pytest.raises(torch.OutOfMemoryError):
        torch.empty(128 << 20, dtype=torch.uint8, device=device)
    torch.empty(128 << 20, dtype=torch.uint8, device=device)


@pytest.fixture
def fractions(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Replace torch's memory fraction of a device with 100 bytes, 0.9 at first, and return it."""
    fractions = {"now": 0.9}
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=100)
    )
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: fractions["now"])
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda fraction, _: fractions.update(now=fraction),
    )
    return fractions


def test_what_the_process_holds_already_is_not_counted_against_a_limit(
    fractions: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 30)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 35)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (55, 100))
    free = torch_devices.free_bytes(device)
    assert free == 60
    with torch_devices.limited({device: 20}):
        assert fractions["now"] == pytest.approx(0.5), "20 bytes more than the 30"
    with torch_devices.limited({device: free}):
        assert fractions["now"] == pytest.approx(0.9), "100 without what others hold"
        with torch_devices.limited({device: 20}):
            assert fractions["now"] == pytest.approx(0.5)
        assert fractions["now"] == pytest.approx(0.9)
    assert fractions["now"] == 0.9


def test_a_limit_that_the_process_has_already_stays() -> None:
    device, total = torch.device("cuda", 0), 1 << 30
    with fake_cuda(memory_bytes=total):
        held = torch.empty(1 << 20, dtype=torch.uint8, device=device)
        assert torch_devices.free_bytes(device) == total - held.nbytes
        torch.cuda.set_per_process_memory_fraction(0.25, device)
        free = torch_devices.free_bytes(device)
        assert free == total // 4 - held.nbytes
        assert discover("cuda:0").devices[0].memory_bytes == free
        with pytest.raises(
            UnavailableError, match=f"cannot have {total // 2} bytes of memory: {free} "
        ):
            discover("cuda:0", {"cuda:0": total // 2})
        for limit, expected in ((total, 0.25), (total // 8, 0.125 + held.nbytes / total)):
            with torch_devices.limited({device: limit}):
                assert torch.cuda.get_per_process_memory_fraction(device) == expected
                if limit > free:
                    with pytest.raises(torch.OutOfMemoryError):
                        torch.empty(total // 4, dtype=torch.uint8, device=device)
            assert torch.cuda.get_per_process_memory_fraction(device) == 0.25
        torch.cuda.set_per_process_memory_fraction(held.nbytes / 2 / total, device)
        assert torch_devices.free_bytes(device) == 0


def test_peaks_of_what_is_reserved_have_the_gaps_between_tensors() -> None:
    device = torch.device("cuda", 0)
    with fake_cuda():
        for size in (1 << 16, 1 << 20):
            torch.empty(size, dtype=torch.uint8, device=device)  # freed, and kept
        assert torch_devices.peak_bytes(device) == 1 << 20
        assert torch_devices.peak_reserved_bytes(device) == (1 << 20) + (1 << 16)
        torch_devices.release(device)
        torch_devices.reset_peak(device)
        assert torch_devices.peak_reserved_bytes(device) == 0
    assert torch_devices.peak_reserved_bytes(torch_devices.CPU) is None


def test_what_found_no_memory_is_gone_before_memory_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    def large() -> torch.Tensor:
        first = torch.ones(1000)
        made.append(weakref.ref(first))
        return first + torch.empty(1 << 50)

    monkeypatch.setattr(
        torch_devices, "release", lambda _: alive.extend(own() is not None for own in made)
    )
    assert torch_devices.unless_out_of_memory(large, torch_devices.CPU) is None
    assert alive == [False]
    assert torch_devices.unless_out_of_memory(lambda: 3, torch_devices.CPU) == 3
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch_devices.unless_out_of_memory(
            lambda: torch.ones(2, 3) @ torch.ones(2, 3), torch_devices.CPU
        )


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaError`"), True),
        (RuntimeError("CUDA driver error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), True),
        (
            torch.distributed.DistBackendError(
                "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error\n"
                "Last error:\nCuda failure 2 'out of memory'"
            ),
            True,
        ),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), False),
    ],
    ids=str,
)
def test_memory_that_ran_out_is_recognized_by_type_and_text(
    error: Exception, expected: bool
) -> None:
    assert torch_devices.is_out_of_memory(error) is expected


@pytest.mark.gpu
@needs_cuda
def test_links_with_the_host_lead_one_way_each() -> None:
    cluster = torch_speeds.measured_speeds(discover("cuda:0,cpu"))
    assert [link.between for link in cluster.links] == [("cuda:0", "cpu"), ("cpu", "cuda:0")]
    assert all(link.one_way for link in cluster.links)


@pytest.mark.gpu
@needs_cuda
def test_a_burst_on_cuda_costs_what_the_kernels_work_or_what_launching_takes() -> None:
    device = torch.device("cuda:0")
    matrix = torch.randn(2048, 2048, device=device)
    one, four = (
        seconds_per_call(lambda n=n: [torch.mm(matrix, matrix) for _ in range(n)], [device])  # type: ignore[misc]  # mypy takes no default there
        for n in (1, 4)
    )
    assert four == pytest.approx(4 * one, rel=0.3)
    small = torch.ones(1, device=device)
    start = time.perf_counter()
    for _ in range(1000):
        torch.neg(small)
    launched_s = (time.perf_counter() - start) / 1000
    assert seconds_per_call(lambda: torch.neg(small), [device]) == pytest.approx(
        launched_s, rel=1.0
    )
