"""Costs of the calls of a step on torch devices, forward, backward and updates.

The forward pass runs once on the host. On the way every call is timed alone on a device of each
kind, with only the tensors of that call there, so a device need not have room for the model. Calls
that look alike (operator, shapes, strides, dtypes and plain arguments) are timed once. Of
parameter updates the fused kernel is timed, on zeros.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.random import fork_rng
from torch.utils._pytree import tree_leaves, tree_map

from envs.costs.cached_costs import MeasuredCosts, first_of_kinds
from envs.costs.factors import classes_of
from envs.costs.ops import node_signatures
from envs.costs.torch_speeds import REPEATS, burst, calls_per_burst, seconds_per_call
from envs.executors.torch.call_text import CallText
from envs.executors.torch.updates import fused_update, updated_together
from envs.executors.torch.watchdog import timed_within_bounds
from envs.hardware import torch_devices
from envs.hardware.cluster import Device
from envs.hardware.discover import available_memory_bytes
from envs.hardware.torch_devices import CPU, torch_device, unless_out_of_memory
from graphs.extract import Extraction
from graphs.extract.autocast import autocast
from graphs.extract.export.forward import ForwardCall
from graphs.extract.placeable import CallGraph
from graphs.extract.program import Ref, values_in
from graphs.optimizer import STATE, Optimizer

HELD_SHARE: Final = 0.5
"""Maximum share of the free memory for what backward passes hold that are timed together."""
MOST_BACKWARDS: Final = 50
LONG_S: Final = 0.05
FEWEST_REPEATS: Final = 3
CallTimes: TypeAlias = tuple[float, float]
"""Seconds of a call on one device, forward and backward; nan where its tensors do not fit."""


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

    A call costs the longer of its time on the device and its launch time, see
    :func:`envs.costs.torch_speeds.seconds_per_call`. The launch cost of the device, which is added
    to every node of a problem, is subtracted. A node that does not fit on the device costs nan: in
    all its free memory, since limits are for placed steps. Accumulating gradients is not counted.
    """
    first_of = first_of_kinds(devices)
    profilers = {
        kind: _Profiler(torch_device(device.name), extraction.step.dtype)
        for kind, device in sorted(first_of.items())
    }
    costs: dict[str, dict[str, CallTimes]] = {kind: {} for kind in profilers}
    backwards = backward_nodes(extraction, calls)
    total = len(extraction.forward.calls)
    with fork_rng(range(torch.cuda.device_count())):
        for done, (call, values, gradients) in enumerate(_walk(extraction), 1):
            if not call.is_free:
                needing = gradients if call.key in backwards else frozenset()
                inputs = _CallInputs(call, values, needing)
                for kind, profiler in profilers.items():
                    costs[kind][call.key] = profiler.cost(inputs)
            if progress is not None:
                progress(done, total)
        updates = {
            kind: _update_costs(extraction, calls, profiler.device)
            for kind, profiler in profilers.items()
        }
    return {
        kind: _by_node(calls, backwards, of_calls, updates[kind], first_of[kind].launch_s)
        for kind, of_calls in costs.items()
    }


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
    updates: Mapping[int, float],
    launch_s: float,
) -> NDArray[np.float64]:
    cost_s = np.zeros(len(calls.graph))
    for key, (forward_s, backward_s) in costs.items():
        cost_s[calls.node_of_call[key]] += forward_s
        if key in backwards:
            cost_s[backwards[key]] += backward_s
    for node, seconds in updates.items():
        cost_s[node] += seconds
    return np.asarray(np.fmax(cost_s - launch_s, 0.0) + 0.0 * cost_s)  # nan stays nan


@dataclass(frozen=True, slots=True, eq=False)
class _CallInputs:
    """A call with the values it reads on the host, and which of them need a gradient."""

    call: ForwardCall
    values: Mapping[int, torch.Tensor]
    gradients: frozenset[int]  # inputs that need one; empty where nothing is differentiated

    @property
    def written(self) -> frozenset[int]:
        """Return the inputs that need a gradient and are written in place."""
        schema = getattr(self.call.target, "_schema", None)
        names = [
            (i, a.name)
            for i, a in enumerate(schema.arguments if schema is not None else ())
            if a.alias_info is not None and a.alias_info.is_write
        ]
        args, kwargs = self.call.args, self.call.kwargs
        written = [args[i] if i < len(args) else kwargs.get(name) for i, name in names]
        return self.gradients.intersection(values_in(written))

    def signature(self) -> object:
        """Return a key that is equal for calls of equal cost."""
        reads = tuple(
            (tuple(t.shape), t.stride(), t.dtype, value in self.gradients)
            for value in self.call.reads
            for t in (self.values[value],)
        )
        order = {value: i for i, value in enumerate(self.call.reads)}
        plain = tree_map(
            lambda leaf: Ref(order[leaf.value]) if isinstance(leaf, Ref) else leaf,
            (self.call.args, dict(self.call.kwargs)),
        )
        return self.call.target, reads, repr(plain)


