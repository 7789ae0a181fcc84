"""Execute the instruction lists of a placement in this process, the devices taking turns."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch.utils._pytree import tree_leaves, tree_map

from envs.executors.cores.arena import (
    Arena,
    begin_updates,
    count_update,
    load_batch,
    load_state,
)
from envs.executors.cores.compiled_list import CompiledList, Signals
from envs.executors.cores.instruction_lists import (
    Instruction,
    Receive,
    Send,
    device_lists,
    priority_order,
)
from graphs.extract import Extraction
from graphs.extract.export.trace import Position
from tests.helpers.tiny_models import Outcome, assert_same, eager, tied_gradients


def turns(lists: Sequence[Sequence[Instruction]]) -> Iterator[tuple[int, int]]:
    """Yield (device, position) of every instruction in an order that the lists allow.

    A device runs until it must wait for a signal; then the next device runs.
    """
    position = [0] * len(lists)
    sent: Counter[tuple[int, int]] = Counter()
    while any(p < len(own) for p, own in zip(position, lists, strict=True)):
        before = list(position)
        for d, own in enumerate(lists):
            while position[d] < len(own):
                instruction = own[position[d]]
                if isinstance(instruction, Receive):
                    if sent[instruction.source, d] < instruction.number:
                        break
                elif isinstance(instruction, Send):
                    sent.update((d, destination) for destination in instruction.destinations)
                yield d, position[d]
                position[d] += 1
        assert position != before, "the lists wait for each other"


def run(
    extraction: Extraction,
    lists: Sequence[Sequence[Instruction]],
    *,
    steps: int = 1,
    watch: Callable[[int, CompiledList], None] = lambda device, compiled: None,
) -> Outcome:
    """Run steps on one batch from the model's current state; the model is not changed.

    Output and gradients are those of the last step; ``watch`` is called after every instruction.
    """
    step, program = extraction.step, extraction.program
    arena = Arena(program)
    for source in program.sources:
        if source.role == "tangent":
            arena.value(source.value).fill_(1.0)
        elif source.tensor is not None:
            arena.value(source.value).copy_(source.tensor)
    load_state(arena, step)
    load_batch(arena, tree_leaves((step.step_inputs, dict(step.keywords))))
    begin_updates(arena, step.optimizer.learning_rate if step.optimizer else 0.0)
    state = {
        source.name: arena.value(source.value)
        for source in program.sources
        if source.role in ("parameter", "buffer")
    }
    with torch.inference_mode(), _counters(len(lists)) as counters:
        compiled = [
            CompiledList(own, program, arena, Signals(d, counters)) for d, own in enumerate(lists)
        ]
        for _ in range(steps):
            count_update(arena)
            for d, position in turns(lists):
                compiled[d].steps[position](compiled[d].table)
                watch(d, compiled[d])
            for own in compiled:
                assert own.table.keys() == {s.value for s in program.sources}, "the rest is freed"
                own.signals.reset()
            gradients, outputs = _taken(arena, state)
    unread = step.named_state().items()
    state = {name: state.get(name, own).detach().clone() for name, own in unread}
    arena.close()
    output = tree_map(
        lambda leaf: outputs[leaf.number] if isinstance(leaf, Position) else leaf,
        extraction.outputs,
    )
    return Outcome(output, gradients, state)


def _taken(
    arena: Arena, state: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[int, torch.Tensor]]:
    """Copy the new state over the old one; return the gradients and outputs of the step."""
    gradients, outputs = {}, {}
    for index, result in enumerate(arena.program.results):
        tensor = arena.result(index).clone()
        match result.role:
            case "output":
                outputs[int(result.name)] = tensor
            case "gradient":
                gradients[result.name] = tensor
            case "state":
                state[result.name].copy_(tensor)
    return gradients, outputs


@contextmanager
def _counters(count: int) -> Iterator[dict[tuple[int, int], int]]:
    pairs = [(s, d) for s in range(count) for d in range(count) if s != d]
    counters = {pair: os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for pair in pairs}
    try:
        yield counters
    finally:
        for descriptor in counters.values():
            os.close(descriptor)


def run_placed(extraction: Extraction, devices: int = 2, seed: int | None = None) -> Outcome:
    """Run a step with its ops on devices in turn, or at random with random priorities."""
    count = extraction.program.op_count
    if seed is None:
        lists = device_lists(
            extraction.program, [i % devices for i in range(count)], range(count), devices
        )
        return run(extraction, lists)
    randomly = random.Random(seed)
    order = priority_order(extraction.program, [randomly.random() for _ in range(count)])
    chosen = [randomly.randrange(devices) for _ in range(count)]
    return run(extraction, device_lists(extraction.program, chosen, order, devices))


def assert_runs_as_eager(extraction: Extraction, *, exact: bool = False) -> None:
    """Assert that a placed step gives the outputs, gradients and state that torch computes."""
    placed, expected = run_placed(extraction, 3, seed=0), eager(extraction.step)
    gradients = tied_gradients(placed.gradients, extraction.step)
    output = tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, expected.output)
    for result, reference in (
        (placed.output, output),
        (gradients, expected.gradients),
        (placed.state, expected.state),
    ):
        if exact:
            assert_same(result, reference)
        else:
            torch.testing.assert_close(result, reference, rtol=1e-5, atol=1e-6)
