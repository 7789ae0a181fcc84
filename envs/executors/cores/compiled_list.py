"""Compiled instruction lists: one generated Python function per instruction.

The functions work on a table of live tensors. Their source is generated: looking up arguments in
nested containers for every call would cost more than the small ops themselves.

Kernels may lay their results out differently from the trace (the gradient of mse_loss does), so a
traced view may be impossible: it becomes ``reshape``, which then copies. Where strides are given as
numbers, the tensor is brought into the traced layout first.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor

from envs.executors.cores.arena import Arena
from envs.executors.cores.instruction_lists import Give, Instruction, Receive, Run, Send, stretches
from graphs.extract.convert import MAYBE_COPIES
from graphs.extract.kernels.recurrent import saves_workspace
from graphs.extract.program import VIEW, Call, Ref, StepProgram, Value

SPIN_NS: Final = 200_000
"""Time for which a receiver polls before it sleeps: waking a sleeping core takes several times
as long as going on. ``placer machine`` prints the latency of a hop."""
DETACH: Final = "aten.detach.default"  # of tensors without gradients: the tensor itself
BY_STRIDES: Final = "aten.as_strided.default"
INTO_SLOT: Final = {
    "aten.add.Tensor": "aten.add.out",
    "aten.addmm.default": "aten.addmm.out",
    "aten.bmm.default": "aten.bmm.out",
    "aten.div.Tensor": "aten.div.out",
    "aten.mm.default": "aten.mm.out",
    "aten.mul.Tensor": "aten.mul.out",
    "aten.sum.dim_IntList": "aten.sum.IntList_out",
}
"""Operators whose kernel writes into given memory, with the same bits. (Many other operators have
an overload with ``out`` that makes a new tensor and copies it.)"""

FASTER: Final[dict[str, Callable[..., Any]]] = {
    **{f"aten.{name}.default": Tensor.reshape for name in ("view", "_unsafe_view", "reshape")},
    **{f"aten.{name}.default": getattr(Tensor, name) for name in ("expand", "permute", "t")},
    **{f"aten.{name}.int": getattr(Tensor, name) for name in ("select", "transpose")},
    "aten.unsqueeze.default": Tensor.unsqueeze,
    **{f"aten.{name}.Tensor": getattr(torch, name) for name in ("add", "div", "mul", "sub")},
    **{f"aten.{name}.default": getattr(torch, name) for name in ("addmm", "bmm", "mm")},
    **{f"aten.{name}.default": getattr(torch, name) for name in ("neg", "relu", "sigmoid", "tanh")},
    **{f"aten.{name}.default": getattr(torch, name) for name in ("cat", "stack")},
    "aten.sum.dim_IntList": torch.sum,
}
"""Functions that call the same operators in half the time that ``torch.ops`` takes, or less. That
of a view is ``reshape``, which copies where the kernel's layout does not allow the view."""


def operator(target: str) -> Callable[..., Any]:
    """Return the torch operator with a name such as "aten.mm.default"."""
    try:
        function: Callable[..., Any] = attrgetter(target)(torch.ops)
    except AttributeError:
        raise ValueError(
            f"a worker knows no operator {target}: custom operators must be importable there"
        ) from None
    return function


