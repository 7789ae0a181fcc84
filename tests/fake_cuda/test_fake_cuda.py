"""The fake shows what it is for: every kind of missing synchronization gives a wrong result."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.fake_cuda import fake_cuda
from tests.fake_cuda.machine import Machine

CPU, FIRST, OTHER = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
SEEDS = range(6)


@pytest.fixture(params=SEEDS)
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    with fake_cuda(2, seed=request.param) as made:
        yield made


def wrong_for_some_seed(work: Callable[[], Tensor], expected: Tensor) -> bool:
    """Return whether the result of the work depends on the order of streams."""
    wrong = []
    for seed in SEEDS:
        with fake_cuda(2, seed=seed):
            wrong.append(not torch.equal(work().cpu(), expected))
    return any(wrong)


def side_stream(device: torch.device = FIRST) -> torch.cuda.Stream:
    made: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's
    return made


# --- what works


@pytest.mark.slow_repeats
def test_a_model_on_a_fake_device_trains_as_on_the_cpu(machine: Machine) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(
        *(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(48, 8), nn.LayerNorm(8), nn.Linear(8, 4)),
    )
    there = copy.deepcopy(plain).to(FIRST)
    images, labels = torch.randn(5, 1, 6, 6), torch.arange(5) % 4
    for model, x, y in ((plain, images, labels), (there, images.to(FIRST), labels.to(FIRST))):
        adam = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        for _ in range(3):
            adam.zero_grad()
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]  # torch's
            adam.step()
    assert {parameter.device for parameter in there.parameters()} == {FIRST}
    for name, found in there.state_dict().items():
        torch.testing.assert_close(found.cpu(), plain.state_dict()[name], rtol=0, atol=0)
    assert machine.allocators[0].allocated_bytes > 0


def test_a_deep_copy_has_its_own_memory_and_the_same_ties(machine: Machine) -> None:
    first, second = (nn.Linear(4, 4).to(FIRST) for _ in range(2))
    second.weight = first.weight
    twin, other = copy.deepcopy([first, second])
    assert isinstance(twin.weight, nn.Parameter)
    assert other.weight is twin.weight is not first.weight
    before = first.weight.cpu()
    with torch.no_grad():
        first.weight.zero_()
    assert twin.weight.device == FIRST
    assert torch.equal(twin.weight.cpu(), before)


@pytest.mark.parametrize("lower", [CPU, FIRST], ids=str)
def test_autocast_is_that_of_the_device(lower: torch.device) -> None:
    with fake_cuda(1):
        linear = nn.Linear(4, 4)
        for device in (CPU, FIRST):
            own = copy.deepcopy(linear).to(device)
            x = torch.randn(3, 4, device=device)
            with torch.autocast(lower.type, torch.bfloat16):
                made = own(x)
                total = made.sum()
            assert made.dtype is (torch.bfloat16 if device == lower else torch.float32)
            torch.autograd.backward(total)
            assert own.weight.grad is not None
            assert own.weight.grad.dtype is torch.float32
            assert own.weight.grad.device == device


def test_gradients_cross_devices(machine: Machine) -> None:
    here = torch.arange(6.0).view(2, 3).requires_grad_()
    there = (here * 2).to(FIRST)
    far = there[1:].sin().to(OTHER)
    loss = (far * torch.ones(3, device=OTHER)).sum().cpu()
    torch.autograd.backward(loss)
    expected = torch.zeros(2, 3)
    expected[1] = 2 * (here.detach()[1] * 2).cos()
    torch.testing.assert_close(here.grad, expected)


def test_devices_do_not_mix(machine: Machine) -> None:
    with pytest.raises(RuntimeError, match=r"on the same device, but .* cpu, cuda:0"):
        torch.ones(3, device=FIRST) + torch.ones(3)
    with pytest.raises(RuntimeError, match="cuda:0, cuda:1"):
        torch.ones(3, device=FIRST) + torch.ones(3, device=OTHER)
    assert (torch.ones(3, device=FIRST) * torch.tensor(2.0)).tolist() == [2.0] * 3


def test_random_numbers_are_those_of_the_order_of_calls(machine: Machine) -> None:
    side = side_stream()
    torch.manual_seed(3)
    with torch.cuda.stream(side):
        first = F.dropout(torch.ones(50, device=FIRST))
    second = F.dropout(torch.ones(50, device=FIRST))
    torch.cuda.synchronize(FIRST)
    torch.manual_seed(3)
    assert torch.equal(first.cpu(), F.dropout(torch.ones(50)))
    assert torch.equal(second.cpu(), F.dropout(torch.ones(50)))


def test_a_seed_gives_the_same_results_again() -> None:
    def racing() -> list[float]:
        side, results = side_stream(), []
        for _ in range(8):
            made = torch.ones(4, device=FIRST) * 2
            with torch.cuda.stream(side):
                results.append(made + 1)
        return [result.nan_to_num(-1.0).sum().item() for result in results]

    runs = []
    for seed in (2, 3, 4, 2, 3, 4):
        with fake_cuda(seed=seed):
            runs.append(racing())
    assert runs[:3] == runs[3:]


# --- what goes wrong


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_that_does_not_wait_reads_garbage(waits: bool) -> None:
    def work() -> Tensor:
        side = side_stream()
        made = torch.ones(4, device=FIRST)
        if waits:
            side.wait_stream(torch.cuda.current_stream(FIRST))
        with torch.cuda.stream(side):
            doubled = made * 2
        if waits:
            torch.cuda.current_stream(FIRST).wait_event(side.record_event())
        return (doubled + 1).cpu()  # before the memory of the others is free

    assert wrong_for_some_seed(work, torch.full((4,), 3.0)) is not waits


@pytest.mark.parametrize("synchronizes", [True, False])
def test_the_host_that_does_not_wait_reads_garbage(synchronizes: bool) -> None:
    def work() -> Tensor:
        here = torch.ones(4, device=FIRST).to(CPU, non_blocking=True)
        assert here.is_pinned()
        if synchronizes:
            torch.cuda.current_stream(FIRST).record_event().synchronize()
        return here.clone()

    assert wrong_for_some_seed(work, torch.ones(4)) is not synchronizes


@pytest.mark.parametrize("records", [True, False])
@pytest.mark.parametrize("dies", ["source", "result"])
def test_memory_that_another_stream_still_uses_is_reused(records: bool, dies: str) -> None:
    def work() -> Tensor:
        main, side = torch.cuda.current_stream(FIRST), side_stream()
        made = torch.ones(4, device=FIRST)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            doubled = made * 2
        if records:
            made.record_stream(side)
            doubled.record_stream(main)
        if dies == "source":
            del made
        main.wait_stream(side)
        read = doubled + 1
        if dies == "result":
            del doubled
        other = torch.zeros(4, device=FIRST)
        with torch.cuda.stream(side):
            torch.zeros(4, device=FIRST)
        return read + other

    assert wrong_for_some_seed(work, torch.full((4,), 3.0)) is not records


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("waits", [True, False])
def test_page_locked_memory_that_is_written_before_its_copy_is_done(
    pinned: bool, waits: bool
) -> None:
    def work() -> Tensor:
        here = torch.ones(4, pin_memory=pinned)
        there = here.to(FIRST, non_blocking=True)
        if waits:
            torch.cuda.synchronize(FIRST)
        here.fill_(5.0)
        return there

    assert wrong_for_some_seed(work, torch.ones(4)) is (pinned and not waits)


def test_a_copy_between_devices_orders_their_current_streams(machine: Machine) -> None:
    there = (torch.ones(4, device=FIRST) * 2).to(OTHER)
    assert (there + 1).tolist() == [3.0] * 4


def test_after_an_illegal_access_every_call_fails(machine: Machine) -> None:
    table = torch.ones(3, 2, device=FIRST)
    with pytest.raises(torch.AcceleratorError, match=r"device-side assert triggered \(index out"):
        F.embedding(torch.tensor([7], device=FIRST), table)
    for call in (
        lambda: torch.ones(3, device=OTHER),
        lambda: table + 1,
        torch.cuda.empty_cache,
        torch.cuda.synchronize,
        table.cpu,
    ):
        with pytest.raises(torch.AcceleratorError, match="device-side assert"):
            call()


def test_every_call_of_a_lost_device_fails_and_the_others_go_on(machine: Machine) -> None:
    held, other = torch.ones(3, device=FIRST), torch.ones(3, device=OTHER)
    held.mul_(2)
    machine.queues.lose(FIRST, "unspecified launch failure")
    for call in (
        lambda: torch.ones(3, device=FIRST),
        lambda: held + 1,
        lambda: other.to(FIRST),
        lambda: held.to(OTHER),
        held.cpu,
        lambda: torch.cuda.synchronize(FIRST),
        lambda: torch.cuda.mem_get_info(FIRST),
        torch.cuda.empty_cache,  # which is for all devices
    ):
        with pytest.raises(torch.AcceleratorError, match="unspecified launch failure"):
            call()
    assert (other + 1).tolist() == [2.0] * 3
    torch.cuda.synchronize(OTHER)


def test_a_device_may_lack_kernels_and_kinds_have_names(machine: Machine) -> None:
    machine.names[1], machine.capabilities[1] = "an old one", (3, 5)
    machine.refuses_kernels[OTHER] = "no kernel image is available"
    assert [torch.cuda.get_device_name(each) for each in (FIRST, OTHER)] == ["fake", "an old one"]
    assert torch.cuda.get_device_properties(OTHER).major == 3
    there = torch.ones(3, device=OTHER)
    with pytest.raises(torch.AcceleratorError, match="no kernel image"):
        there + 1
    assert there.view(1, 3).tolist() == [[1.0] * 3], "copies and views work"


def test_an_index_that_has_not_arrived_fails_when_its_stream_gets_there() -> None:
    with fake_cuda(seed=0):
        side, table = side_stream(), torch.ones(3, 2, device=FIRST)
        with torch.cuda.stream(side):
            late = torch.zeros(2, dtype=torch.int64, device=FIRST)
        with pytest.raises(torch.AcceleratorError, match="device-side assert"):
            F.embedding(late, table).cpu()


# --- memory


def test_memory_is_counted_and_kept(machine: Machine) -> None:
    kilo = 1 << 10
    first, second = (torch.empty(kilo, dtype=torch.uint8, device=FIRST) for _ in range(2))
    assert torch.cuda.memory_allocated(FIRST) == torch.cuda.memory_reserved(FIRST) == 2 * kilo
    view = second[5:]
    del second
    assert torch.cuda.memory_allocated(FIRST) == 2 * kilo
    del first, view
    assert torch.cuda.memory_allocated(FIRST) == 0
    assert torch.cuda.memory_reserved(FIRST) == torch.cuda.max_memory_allocated(FIRST) == 2 * kilo
    third = torch.empty(kilo, dtype=torch.uint8, device=FIRST)
    assert torch.cuda.memory_reserved(FIRST) == 2 * kilo, "reused"
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(FIRST) == kilo == third.nbytes
    torch.cuda.reset_peak_memory_stats(FIRST)
    assert torch.cuda.max_memory_allocated(FIRST) == kilo
    assert torch.cuda.memory_reserved(OTHER) == 0


def test_page_locked_memory_is_counted_and_kept(machine: Machine) -> None:
    kilo = 1 << 10
    made = torch.empty(kilo - 100, dtype=torch.uint8, device=FIRST)
    here = made.to("cpu", non_blocking=True)
    assert machine.page_locked.bytes == kilo
    made.to("cpu")
    assert machine.page_locked.bytes == kilo, "this one is not page-locked"
    view = here[5:]
    del here
    machine.page_locked.empty_cache()
    assert machine.page_locked.bytes == kilo
    torch.cuda.synchronize(FIRST)
    del view
    again = torch.empty(kilo).pin_memory()[:1]
    assert again.is_pinned()
    assert machine.page_locked.bytes == 5 * kilo
    machine.page_locked.empty_cache()
    assert machine.page_locked.bytes == 4 * kilo


def test_memory_of_recorded_streams_comes_back_when_they_are_done() -> None:
    with fake_cuda(seed=0) as machine:
        side, made = side_stream(), torch.ones(1 << 10, device=FIRST)
        with torch.cuda.stream(side):
            made * 2
        made.record_stream(side)
        del made
        torch.ones(1 << 10, device=FIRST)
        before = machine.allocators[0].reserved_bytes
        side.synchronize()
        torch.ones(1 << 10, device=FIRST)
        assert machine.allocators[0].reserved_bytes == before


def test_a_device_has_no_more_memory_than_its_limit(machine: Machine) -> None:
    total = torch.cuda.get_device_properties(FIRST).total_memory
    torch.cuda.set_per_process_memory_fraction((1 << 20) / total, FIRST)
    held = torch.empty(3 << 18, dtype=torch.uint8, device=FIRST)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 524288 bytes"):
        torch.empty(1 << 19, dtype=torch.uint8, device=FIRST)
    torch.empty(1 << 19, dtype=torch.uint8, device=OTHER)
    del held
    torch.empty(1 << 20, dtype=torch.uint8, device=FIRST)


def test_gaps_in_segments_count_as_reserved_and_may_be_too_small(machine: Machine) -> None:
    kilo = 1 << 10
    machine.allocators[0].segment_bytes = 8 * kilo
    torch.cuda.set_per_process_memory_fraction(
        8 * kilo / torch.cuda.get_device_properties(FIRST).total_memory, FIRST
    )

    def made(count: int, value: int) -> Tensor:
        return torch.full((count * kilo,), value, dtype=torch.uint8, device=FIRST)

    rows = [made(2, value) for value in range(4)]
    assert torch.cuda.memory_allocated(FIRST) == torch.cuda.memory_reserved(FIRST) == 8 * kilo
    assert [set(row.tolist()) for row in rows] == [{0}, {1}, {2}, {3}]
    del rows[2], rows[0]
    assert torch.cuda.memory_allocated(FIRST) == 4 * kilo
    with pytest.raises(torch.OutOfMemoryError):
        made(4, 4)  # two gaps of two
    again = made(1, 5)
    assert [set(row.tolist()) for row in (*rows, again)] == [{1}, {3}, {5}]
    del rows, again
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(FIRST) == 0
    joined = made(4, 6)
    assert set(joined.tolist()) == {6}
    assert torch.cuda.memory_reserved(FIRST) == 8 * kilo


def test_devices_have_numbers() -> None:
    with fake_cuda(2):
        assert torch.ones(2).to(1).device == torch.device("cuda", 1)
        assert torch.zeros(2, device=1).device == torch.device("cuda", 1)
        assert nn.Linear(2, 2).to(1).weight.device == torch.device("cuda", 1)


def test_the_type_of_a_parameter_makes_a_parameter() -> None:
    with fake_cuda():
        before = nn.Parameter(torch.ones(2, device="cuda"))
        made = type(before)(torch.zeros(2, device="cuda"), requires_grad=False)
        assert isinstance(made, nn.Parameter)
        assert made.is_cuda
        assert not made.requires_grad
