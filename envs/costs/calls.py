"""Costs of the calls of a step on torch devices, forward, backward and updates.

The forward pass runs once on the host. On the way every call is timed alone on a device of each
kind, with only the tensors of that call there, so a device need not have room for the model. Calls
that look alike (operator, shapes, strides, dtypes and plain arguments) are timed once. Of
parameter updates the fused kernel is timed, on zeros.

A call that is repeated finds what it reads in the cache of a GPU. In a step it does so only with
what was just written: activations in the forward pass, gradients in the backward pass. So what else
it reads, parameters or all that the forward pass read, is another copy in each repetition (see
:func:`envs.costs.call_inputs.turns`). Emptying the cache between calls would slow activations, too,
and would need a wait or an event at each call, as long as many kernels.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._pytree import tree_leaves

from envs.costs.cached_costs import MeasuredCosts, first_of_kinds, launch_kind
from envs.costs.call_inputs import CallInputs, bound, in_turn, leaves, turns, walk
from envs.costs.factors import classes_of
from envs.costs.ops import node_signatures
from envs.costs.torch_speeds import (
    LEAST_CALL_S,
    REPEATS,
    CallTime,
    burst,
    burst_time,
    call_time,
    calls_per_burst,
)
from envs.executors.torch.updates import fused_update, updated_together
from envs.executors.torch.watchdog import timed_within_bounds
from envs.hardware import torch_devices
from envs.hardware.cluster import Device
from envs.hardware.discover import available_memory_bytes
from envs.hardware.torch_devices import forked_rng, torch_device, unless_out_of_memory
from graphs.extract import Extraction
from graphs.extract.autocast import autocast
from graphs.extract.placeable import CallGraph
from graphs.optimizer import STATE, Optimizer

HELD_SHARE: Final = 0.5
"""Maximum share of the free memory for what backward passes hold that are timed together."""
MOST_BACKWARDS: Final = 50
LONG_S: Final = 0.05
FEWEST_REPEATS: Final = 3
CallTimes: TypeAlias = tuple[CallTime, CallTime]
"""Times of a call on one device, forward and backward; nan where its tensors do not fit."""
NONE: Final = CallTime(0.0, 0.0)
NO_ROOM: Final = CallTime(math.nan, math.nan)


def call_costs(
    extraction: Extraction,
    calls: CallGraph,
    progress: Callable[[int, int], None] | None = None,
    *,
    unplaced: bool = False,
) -> MeasuredCosts:
    """Return the costs of the nodes of a call graph on torch devices, one of each kind.

    Those of the ``unplaced`` model are the same until they are fitted to its measured step. The
    noise of a profile is unknown: three of them make a cost known.
    """
    return MeasuredCosts(
        profile=partial(profile_calls, extraction, calls, progress=progress),
        method=", each call alone",
        signatures=node_signatures(extraction, calls),
        launched=True,
        classes=classes_of(calls.graph),
        unplaced=unplaced,
        free_bytes=lambda device: torch_devices.free_bytes(torch_device(device.name)),
    )


def profile_calls(
    extraction: Extraction,
    calls: CallGraph,
    devices: Sequence[Device],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, NDArray[np.float64]]:
    """Measure the seconds of every node of a call graph, {device kind: (M,)}.

    On a CUDA device a call costs what it takes behind others, and there are also the seconds of
    launches, {launch kind: (M,)}, see :func:`envs.costs.torch_speeds.burst_time`. On other
    devices it costs the longer of its time on the device and its launch time. The launch cost of
    the device, which is added to every node of a problem, is subtracted. A node that does not fit
    on the device costs nan: in all its free memory, since limits are for placed steps. Accumulating
    gradients is not counted.
    """
    first_of = first_of_kinds(devices)
    profilers = {
        kind: _Profiler(torch_device(device.name), extraction.step.dtype)
        for kind, device in sorted(first_of.items())
    }
    costs: dict[str, dict[str, CallTimes]] = {kind: {} for kind in profilers}
    backwards = backward_nodes(extraction, calls)
    total = len(extraction.forward.calls)
    with forked_rng(profiler.device for profiler in profilers.values()):
        for done, inputs in enumerate(walk(extraction), 1):
            call = inputs.call
            if not call.is_free:
                read = inputs if call.key in backwards else replace(inputs, gradients=frozenset())
                for kind, profiler in profilers.items():
                    costs[kind][call.key] = profiler.cost(read)
            if progress is not None:
                progress(done, total)
        updates = {
            kind: _update_costs(extraction, calls, profiler.device)
            for kind, profiler in profilers.items()
        }
    profiled: dict[str, NDArray[np.float64]] = {}
    for kind, of_calls in costs.items():
        device_s, launch_s = _by_node(calls, backwards, of_calls, updates[kind])
        # nan stays nan
        profiled[kind] = np.fmax(device_s - first_of[kind].launch_s, 0.0) + 0.0 * device_s
        if profilers[kind].device.type == "cuda":
            profiled[launch_kind(kind)] = np.fmax(launch_s, LEAST_CALL_S) + 0.0 * launch_s
    return profiled


def backward_nodes(extraction: Extraction, calls: CallGraph) -> dict[str, int]:
    """Return {key of a call: node of its first backward op}, for calls that have one."""
    nodes: dict[str, int] = {}
    phases = [data["phase"] for _, data in extraction.graph.nodes(data=True)]
    for key, node, phase in zip(extraction.call_of, calls.node_of.tolist(), phases, strict=True):
        if phase == "backward":
            nodes.setdefault(key, node)
    return nodes


def _by_node(
    calls: CallGraph,
    backwards: Mapping[str, int],
    costs: Mapping[str, CallTimes],
    updates: Mapping[int, CallTime],
) -> NDArray[np.float64]:
    """Return the seconds of every node on the device and of its launches, (2, M)."""
    seconds = np.zeros((2, len(calls.graph)))
    for key, (forward, backward) in costs.items():
        seconds[:, calls.node_of_call[key]] += forward
        if key in backwards:
            seconds[:, backwards[key]] += backward
    for node, update in updates.items():
        seconds[:, node] += update
    return seconds


@dataclass(slots=True, eq=False)
class _Profiler:
    """Times calls on one device in the dtype of the step, including casts of parameters."""

    device: torch.device
    dtype: str
    known: dict[object, CallTimes] = field(default_factory=dict)

    def cost(self, inputs: CallInputs) -> CallTimes:
        signature = inputs.signature()
        if signature not in self.known:
            with timed_within_bounds(inputs.call.key, self.device):
                cost = self._unless_too_large(inputs, MOST_BACKWARDS)
                cost = cost or self._unless_too_large(inputs, 1)
            self.known[signature] = cost or (NO_ROOM, NO_ROOM)
        return self.known[signature]

    def _unless_too_large(self, inputs: CallInputs, most: int) -> CallTimes | None:
        return unless_out_of_memory(partial(self._timed, inputs, most), self.device)

    def _timed(self, inputs: CallInputs, most: int) -> CallTimes:
        written = bool(inputs.call.writes)
        here = {
            v: inputs.values[v].detach().to(self.device, copy=written) for v in inputs.call.reads
        }
        cache_bytes = torch_devices.cache_bytes(self.device) if most > 1 else 0
        works = [
            bound(inputs.call, leaves(values, inputs.gradients), self.device)
            for values in turns(here, inputs.states, cache_bytes)
        ]
        # a leaf cannot be written
        with torch.set_grad_enabled(bool(inputs.gradients) and not inputs.written):
            forward = self._time(in_turn(works))
        del works
        if not inputs.gradients:
            return forward, NONE
        values_read = turns(here, inputs.call.reads, cache_bytes)
        return forward, self._backward(inputs, values_read, most)

    def _time(self, work: Callable[[], object]) -> CallTime:
        with self._autocast():
            once = burst(work, [self.device], 1)
            repeats = REPEATS if once < LONG_S else FEWEST_REPEATS
            return call_time(work, self.device, repeats=repeats)

    def _autocast(self) -> contextlib.AbstractContextManager[None]:
        return autocast(self.dtype, [self.device.type], keeps_casts=False)

    def _backward(
        self, inputs: CallInputs, values: Sequence[Mapping[int, torch.Tensor]], most: int
    ) -> CallTime:
        """Return the median times of a pass in a burst of at most ``most``, 0 without one.

        Passes read the ``values`` of the call in turn.
        """
        here = itertools.cycle(values)
        first = self._pull(inputs, here, 1)
        if first is None:
            return NONE
        burst(first, [self.device], 1)
        del first
        alone_s = burst(self._pull(inputs, here, 1) or _nothing, [self.device], 1)
        count = min(calls_per_burst(alone_s), most)
        if count > 1:
            free = torch_devices.free_bytes(self.device)
            room = HELD_SHARE * (available_memory_bytes() if free is None else free)
            count = max(min(count, int(room / self._held_bytes(inputs, values[0]))), 1)
        repeats = REPEATS if alone_s < LONG_S else FEWEST_REPEATS
        times = burst_time(
            lambda: self._pull(inputs, here, count) or _nothing, self.device, 1, repeats=repeats
        )
        return CallTime(times.device_s / count, times.launch_s / count)

    def _pull(
        self, inputs: CallInputs, here: Iterator[Mapping[int, torch.Tensor]], count: int
    ) -> Callable[[], object] | None:
        """Return ``count`` backward passes that autograd runs in one call.

        Each has its own leaves, so that no gradients are added up. None where no output of the call
        depends on a value that needs a gradient.
        """
        passes = [self._differentiable(inputs, next(here)) for _ in range(count)]
        ends = [leaf for own, _ in passes for leaf in own]
        outputs = [output for _, own in passes for output in own]
        if not outputs:
            return None
        grads = [torch.ones_like(output) for output in outputs]
        return partial(torch.autograd.grad, outputs, ends, grads, allow_unused=True)

    def _differentiable(
        self, inputs: CallInputs, here: Mapping[int, torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the leaves that need a gradient, and the outputs of the call that have one."""
        own = leaves(here, inputs.gradients)
        with torch.enable_grad(), self._autocast():
            read = {v: t.clone() if v in inputs.written else t for v, t in own.items()}
            made = tree_leaves(bound(inputs.call, read, self.device)())
        outputs = [t for t in made if isinstance(t, torch.Tensor) and t.requires_grad]
        return [own[v] for v in inputs.gradients], outputs

    def _held_bytes(self, inputs: CallInputs, here: Mapping[int, torch.Tensor]) -> int:
        """Return the bytes that a pass holds: outputs, saved tensors, gradients of both ends."""
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(_kept_in(saved), lambda tensor: tensor):
            ends, outputs = self._differentiable(inputs, here)
        read = {tensor.untyped_storage()._cdata for tensor in here.values()}
        made = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in saved + outputs}
        of_ends = sum(tensor.nbytes for tensor in ends + outputs)
        return max(of_ends + sum(size for key, size in made.items() if key not in read), 1)