def laid_out(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor with these strides: itself, or a copy."""
    if tensor.stride() == stride:
        return tensor
    copied = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return copied.copy_(tensor)


def slot_writers(program: StepProgram) -> set[int]:
    """Return the values that the op which makes them can write where a result is wanted.

    No other op may read them: a kernel that chooses its result's layout may choose another one
    than it had when the step was traced, and reading that one gives other last bits.
    """
    read = set(program.roots(v for call in program.op_calls for v in call.reads))
    return {
        call.outputs[0]
        for call in program.op_calls
        if call.target in INTO_SLOT and call.outputs[0] is not None
    } - read


def calls_of(program: StepProgram, instruction: Instruction) -> list[Call]:
    """Return the calls of an instruction, views first."""
    match instruction:
        case Run(call, views):
            return [program.calls[c] for c in (*views, call)]
        case Give(_, views):
            return [program.calls[c] for c in views]
        case _:
            return []


def may_share(call: Call) -> bool:
    """Return whether a result, a value of its own, may lie in memory of what the call reads."""
    return call.op != VIEW and (call.shows_part or call.target.split(".")[1] in MAYBE_COPIES)


def sums_in_place(program: StepProgram, instructions: Sequence[Instruction]) -> dict[int, int]:
    """Return {sum: the operand whose memory takes it}.

    Autograd adds up gradients in place, too. An operand is taken if an operator that returns new
    memory made it on this device, all of that memory is its own, no part of it is a value, and
    nothing reads it afterwards.
    """
    values, last = program.values, dict[int, int]()
    fresh, shown = set[int](), set[int]()
    for position, instruction in enumerate(instructions):
        calls = calls_of(program, instruction)
        reads = [value for call in calls for value in call.reads]
        if isinstance(instruction, Send):
            reads = [instruction.value]
        fresh.update(value for call in calls if call.target in INTO_SLOT for value in call.made)
        shown.update(v for call in calls if may_share(call) for v in program.roots(call.reads))
        last |= dict.fromkeys(program.roots(reads), position)
    fresh -= {*shown, *program.roots(result.value for result in program.results)}

    def is_free(operand: int, made: Value, position: int) -> bool:
        own = values[operand]
        root = values[own.root]
        same = (own.shape, own.stride, own.dtype) == (made.shape, made.stride, made.dtype)
        whole = (own.numel, own.dtype) == (root.numel, root.dtype) and own.is_dense
        return same and whole and own.root in fresh and last[own.root] == position

    found: dict[int, int] = {}
    for position, instruction in enumerate(instructions):
        if not isinstance(instruction, Run):
            continue
        call = program.calls[instruction.call]
        if call.target != "aten.add.Tensor" or call.kwargs or not call.made:
            continue
        of_tensors = all(isinstance(argument, Ref) for argument in call.args)
        if of_tensors and len(program.roots(call.reads)) == len(call.reads):  # no common memory
            made = values[call.made[0]]
            free = (operand for operand in call.reads if is_free(operand, made, position))
            if (operand := next(free, None)) is not None:
                found[call.made[0]] = operand
    return found


class Signals:
    """One device's ends of the hand-offs: a kernel counter (eventfd) per ordered pair of devices.

    A sender adds one per value, in the order of its list; so a receiver that has counted ``number``
    signals knows that the value with that number, and all before it, are in the shared arena. The
    descriptors must not block.
    """

    def __init__(self, device: int, counters: Mapping[tuple[int, int], int]) -> None:
        """Take the counters of all pairs, {(source, destination): file descriptor}."""
        self.out = {d: fd for (s, d), fd in counters.items() if s == device}
        self.into = {s: fd for (s, d), fd in counters.items() if d == device}
        self.reset()
        self._sleep = {source: select.poll() for source in self.into}
        for source, descriptor in self.into.items():
            self._sleep[source].register(descriptor, select.POLLIN)

    def reset(self) -> None:
        """Reset the counts; all signals of the last step were received."""
        self.arrived = dict.fromkeys(self.into, 0)

    def send(self, destinations: tuple[int, ...]) -> None:
        """Signal devices that the next value for them is there."""
        for destination in destinations:
            os.eventfd_write(self.out[destination], 1)

    def wait(self, source: int, number: int) -> None:
        """Return once ``source`` has sent ``number`` signals in this step."""
        while self.arrived[source] < number:
            self.arrived[source] += self._next(source)

    def _next(self, source: int) -> int:
        """Wait for at least one new signal; return how many came."""
        spin_until_ns = time.perf_counter_ns() + SPIN_NS
        while True:
            try:
                return os.eventfd_read(self.into[source])
            except BlockingIOError:
                if time.perf_counter_ns() > spin_until_ns:
                    self._sleep[source].poll()


class CompiledList:
    """The compiled instruction list of one device, for repeated runs."""

    def __init__(
        self,
        instructions: Sequence[Instruction],
        program: StepProgram,
        arena: Arena,
        signals: Signals,
    ) -> None:
        self.program = program
        self.arena = arena
        self.signals = signals
        self.table: dict[int, Any] = {
            source.value: arena.value(source.value) for source in program.sources
        }
        self.made = [value for i in instructions for value in self._writes(i)]
        self.whole = program.whole_results()
        given = {i.result for i in instructions if isinstance(i, Give)}
        self.in_slot = slot_writers(program).intersection(
            root for index, root in self.whole.items() if index in given
        )
        self.sent = {i.value for i in instructions if isinstance(i, Send)}
        self.in_place = sums_in_place(program, instructions)
        dying = self._last_uses(instructions)
        self.steps = [self._step(i, values) for i, values in zip(instructions, dying, strict=True)]
        self.stretches = [self.steps[part.start : part.stop] for part in stretches(instructions)]

    def _writes(self, instruction: Instruction) -> list[int]:
        if isinstance(instruction, Receive):
            return [instruction.value]
        return [value for call in calls_of(self.program, instruction) for value in call.made]

    def _reads(self, instruction: Instruction) -> list[int]:
        if isinstance(instruction, Send):
            return [instruction.value]
        reads = [value for call in calls_of(self.program, instruction) for value in call.reads]
        if isinstance(instruction, Give):
            value = self.program.results[instruction.result].value
            reads.append(self.whole.get(instruction.result, value))
        return reads

    def _last_uses(self, instructions: Sequence[Instruction]) -> list[list[int]]:
        """Return the values that are dead after each instruction."""
        made = set(self.made)
        last: dict[int, int] = {}
        for position, instruction in enumerate(instructions):
            for value in (*self._writes(instruction), *self._reads(instruction)):
                if value in made:
                    last[value] = position
        dying: list[list[int]] = [[] for _ in instructions]
        for value, position in last.items():
            dying[position].append(value)
        return dying

    def _step(self, instruction: Instruction, dying: list[int]) -> Callable[[dict[int, Any]], None]:
        names: dict[str, Any] = {}
        lines = [self._source(call, names) for call in calls_of(self.program, instruction)]
        match instruction:
            case Send(value, destinations):
                names |= {"slot": self.arena.value(value), "signal": self.signals.send}
                lines = [f"slot.copy_(V[{value}])", f"signal({destinations!r})"]
            case Receive(value, source, number):
                names |= {"slot": self.arena.value(value), "wait": self.signals.wait}
                lines = [f"wait({source}, {number})", f"V[{value}] = slot"]
            case Give(result):
                root = self.whole.get(result)
                if root not in self.in_slot and root not in self.sent:
                    value = self.program.results[result].value if root is None else root
                    given = self.arena.result(result) if root is None else self.arena.value(root)
                    names["slot"] = given
                    lines.append(f"slot.copy_(V[{value}])")
        lines += [f"del V[{value}]" for value in dying]
        header = ", ".join(["V", *(f"{name}={name}" for name in names)])
        body = "\n ".join(lines) or "pass"
        exec(f"def step({header}):\n {body}", names)
        step: Callable[[dict[int, Any]], None] = names["step"]
        return step

    def _source(self, call: Call, names: dict[str, Any]) -> str:
        if call.target == DETACH:
            return f"V[{call.outputs[0]}] = V[{call.reads[0]}]"
        target = f"f{len(names)}"
        in_slot = not self.in_slot.isdisjoint(call.made)
        name = INTO_SLOT[call.target] if in_slot else call.target
        names[target] = FASTER.get(name) or operator(name)
        if saves_workspace(call.target, call.args):
            names[target] = torch.enable_grad()(names[target])  # else the kernel saves nothing
        taken = self.in_place.get(call.made[0]) if call.made and not in_slot else None
        if taken is not None:
            others = [each.value for each in call.args if each.value != taken]
            added = others[0] if others else taken  # x + x
            return f"V[{call.outputs[0]}] = V[{taken}].add_(V[{added}])"
        arguments = [self._argument(argument, names) for argument in call.args]
        if call.target == BY_STRIDES:
            names["laid_out"] = laid_out
            stride = self.program.values[call.reads[0]].stride
            arguments[0] = f"laid_out({arguments[0]}, {stride!r})"
        arguments += [f"{key}={self._argument(item, names)}" for key, item in call.kwargs.items()]
        if in_slot:
            names["slot"] = self.arena.value(call.made[0])
            arguments.append("out=slot")
        text = f"{target}({', '.join(arguments)})"
        if not call.tuple_result:
            return f"V[{call.outputs[0]}] = {text}"
        members = [f"V[{v}] = r[{i}]" for i, v in enumerate(call.outputs) if v is not None]
        return "; ".join([f"r = {text}", *members, "del r"])

    def _argument(self, argument: Any, names: dict[str, Any]) -> str:
        match argument:
            case Ref(value):
                return f"V[{value}]"
            case bool() | int() | str() | None:
                return repr(argument)
            case list():
                return f"[{', '.join(self._argument(item, names) for item in argument)}]"
            case tuple():
                return f"({''.join(self._argument(item, names) + ', ' for item in argument)})"
            case _:
                name = f"k{len(names)}"
                names[name] = argument
                return name
