"""Memory that torch allocates during a real, unplaced step."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.profiler import ProfilerActivity, profile

from graphs.extract import Workload
from tests.helpers.tiny_models import forward


def peak_bytes(step: Workload) -> int:
    """Return the bytes of parameters, their gradients and the peak of a step; step is unchanged.

    Gradients are kept from a previous step and accumulated into. Inputs and buffers do not count.
    """
    step = copy.deepcopy(step)
    _run(step)
    held = 0
    for tensor in {id(t): t for t in step.named_state().values()}.values():
        if isinstance(tensor, nn.Parameter):
            held += tensor.nbytes + (0 if tensor.grad is None else tensor.grad.nbytes)
    cpu = [ProfilerActivity.CPU]
    with profile(activities=cpu, profile_memory=True, acc_events=True) as profiled:
        _run(step)
    assert profiled.profiler is not None
    events = profiled.profiler.kineto_results.experimental_event_tree()
    live = most = 0
    for _, size in sorted(_allocations(events), key=lambda event: event[0]):
        live += size
        most = max(most, live)
    return held + most


def _run(step: Workload) -> None:
    found = forward(step)
    if step.training:
        found.backward()


def _allocations(events: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """Yield (time, bytes) of every allocation, with negative bytes where memory is freed."""
    for event in events:
        if "Allocation" in str(event.tag):
            yield event.start_time_ns, event.extra_fields.alloc_size
        yield from _allocations(event.children)
