"""Results in shared memory: who writes them there, and that their bits are those of torch."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from envs.costs.ops import profile_runs
from envs.executors.cores.arena import load_example
from envs.executors.cores.compiled_list import FASTER, INTO_SLOT, sums_in_place
from envs.executors.cores.instruction_lists import Give, device_lists, single_list
from envs.executors.cores.pool import StepRun, WorkerPool
from envs.hardware.discover import discover
from graphs.extract import Workload, extract
from tests.helpers import tiny_models
from tests.helpers.one_process import run
from tests.helpers.placed_steps import CORES, two_cores
from tests.helpers.tiny_models import assert_same, eager

a, b = torch.randn(5, 300), torch.randn(300, 7)
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "aten.add.Tensor": (a, a.flip(0)),
    "aten.addmm.default": (torch.randn(7), a, b),
    "aten.bmm.default": (a.expand(3, 5, 300), torch.randn(3, 7, 300).transpose(1, 2)),
    "aten.div.Tensor": (a, 3.0),
    "aten.mm.default": (a, torch.randn(7, 300).t()),
    "aten.mul.Tensor": (a, torch.randn(5, 1)),
    "aten.sum.dim_IntList": (torch.randn(300, 40).t(), [1], True),
}
VIEWED: dict[str, tuple[Any, ...]] = {
    **{f"aten.{name}.default": (a, [300, 5]) for name in ("view", "_unsafe_view", "reshape")},
    "aten.expand.default": (a[:1], [4, 300]),
    "aten.permute.default": (a, [1, 0]),
    "aten.t.default": (a,),
    "aten.select.int": (a, 1, 7),
    "aten.transpose.int": (a, 0, -1),
    "aten.unsqueeze.default": (a, 1),
    "aten.sub.Tensor": (a, a.flip(0)),
    **{f"aten.{name}.default": (a,) for name in ("neg", "relu", "sigmoid", "tanh")},
    "aten.cat.default": ([a, a.flip(0)], 1),
    "aten.stack.default": ([a, a.flip(0)],),
}


@pytest.mark.parametrize("target", FASTER)
def test_a_faster_function_is_the_same_operator(target: str) -> None:
    arguments = (ARGUMENTS | VIEWED)[target]
    with torch.inference_mode():
        expected = attrgetter(target)(torch.ops)(*arguments)
        found = FASTER[target](*arguments)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
    shown = [
        tensor.untyped_storage().data_ptr() == a.untyped_storage().data_ptr()
        for tensor in (found, expected)
    ]
    assert shown[0] == shown[1], "both are views, or none is"


@pytest.mark.parametrize("target", INTO_SLOT)
def test_a_kernel_writes_the_same_bits_into_given_memory(target: str) -> None:
    expected = attrgetter(target)(torch.ops)(*ARGUMENTS[target])
    slot = torch.full_like(expected, torch.nan)
    attrgetter(INTO_SLOT[target])(torch.ops)(*ARGUMENTS[target], out=slot)
    assert torch.equal(slot, expected)


def copies(work: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return the shapes of all tensors that are copied to another one while ``work`` runs."""
    shapes: list[tuple[int, ...]] = []
    copy = Tensor.copy_

    def recorded(self: Tensor, source: Tensor) -> Tensor:
        shapes.append(tuple(source.shape))
        return copy(self, source)

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "copy_", recorded)
        work()
    return shapes


def test_gradients_of_linear_layers_are_written_where_the_model_reads_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5))
    step = Workload.of(model, (torch.randn(4, 6), torch.randn(4, 5)), tiny_models.squared)
    extraction = extract(step)
    lists = [single_list(extraction.program)]
    shapes = copies(lambda: run(extraction, lists), monkeypatch)
    loaded = [tuple(tensor.shape) for tensor in (*model.parameters(), *step.inputs)]
    assert sorted(shapes) == sorted([*loaded, ()]), "of the results only the loss is copied"
    assert_same(run(extraction, lists).gradients, eager(step).gradients)


def test_a_result_that_was_sent_is_not_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = x.exp()
            return y, y.sin().cos()

    extraction = extract(Workload.of(Model(), torch.randn(3, 2), training=False))
    inputs = [(3, 2)]
    lists = device_lists(extraction.program, [0, 1, 1], range(3), 2)
    shapes = copies(lambda: run(extraction, lists), monkeypatch)
    assert shapes == inputs + 2 * [(3, 2)], "exp is sent, cos is handed over"
    assert_same(run(extraction, lists).output, extraction.step.model(*extraction.step.inputs))


VIEWS: tuple[Callable[[Tensor], Tensor], ...] = (
    Tensor.t,
    Tensor.flatten,
    lambda y: y.view(3, 12),
    lambda y: y.unsqueeze(0),
)


@pytest.mark.parametrize("count", [1, 2], ids=["here", "sent"])
def test_a_result_may_be_a_view_of_what_was_computed(count: int) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
            computed = [x.exp() for _ in VIEWS]
            return [(view(y), y.sum()) for view, y in zip(VIEWS, computed, strict=True)]

    extraction = extract(Workload.of(Model(), torch.randn(6, 6), training=False))
    devices = [0] * len(VIEWS) + [count - 1] * len(VIEWS)
    lists = device_lists(extraction.program, devices, range(len(devices)), count)
    assert_same(run(extraction, lists).output, extraction.step.model(*extraction.step.inputs))


