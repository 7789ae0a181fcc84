"""Instruction lists: what each device runs, in which order, and the CPU-clock time."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.executors.cores.instruction_lists import (
    Give,
    Instruction,
    Receive,
    Run,
    Send,
    cpu_clock_s,
    device_lists,
    priority_order,
    stretches,
)
from graphs.extract.program import VIEW, Call, Ref, Result, Source, StepProgram, Value
from tests.helpers.one_process import turns

Placed: TypeAlias = tuple[StepProgram, list[int], list[int], int]


class Builder:
    """Builds programs call by call; all tensors are alike."""

    def __init__(self, sources: int) -> None:
        self.roots = list(range(sources))
        self.sources = sources
        self.calls: list[Call] = []
        self.ops = 0

    def op(self, *reads: int, outputs: tuple[bool, ...] = (True,)) -> list[int]:
        """Add a call that computes; False in ``outputs`` marks an output that nothing reads."""
        made = [self._value(None) if wanted else None for wanted in outputs]
        self._call(self.ops, reads, tuple(made))
        self.ops += 1
        return [value for value in made if value is not None]

    def view(self, read: int) -> int:
        made = self._value(self.roots[read])
        self._call(VIEW, (read,), (made,))
        return made

    def program(self, *results: int) -> StepProgram:
        return StepProgram(
            values=tuple(Value((2,), (1,), torch.float32, root) for root in self.roots),
            calls=tuple(self.calls),
            sources=tuple(Source(i, "input", str(i)) for i in range(self.sources)),
            results=tuple(Result(value, "output", str(i)) for i, value in enumerate(results)),
            op_count=self.ops,
            training=False,
        )

    def _value(self, root: int | None) -> int:
        self.roots.append(len(self.roots) if root is None else root)
        return len(self.roots) - 1

    def _call(self, op: int, reads: tuple[int, ...], outputs: tuple[int | None, ...]) -> None:
        target = "aten.view.default" if op == VIEW else "aten.add.Tensor"
        references = tuple(Ref(read) for read in reads)
        once = tuple(dict.fromkeys(reads))
        self.calls.append(Call(op, target, references, {}, outputs, len(outputs) > 1, once))


def random_program(seed: int, calls: int) -> StepProgram:
    """Return ops with one or two inputs and one to three outputs, views, and views of views."""
    randomly = random.Random(seed)
    builder = Builder(sources=2)
    readable = [0, 1]
    for _ in range(calls):
        if randomly.random() < 0.4:
            readable.append(builder.view(randomly.choice(readable)))
        else:
            members = tuple(randomly.random() < 0.8 for _ in range(randomly.choice((0, 0, 1, 2))))
            reads = randomly.choices(readable, k=randomly.choice((1, 2)))
            readable += builder.op(*reads, outputs=(True, *members))
    builder.op(readable[-1])
    return builder.program(*randomly.choices(readable, k=3), readable[-1])


def diamond() -> StepProgram:
    """Return a program where op 0 feeds ops 1 and 2 (via a view), and op 3 joins them."""
    builder = Builder(sources=1)
    (first,) = builder.op(0)
    (left,) = builder.op(first)
    (right,) = builder.op(builder.view(first))
    (last,) = builder.op(left, right)
    return builder.program(last)


@st.composite
def placed_programs(draw: st.DrawFn) -> Placed:
    """Draw a program, the devices of its ops, their order, and the number of devices."""
    program = random_program(draw(st.integers(0, 10**6)), draw(st.integers(0, 25)))
    device_count = draw(st.integers(1, 4))
    randomly = random.Random(draw(st.integers(0, 10**6)))
    devices = [randomly.randrange(device_count) for _ in range(program.op_count)]
    order = priority_order(program, [randomly.random() for _ in devices])
    return program, devices, order, device_count


def test_a_diamond_on_two_devices() -> None:
    lists = device_lists(diamond(), [0, 0, 1, 1], [0, 2, 1, 3], 2)
    assert lists == [
        [Run(0), Send(1, (1,)), Run(1), Send(2, (1,))],
        [Receive(1, 0, 1), Run(3, (2,)), Receive(2, 0, 2), Run(4), Give(0)],
    ]


def test_a_view_is_made_once_on_each_device_that_needs_it() -> None:
    builder = Builder(sources=1)
    (first,) = builder.op(0)
    view = builder.view(first)
    for _ in range(4):
        builder.op(view)
    lists = device_lists(builder.program(view), [0, 0, 0, 1, 1], range(5), 2)
    made = [[len(i.views) for i in own if isinstance(i, Run | Give)] for own in lists]
    assert made == [[0, 0, 1, 0], [1, 0]], "a result that is all of a tensor needs no view"


def test_a_result_is_given_once_it_was_made_and_sent() -> None:
    builder = Builder(sources=1)
    (first,) = builder.op(0)
    (second,) = builder.op(first)
    builder.op(second)
    program = builder.program(first, second, first, 0)
    assert device_lists(program, [0, 1, 1], range(3), 2) == [
        [Run(0), Send(first, (1,)), Give(0), Give(2), Give(3)],
        [Receive(first, 0, 1), Run(1), Give(1), Run(2)],
    ]


def test_a_result_that_changes_after_it_was_made_is_given_at_the_end() -> None:
    builder = Builder(sources=1)
    (first,) = builder.op(0)
    builder.op(first)
    builder.calls[1] = replace(builder.calls[1], writes=(first,))
    lists = device_lists(builder.program(first), [0, 0], range(2), 1)
    assert lists == [[Run(0), Run(1), Give(0)]]


def test_an_order_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="runs a reader of op 0 before op 0"):
        device_lists(diamond(), [0, 1, 0, 1], [1, 0, 2, 3], 2)


def test_priority_order_takes_the_highest_that_may_run_ties_by_index() -> None:
    assert priority_order(diamond(), [0, 1, 2, 9]) == [0, 2, 1, 3]
    assert priority_order(diamond(), [0, 0, 0, 0]) == [0, 1, 2, 3]


@settings(max_examples=200)
@given(placed_programs())
def test_every_op_runs_once_on_its_device_after_what_it_reads(placed: Placed) -> None:
    program, devices, order, device_count = placed
    lists = device_lists(program, devices, order, device_count)
    runs = [(program.calls[i.call].op, d) for d, i in instructions(lists) if isinstance(i, Run)]
    assert sorted(runs) == list(enumerate(devices))
    results = [i.result for _, i in instructions(lists) if isinstance(i, Give)]
    assert sorted(results) == list(range(len(program.results)))
    for listed in lists:
        local = [program.calls[i.call].op for i in listed if isinstance(i, Run)]
        assert local == [op for op in order if op in set(local)]
        here = {source.value for source in program.sources}
        for instruction in listed:
            for call in calls_of(program, instruction):
                assert set(call.reads) <= here
                here |= {value for value in call.outputs if value is not None}
            match instruction:
                case Send(value):
                    assert value in here
                case Receive(value):
                    assert value not in here
                    here.add(value)
                case Give(result):
                    value = program.results[result].value
                    assert program.whole_results().get(result, value) in here


@settings(max_examples=200)
@given(placed_programs())
def test_every_receive_has_its_send_and_lists_never_wait_for_each_other(placed: Placed) -> None:
    lists = device_lists(*placed)
    received = [
        (i.source, d, i.number, i.value) for d, i in instructions(lists) if isinstance(i, Receive)
    ]
    sent: list[tuple[int, int, int, int]] = []
    signals: Counter[tuple[int, int]] = Counter()
    for d, i in instructions(lists):
        if isinstance(i, Send):
            assert d not in i.destinations
            signals.update((d, destination) for destination in i.destinations)
            sent += [(d, e, signals[d, e], i.value) for e in i.destinations]
    assert sorted(sent) == sorted(received)
    assert len(list(turns(lists))) == sum(map(len, lists))


def instructions(lists: list[list[Instruction]]) -> list[tuple[int, Instruction]]:
    """Return every instruction with its device."""
    return [(d, instruction) for d, own in enumerate(lists) for instruction in own]


def calls_of(program: StepProgram, instruction: Instruction) -> list[Call]:
    match instruction:
        case Run(call, views):
            return [program.calls[i] for i in (*views, call)]
        case Give(_, views):
            return [program.calls[i] for i in views]
        case _:
            return []


# --- CPU-clock time


@pytest.mark.parametrize(
    ("right_s", "expected_s"),
    [
        # Run 0 ends at 2, is sent at 2.5, arrives at 2.6; Run 2 ends at 5.6. Run 1 ends at 7.5, is
        # sent at 8 and arrives at 8.1: the join ends at 9.1, the hand-back at 9.2.
        (3.0, 9.2),
        (10.0, 13.7),  # Run 2 ends at 12.6, long after the send at 8: nothing waits
    ],
)
def test_cpu_clock_time_of_a_diamond_by_hand(right_s: float, expected_s: float) -> None:
    lists = device_lists(diamond(), [0, 0, 1, 1], [0, 2, 1, 3], 2)
    cpu_s = (np.array([2, 0.5, 5, 0.5]), np.array([0, right_s, 0, 1, 0.1]))
    assert cpu_clock_s(lists, cpu_s, latency_s=0.1) == pytest.approx(expected_s)


@settings(max_examples=100)
@given(placed_programs(), st.floats(0, 1))
def test_cpu_clock_time_lies_between_the_busiest_device_and_all_work_in_a_row(
    placed: Placed, latency_s: float
) -> None:
    lists = device_lists(*placed)
    randomly = np.random.default_rng(len(placed[1]))
    cpu_s = [randomly.random(len(own)) for own in lists]
    found = cpu_clock_s(lists, cpu_s, latency_s)
    receives = sum(isinstance(i, Receive) for own in lists for i in own)
    total = sum(float(own.sum()) for own in cpu_s)
    assert max(float(own.sum()) for own in cpu_s) <= found + 1e-9
    assert found <= total + receives * latency_s + 1e-9


@settings(max_examples=100)
@given(placed_programs(), st.floats(0, 1))
def test_stretches_give_the_same_cpu_clock_time_as_single_instructions(
    placed: Placed, latency_s: float
) -> None:
    lists = device_lists(*placed)
    randomly = np.random.default_rng(len(placed[1]))
    each_s, stretches_s = [], []
    for own in lists:
        of_each = np.where([isinstance(i, Receive) for i in own], 0.0, randomly.random(len(own)))
        of_last = np.zeros(len(own))
        for part in stretches(own):
            of_last[part.stop - 1] = of_each[part.start : part.stop].sum()
        each_s.append(of_each)
        stretches_s.append(of_last)
    expected_s = cpu_clock_s(lists, each_s, latency_s)
    assert cpu_clock_s(lists, stretches_s, latency_s) == pytest.approx(expected_s)