@dataclass(slots=True, eq=False)
class _Profiler:
    """Times calls on one device in the dtype of the step, including casts of parameters."""

    device: torch.device
    dtype: str
    known: dict[object, CallTimes] = field(default_factory=dict)

    def cost(self, inputs: _CallInputs) -> CallTimes:
        signature = inputs.signature()
        if signature not in self.known:
            with timed_within_bounds(inputs.call.key, self.device):
                cost = self._unless_too_large(inputs, MOST_BACKWARDS)
                cost = cost or self._unless_too_large(inputs, 1)
            self.known[signature] = cost or (math.nan, math.nan)
        return self.known[signature]

    def _unless_too_large(self, inputs: _CallInputs, most: int) -> CallTimes | None:
        return unless_out_of_memory(partial(self._timed, inputs, most), self.device)

    def _timed(self, inputs: _CallInputs, most: int) -> CallTimes:
        written = bool(inputs.call.writes)
        here = {
            v: inputs.values[v].detach().to(self.device, copy=written) for v in inputs.call.reads
        }
        if not inputs.gradients:
            with torch.no_grad():
                return self._seconds(_bound(inputs.call, here, self.device)), 0.0
        leaves = _leaves(here, inputs.gradients)
        with torch.set_grad_enabled(not inputs.written):  # a leaf cannot be written
            forward_s = self._seconds(_bound(inputs.call, leaves, self.device))
        return forward_s, self._backward_s(inputs, here, most)

    def _seconds(self, work: Callable[[], object]) -> float:
        with self._autocast():
            once = burst(work, [self.device], 1)
            repeats = REPEATS if once < LONG_S else FEWEST_REPEATS
            return seconds_per_call(work, [self.device], repeats=repeats)

    def _autocast(self) -> contextlib.AbstractContextManager[None]:
        return autocast(self.dtype, [self.device.type], keeps_casts=False)

    def _backward_s(
        self, inputs: _CallInputs, here: Mapping[int, torch.Tensor], most: int
    ) -> float:
        """Return the median seconds of a pass in a burst of at most ``most``, 0 without one."""
        if self._backward_burst(inputs, here, 1) is None:
            return 0.0
        alone_s = self._backward_burst(inputs, here, 1) or 0.0
        count = min(calls_per_burst(alone_s), most)
        if count > 1:
            free = torch_devices.free_bytes(self.device)
            room = HELD_SHARE * (available_memory_bytes() if free is None else free)
            count = max(min(count, int(room / self._held_bytes(inputs, here))), 1)
        repeats = REPEATS if alone_s < LONG_S else FEWEST_REPEATS
        bursts = [self._backward_burst(inputs, here, count) or 0.0 for _ in range(repeats)]
        return float(np.median(bursts)) / count

    def _backward_burst(
        self, inputs: _CallInputs, here: Mapping[int, torch.Tensor], count: int
    ) -> float | None:
        """Return the seconds of ``count`` backward passes that autograd runs in one call.

        Each has its own leaves, so that no gradients are added up. None where no output of the call
        depends on a value that needs a gradient.
        """
        passes = [self._differentiable(inputs, here) for _ in range(count)]
        leaves = [leaf for own, _ in passes for leaf in own]
        outputs = [output for _, own in passes for output in own]
        if not outputs:
            return None
        grads = [torch.ones_like(output) for output in outputs]
        pull = partial(torch.autograd.grad, outputs, leaves, grads, allow_unused=True)
        return burst(pull, [self.device], 1)

    def _differentiable(
        self, inputs: _CallInputs, here: Mapping[int, torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the leaves that need a gradient, and the outputs of the call that have one."""
        leaves = _leaves(here, inputs.gradients)
        with torch.enable_grad(), self._autocast():
            read = {v: t.clone() if v in inputs.written else t for v, t in leaves.items()}
            made = tree_leaves(_bound(inputs.call, read, self.device)())
        outputs = [t for t in made if isinstance(t, torch.Tensor) and t.requires_grad]
        return [leaves[v] for v in inputs.gradients], outputs

    def _held_bytes(self, inputs: _CallInputs, here: Mapping[int, torch.Tensor]) -> int:
        """Return the bytes that a pass holds: outputs, saved tensors, gradients of both ends."""
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(_kept_in(saved), lambda tensor: tensor):
            leaves, outputs = self._differentiable(inputs, here)
        read = {tensor.untyped_storage()._cdata for tensor in here.values()}
        made = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in saved + outputs}
        ends = sum(tensor.nbytes for tensor in leaves + outputs)
        return max(ends + sum(size for key, size in made.items() if key not in read), 1)


def _kept_in(tensors: list[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a hook that keeps the tensors that autograd saves."""

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor.detach())
        return tensor

    return keep


def _leaves(
    values: Mapping[int, torch.Tensor], gradients: frozenset[int]
) -> dict[int, torch.Tensor]:
    return {v: t.detach().requires_grad_(v in gradients) for v, t in values.items()}


def _walk(
    extraction: Extraction,
) -> Iterator[tuple[ForwardCall, dict[int, torch.Tensor], frozenset[int]]]:
    """Run the forward pass on the host; yield each call before it runs, and its live values."""
    program = extraction.forward
    values, needing = _sources(extraction)
    last = {value: i for i, call in enumerate(program.calls) for value in call.reads}
    for i, call in enumerate(program.calls):
        read_needing = frozenset(call.reads) & needing
        yield call, values, read_needing
        with torch.no_grad(), autocast(extraction.step.dtype):
            made = _bound(call, values, CPU)()
        members = made if call.tuple_result else (made,)
        for value, tensor in zip(call.outputs, members, strict=True):
            if value is not None:
                values[value] = tensor
                if read_needing and _differentiable(call, tensor):
                    needing.add(value)
        for value in call.reads:
            if last[value] == i:
                del values[value]


def _differentiable(call: ForwardCall, output: torch.Tensor) -> bool:
    """Return whether gradients flow from an output back into the call."""
    without_grad = call.op == "detach" or (call.args and call.args[0] is False)
    return not without_grad and (output.is_floating_point() or output.is_complex())


def _sources(extraction: Extraction) -> tuple[dict[int, torch.Tensor], set[int]]:
    """Return the values before the first call (copied if written), and those needing a gradient."""
    program, step = extraction.forward, extraction.step
    written = frozenset().union(*(call.writes for call in program.calls))
    state = step.named_state()
    leaves = tree_leaves((step.step_inputs, dict(step.keywords)))
    values: dict[int, torch.Tensor] = {}
    needing: set[int] = set()
    for source in program.sources:
        if source.role == "input":
            tensor = leaves[int(source.name)]
        else:
            tensor = state[source.name] if source.tensor is None else source.tensor
        if tensor.is_meta:
            raise ValueError(
                f"{source.name} of the model is on the meta device: costs can be measured only of "
                "a model that has its values"
            )
        if step.training and tensor.requires_grad:
            needing.add(source.value)
        copied = program.storage_of[source.value] in written
        values[source.value] = tensor.detach().to(CPU, copy=copied)
    return values, needing


def _bound(
    call: ForwardCall, values: Mapping[int, torch.Tensor], device: torch.device
) -> Callable[[], Any]:
    """Return a call as a function without arguments; ``values`` are on ``device``."""
    text = CallText(0, call)
    places = {f"v{value}": f"v{value}" for value in call.reads}
    names = {
        **text.names,
        **text.on(device, "device"),
        "device": device,
        **{f"v{value}": values[value] for value in call.reads},
    }
    expression = text.template.format(device="device", **places)
    return cast("Callable[[], Any]", eval(f"lambda: {expression}", names))


def _update_costs(
    extraction: Extraction, calls: CallGraph, device: torch.device
) -> dict[int, float]:
    """Return the seconds of the updates of each call graph node; nan if memory does not suffice.

    Groups of parameters with equal shapes, strides and dtypes are timed once.
    """
    optimizer = extraction.step.optimizer
    if optimizer is None:
        return {}
    state = extraction.step.named_state()
    node_of = {id(state[n]): calls.node_of[op] for op, n in extraction.program.updates().items()}
    known: dict[object, float] = {}
    update_s: defaultdict[int, float] = defaultdict(float)
    for together in updated_together(extraction):
        parameters = [state[name] for name in together.names]
        form = tuple((tuple(p.shape), p.stride(), p.dtype) for p in parameters)
        if form not in known:
            with timed_within_bounds(f"an update by {optimizer.kind}", device):
                work = partial(_timed_update, optimizer, parameters, device)
                seconds = unless_out_of_memory(work, device)
            known[form] = math.nan if seconds is None else seconds
        update_s[int(node_of[id(parameters[0])])] += known[form]
    return dict(update_s)


def _timed_update(
    optimizer: Optimizer, parameters: list[torch.Tensor], device: torch.device
) -> float:
    here = [torch.zeros_like(p, device=device).detach() for p in parameters]
    gradients = [torch.zeros_like(p) for p in here]
    kept = [[torch.zeros_like(p) for _ in STATE[optimizer.kind]] for p in here]
    counts = [torch.ones((), device=device) for _ in here]
    return seconds_per_call(
        partial(fused_update, optimizer, 0.0, here, gradients, kept, counts), [device]
    )