def test_equal_results_have_memory_of_their_own() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = x @ x
            return y, y.t(), y[0]

    extraction = extract(Workload.of(Model(), torch.randn(3, 3), training=False))
    with WorkerPool(extraction.program, discover(f"core:{CORES[0]}").devices) as pool:
        load_example(pool.arena, extraction.step)
        pool.run(pool.load([single_list(extraction.program)]))
        results = [pool.arena.result(i) for i in range(3)]
        expected = extraction.step.model(*extraction.step.inputs)
        assert_same([result.clone() for result in results], list(expected))
        results[0].zero_()
        assert_same([result.clone() for result in results[1:]], list(expected[1:]))


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_a_measured_step_hands_over_its_results() -> None:
    step = tiny_models.STEPS["conv_net"]()
    program = extract(step).program
    devices = [op % 2 for op in range(program.op_count)]
    with WorkerPool(program, two_cores().devices) as pool:
        load_example(pool.arena, step)
        pool.run(pool.load(device_lists(program, devices, range(program.op_count), 2)))
        gradients = {
            result.name: pool.arena.result(i).clone()
            for i, result in enumerate(program.results)
            if result.role == "gradient"
        }
    assert gradients
    assert_same(gradients, eager(step).gradients)


def test_the_cost_of_an_op_includes_handing_over_its_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every instruction takes one second here."""
    extraction = extract(tiny_models.STEPS["conv_net"]())
    instructions = single_list(extraction.program)
    monkeypatch.setattr(
        WorkerPool, "run", lambda *_, each: StepRun(1.0, lambda: (np.ones(len(instructions)),))
    )
    [cost_s] = profile_runs(extraction, discover(f"core:{CORES[0]}").devices, repeats=1)["core"]
    given = sum(isinstance(instruction, Give) for instruction in instructions)
    assert given > 0
    assert cost_s.min() == 1.0
    assert cost_s.sum() == extraction.program.op_count + given


class Sums(nn.Module):
    """Sums of products, which are or are not read again, returned, or made of one tensor."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        left, right, further = x * 2, x * 3, x * 5
        free = left + right  # takes the memory of left
        read = further + free.sin()  # that of further must stay
        square = x @ x
        turned = square + square.t()  # both are one tensor
        of_number = free.mul(2) + 1.5  # the number is no tensor
        return further * read, turned.exp(), of_number.exp(), (x + x).exp()


def test_a_sum_takes_the_memory_of_an_operand_that_nothing_else_reads() -> None:
    extraction = extract(Workload.of(Sums(), torch.randn(4, 4), training=False))
    program = extraction.program
    (instructions,) = lists = [single_list(program)]
    makers = {value: call for call in program.calls for value in call.made}
    taken = sums_in_place(program, instructions)
    assert [makers[makers[value].args[0].value].args[1] for value in taken] == [2]
    found, expected = run(extraction, lists).output, eager(extraction.step).output
    assert_same(found, expected)


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "select": lambda h: h[0],
    "slice": lambda h: h[:, :2],
    "split": lambda h: torch.split(h, 3, -1)[1],
    "chunk": lambda h: h.chunk(2, -1)[0],
    "unbind": lambda h: h.unbind(0)[1],
    "diagonal": lambda h: h.diagonal(),
    "part of a part": lambda h: h[1:].t()[2],
    "reshaped": lambda h: h.t().reshape(-1),
    "flat": lambda h: h.flatten(),
    "real": lambda h: torch.view_as_real(torch.view_as_complex(h.view(6, 3, 2)))[..., 0],
}


@pytest.mark.slow_repeats
@pytest.mark.parametrize("training", [False, True])
def test_a_sum_leaves_an_operand_of_which_a_part_is_still_read(training: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.linspace(0.5, 2.0, 6))

        def forward(self, x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
            return {kind: self.both(x, kind) for kind in PARTS}

        def both(self, x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
            h = x * self.factor
            part = PARTS[kind](h)
            total = h + x.exp()  # would overwrite the part
            return total.sin(), part * 2

    def summed(outputs: dict[str, tuple[Tensor, Tensor]], _: Tensor) -> Tensor:
        return torch.stack([one.sum() + two.sin().sum() for one, two in outputs.values()]).sum()

    loss = summed if training else None
    inputs = (torch.randn(6, 6), torch.zeros(1)) if training else (torch.randn(6, 6),)
    extraction = extract(Workload(Model(), inputs, loss=loss, training=training))
    found = run(extraction, [single_list(extraction.program)])
    expected = eager(extraction.step)
    assert_same(found.output, expected.output)
    assert_same(found.gradients, expected.gradients)


def test_a_sum_in_a_result_or_after_it_was_sent_leaves_its_operands() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = x * 2
            return y, y + x.sin()

    extraction = extract(Workload.of(Model(), torch.randn(4, 4), training=False))
    program = extraction.program
    lists = [single_list(program)]
    assert sums_in_place(program, lists[0]) == {}
    assert_same(run(extraction, lists).output, eager(extraction.step).output)