def _nothing() -> None:
    pass


def _kept_in(tensors: list[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a hook that keeps the tensors that autograd saves."""

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor.detach())
        return tensor

    return keep


def _update_costs(
    extraction: Extraction, calls: CallGraph, device: torch.device
) -> dict[int, CallTime]:
    """Return the times of the updates of each call graph node; nan if memory does not suffice.

    Groups of parameters with equal shapes, strides and dtypes are timed once.
    """
    optimizer = extraction.step.optimizer
    if optimizer is None:
        return {}
    state = extraction.step.named_state()
    node_of = {id(state[n]): calls.node_of[op] for op, n in extraction.program.updates().items()}
    known: dict[object, CallTime] = {}
    updates: dict[int, CallTime] = {}
    for together in updated_together(extraction):
        parameters = [state[name] for name in together.names]
        form = tuple((tuple(p.shape), p.stride(), p.dtype) for p in parameters)
        if form not in known:
            with timed_within_bounds(f"an update by {optimizer.kind}", device):
                work = partial(_timed_update, optimizer, parameters, device)
                known[form] = unless_out_of_memory(work, device) or NO_ROOM
        node = int(node_of[id(parameters[0])])
        device_s, launch_s = updates.get(node, NONE)
        updates[node] = CallTime(device_s + known[form].device_s, launch_s + known[form].launch_s)
    return updates


def _timed_update(
    optimizer: Optimizer, parameters: list[torch.Tensor], device: torch.device
) -> CallTime:
    """Return the times of an update: of gradients just written, and of state that was not."""
    here = [torch.zeros_like(p, device=device).detach() for p in parameters]
    gradients = [torch.zeros_like(p) for p in here]
    counts = [torch.ones((), device=device) for _ in here]
    kept = {
        (i, part): torch.zeros_like(p)
        for i, p in enumerate(here)
        for part in range(len(STATE[optimizer.kind]))
    }
    works = []
    for state in turns(kept, kept.keys(), torch_devices.cache_bytes(device)):
        of_each = [[t for (i, _), t in state.items() if i == k] for k in range(len(here))]
        works.append(partial(fused_update, optimizer, 0.0, here, gradients, of_each, counts))
    return call_time(in_turn(works), device)
