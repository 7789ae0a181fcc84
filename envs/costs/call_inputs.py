"""Inputs of the calls of a forward pass, on the host and as they are timed on a device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

import torch
from torch.utils._pytree import tree_leaves, tree_map

from envs.executors.torch.call_text import CallText
from envs.hardware.torch_devices import CPU
from graphs.extract import Extraction
from graphs.extract.autocast import autocast
from graphs.extract.export.forward import ForwardCall
from graphs.extract.program import Ref, values_in

MOST_COPIES: Final = 64
"""A share of a cache so small, 1 MB or less, is read from memory in about a microsecond."""
Key = TypeVar("Key")


@dataclass(frozen=True, slots=True, eq=False)
class CallInputs:
    """A call with the values it reads on the host, and which of them need a gradient."""

    call: ForwardCall
    values: Mapping[int, torch.Tensor]
    gradients: frozenset[int]  # inputs that need one; empty where nothing is differentiated
    states: frozenset[int]  # inputs in memory of parameters, buffers and constants

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
            (tuple(t.shape), t.stride(), t.dtype, value in self.gradients, value in self.states)
            for value in self.call.reads
            for t in (self.values[value],)
        )
        order = {value: i for i, value in enumerate(self.call.reads)}
        plain = tree_map(
            lambda leaf: Ref(order[leaf.value]) if isinstance(leaf, Ref) else leaf,
            (self.call.args, dict(self.call.kwargs)),
        )
        return self.call.target, reads, repr(plain)


def walk(extraction: Extraction) -> Iterator[CallInputs]:
    """Run the forward pass on the host; yield each call before it runs, with what it reads."""
    program = extraction.forward
    states = {program.storage_of[s.value] for s in program.sources if s.role != "input"}
    values, needing = _sources(extraction)
    last = {value: i for i, call in enumerate(program.calls) for value in call.reads}
    for i, call in enumerate(program.calls):
        read_needing = frozenset(call.reads) & needing
        of_states = {value for value in call.reads if program.storage_of[value] in states}
        yield CallInputs(call, values, read_needing, frozenset(of_states))
        with torch.no_grad(), autocast(extraction.step.dtype):
            made = bound(call, values, CPU)()
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
    is_detach = call.op == "detach"
    # wrap_with_set_grad_enabled(False, ...)
    is_higher_order = isinstance(call.target, torch._ops.HigherOrderOperator)
    without_grad = is_detach or (is_higher_order and call.args and call.args[0] is False)
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


def bound(
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


def turns(
    values: Mapping[Key, torch.Tensor], cold: Collection[Key], cache_bytes: int
) -> list[Mapping[Key, torch.Tensor]]:
    """Return the values for calls that take turns, each with its own copy of those in ``cold``.

    Until it is a call's turn again, the others have read as much as the cache holds. No copies are
    made of so little that a launch takes longer than reading it from memory, nor of so much that
    the cache keeps next to nothing of it.
    """
    size = sum(values[key].nbytes for key in cold)
    copies = math.ceil(cache_bytes / size) if size else 0
    if copies > MOST_COPIES or size > 2 * cache_bytes:
        copies = 0
    own = ({key: values[key].detach().clone() for key in cold} for _ in range(copies))
    return [values, *({**values, **copied} for copied in own)]


def in_turn(works: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """Return a function that does one of the works at each call."""
    cycle = itertools.cycle(works)

    def next_one() -> object:
        return next(cycle)()

    return next_one


def leaves(
    values: Mapping[int, torch.Tensor], gradients: frozenset[int]
) -> dict[int, torch.Tensor]:
    """Return the values as leaves of autograd, of which those of ``gradients`` need one."""
    return {v: t.detach().requires_grad_(v in gradients) for v, t in values.items()}
