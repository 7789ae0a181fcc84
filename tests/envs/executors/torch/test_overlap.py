"""Copies that overlap with compute: sent once computed, awaited when read, same results."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from envs.executors.torch.placed_module import PlacedModule
from envs.executors.torch.staging import HostSender, Staging
from envs.executors.torch.streams import arrived, sending
from envs.hardware.host import STAGING_BYTES
from envs.measured import TimedStep
from envs.torch_runtime import TorchExecutor
from graphs.extract import Workload, extract
from graphs.extract.placeable import call_graph
from tests.fake_cuda import fake_cuda
from tests.fake_cuda.late_thread import LateThread
from tests.fake_cuda.machine import Machine, is_fake, machine
from tests.fake_cuda.modes import DispatchMode, FunctionMode
from tests.helpers.clusters import equal_costs
from tests.helpers.extracted_steps import fresh
from tests.helpers.on_torch_devices import alternating
from tests.helpers.op_log import OpLog
from tests.helpers.placed_steps import random_devices, random_order
from tests.helpers.second_devices import DEVICES, FAKE, on_gpus, second
from tests.helpers.tiny_models import Plain, squared
from tests.helpers.trained_alike import assert_trains_alike

CPU = torch.device("cpu")
ON_DEVICES = pytest.mark.parametrize("second_device", DEVICES, indirect=True)
NAMES = ("conv_net", "tied_weights", "norm_twice", "views", "attention", "decaying_weight")


def chain() -> Workload:
    """Return a step whose first result on the second device is the last one read on the host."""

    def compute(m: nn.Module, x: Tensor) -> Tensor:
        early: Tensor = m.get_submodule("far")(x)
        late = early.sin().cos().tanh()
        total: Tensor = late.mean() + m.get_submodule("near")(early).mean()
        return total

    torch.manual_seed(0)
    model = Plain(compute, far=nn.Linear(3, 3), near=nn.Linear(3, 3))
    return Workload.of(model, (torch.randn(2, 3),))


@pytest.mark.slow_repeats
@ON_DEVICES
@pytest.mark.usefixtures("second_device")
@pytest.mark.parametrize(("seed", "name"), list(enumerate(NAMES)))
def test_random_placements_compute_the_same_and_send_as_much(seed: int, name: str) -> None:
    extraction = fresh(name)
    step = copy.deepcopy(extraction.step)
    devices = random_devices(extraction, [CPU, second()], seed)
    order = random_order(extraction, seed) if seed else ()
    plain = PlacedModule(extraction, devices, order)
    placed = PlacedModule(extraction, devices, order, overlap=True)
    assert placed.transfers == plain.transfers > 0
    assert_trains_alike(step, placed, steps=2)


@pytest.mark.slow_repeats
@pytest.mark.usefixtures("second_device")
@pytest.mark.parametrize("overlap", [False, True])
def test_a_tensor_is_sent_when_it_is_made_not_where_it_is_read(overlap: bool) -> None:
    extraction = extract(chain())
    on_host = ("near", ":mean#1", ":add")
    calls = extraction.forward.placed_calls
    where = {c.key: CPU if c.key.startswith(on_host) else second() for c in calls}
    placed = PlacedModule(extraction, where, overlap=overlap)
    placed(*extraction.step.inputs)  # sends the weights
    with torch.no_grad(), OpLog() as log:
        machine().transfers = SimpleNamespace(append=lambda _: log.names.append("sent"))
        placed(*extraction.step.inputs)
    made = log.names.index("addmm")
    read = log.names.index("addmm", made + 1)
    sent = log.names.index("sent", made)
    between = log.names.index("sin")
    assert made < between < log.names.index("tanh") < read, "the host waits last"
    assert made < sent < read
    assert (sent < between) is overlap
    assert_trains_alike(chain(), placed)


@ON_DEVICES
@pytest.mark.usefixtures("second_device")
def test_what_is_written_in_place_is_not_sent_ahead() -> None:
    def write(m: nn.Module, x: Tensor) -> Tensor:
        held: Tensor = m.get_submodule("linear")(x) * 2
        before = held.exp().mean()
        held[0].fill_(0.5)
        return before + held.exp().mean()

    torch.manual_seed(0)
    step = Workload.of(Plain(write, linear=nn.Linear(3, 3)), (torch.randn(3, 3),))
    extraction = extract(copy.deepcopy(step))
    calls = extraction.forward.placed_calls
    where = {call.key: second() if call.key.startswith(":exp") else CPU for call in calls}
    assert_trains_alike(step, PlacedModule(extraction, where, overlap=True))


# --- on CUDA

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("size_bytes", [256, 1 << 10])
@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(()).expand(3, 4),
        torch.arange(4.0).expand(3, 4),
        torch.arange(24.0).reshape(2, 3, 4)[:, 1],
        nn.Parameter(torch.arange(3.0)).expand(2, 3),
    ],
    ids=["gradient of a sum", "rows", "part", "parameter"],
)
def test_what_is_staged_shares_no_memory_between_its_elements(
    tensor: Tensor, size_bytes: int
) -> None:
    with fake_cuda():
        sender = HostSender(size_bytes, 0, LateThread(1))
        found = sent_by(sender, tensor)
        assert found.device == torch.device("cuda", 0)
        assert found.untyped_storage().nbytes() == found.nbytes
        assert not found.requires_grad
        assert torch.equal(found.cpu(), tensor)
        transposed = torch.arange(12.0).reshape(3, 4).t()
        kept = sent_by(sender, transposed)
        assert kept.stride() == transposed.stride(), "dense tensors keep their order"
        assert torch.equal(kept.cpu(), transposed)


def sent_by(sender: HostSender, tensor: Tensor) -> Tensor:
    return sender.send(tensor, torch.cuda.current_stream(0))[0]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.complex64])
def test_staging_takes_any_dtype_and_no_more_memory_than_it_may(
    dtype: torch.dtype,
) -> None:
    with fake_cuda() as machine:
        sender = HostSender(1 << 10, 64, LateThread(1))
        for shape in ((), (0, 3), (7,), (3, 50), (2000,)):
            given = torch.randint(2, shape).to(dtype)
            assert torch.equal(sent_by(sender, given).cpu(), given)
        assert machine.page_locked.bytes == (1 << 10) + 8 * 64


@pytest.mark.slow
def test_page_locked_memory_beyond_the_staging_buffers_is_given_back() -> None:
    """Copies to the host lie in memory that torch keeps for the next; placements cut elsewhere."""
    extraction = fresh("conv_net")
    calls = call_graph(extraction)
    with fake_cuda() as machine:
        problem = equal_costs(calls.graph)
        executor = TorchExecutor(extraction, calls, problem, overlap=True)
        here = alternating(problem)
        placements = [
            here,
            replace(here, devices=tuple(1 - device for device in here.devices)),
            replace(here, devices=(*[0] * 8, *[1] * 8)),
        ]
        held_bytes = []
        for placement in placements:
            found = executor.run(placement)
            assert isinstance(found, TimedStep), found
            held_bytes.append(machine.page_locked.bytes)
        executor.clear()
        assert machine.page_locked.bytes == STAGING_BYTES  # nothing sent was small
        assert len(set(held_bytes)) == 3
        assert min(held_bytes) > STAGING_BYTES
        executor.close()


class OtherThread(ThreadPoolExecutor):
    """A real thread that uses a fake machine."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(1)
        self._machine = machine

    def submit(self, work: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        def there() -> Any:
            with DispatchMode(self._machine), FunctionMode(self._machine):
                return work(*args, **named)

        return super().submit(there)


def test_the_thread_that_writes_is_in_inference_mode_as_the_one_that_sends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send, modes = Staging.send, []

    def watched(*args: Any) -> torch.cuda.Event:
        modes.append(torch.is_inference_mode_enabled())
        return send(*args)

    monkeypatch.setattr(Staging, "send", watched)
    with fake_cuda() as machine, OtherThread(machine) as thread:
        sender = HostSender(1 << 10, 0, thread)
        stream: torch.cuda.Stream = torch.cuda.Stream(0)  # type: ignore[no-untyped-call]  # torch's
        for inference in (True, False):
            with torch.inference_mode(inference):
                given = torch.arange(100.0)
                with torch.cuda.stream(stream):  # all threads of a fake machine have one
                    copy, end = sender.send(given, stream)
                    assert isinstance(end, Future)
                    event = end.result()
                torch.cuda.current_stream(0).wait_event(event)
                assert torch.equal(copy.cpu(), given)
    assert modes == [True, False]


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("seed", range(3))
def test_large_tensors_that_meet_long_kernels_arrive_whole(seed: int) -> None:
    """An early or late copy, or one of reused memory, would change the result."""

    def compute(m: nn.Module, x: Tensor) -> Tensor:
        for i in range(6):
            x = torch.tanh(m.get_submodule(f"l{i}")(x)) + x
        return x

    torch.manual_seed(0)
    layers: dict[str, nn.Module] = {f"l{i}": nn.Linear(1024, 1024) for i in range(6)}
    step = Workload.of(Plain(compute, **layers), (torch.randn(2048, 1024),) * 2, squared)
    extraction = extract(step)
    plain = copy.deepcopy(extraction.step)
    placed = PlacedModule(
        extraction, random_devices(extraction, [CPU, second()], seed), overlap=True
    )
    assert_trains_alike(plain, placed, steps=2, tolerance=1e-3)


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("cuda", "dense"),
    [
        case
        for dense in (True, False)
        for case in (on_gpus(2, "cuda", dense), *((f"{FAKE} {seed}", dense) for seed in range(6)))
    ],
    indirect=["cuda"],
)
@pytest.mark.usefixtures("cuda")
def test_what_one_gpu_sends_arrives_whole_at_another_and_its_gradient_back(dense: bool) -> None:
    first, other = torch.device("cuda", 0), torch.device("cuda", 1)
    size = 64 if is_fake() else 2048
    for _ in range(5):
        near = torch.randn(size, size, device=first, requires_grad=True)
        made = near * 2 if dense else (near * 2)[::2, ::3]
        sent = sending(made, other)
        torch.mm(torch.ones(size, size, device=other), torch.ones(size, size, device=other))
        there = arrived(sent)
        assert there.device == other
        assert torch.equal(there.cpu(), made.cpu())
        torch.autograd.backward((there * 3).sum())
        assert near.grad is not None
        assert near.grad.sum().item() == 6 * made.numel()


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("into", [True, False])
def test_a_copy_overlaps_with_compute_on_the_gpu(into: bool) -> None:
    device = second()
    matrix = torch.randn(4096, 4096, device=device)
    large = torch.randn(64 << 20).pin_memory() if into else torch.randn(64 << 20, device=device)
    destination = device if into else CPU

    def compute() -> None:
        for _ in range(20):
            torch.mm(matrix, matrix)

    def copying() -> None:
        arrived(sending(large, destination))

    def both() -> None:
        sent = sending(large, destination)
        compute()
        arrived(sent)

    def seconds(work: Callable[[], None]) -> float:
        event: Any = torch.cuda.Event  # torch leaves it untyped
        start, end = event(enable_timing=True), event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    for work in (compute, copying, both):
        work()
    runs = [(seconds(compute), seconds(copying), seconds(both)) for _ in range(7)]
    compute_s, copy_s, both_s = (statistics.median(own) for own in zip(*runs, strict=True))
    assert both_s < compute_s + copy_s - 0.5 * min(compute_s, copy_s)
