"""What makes two ops cost the same on one device: the name under which their time is kept."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from envs.executor.lists import Run
from envs.profiling import single_list
from graphs.extract.program import Call, Ref, StepProgram, Value


def op_signatures(program: StepProgram) -> tuple[str, ...]:
    """The signature of every op, (N,).

    It holds the operator, shape, stride and dtype of every tensor that goes in, which arguments
    are the same tensor, all other arguments, which outputs anybody reads, and the same of the views
    that are made for the call. It leaves out what else an op's time depends on in its step: what
    the tensors hold (the rows that an embedding looks up), and what the ops before left in the
    caches and in the allocator.
    """
    signatures = [""] * program.op_count
    for instruction in single_list(program):
        if isinstance(instruction, Run):
            calls = [program.calls[i] for i in (*instruction.views, instruction.call)]
            signatures[calls[-1].op] = _signature(program, calls)
    return tuple(signatures)


def _signature(program: StepProgram, calls: Sequence[Call]) -> str:
    numbers: dict[int, int] = {}  # by value: its number in this signature
    lines = [_text(call, numbers) for call in calls]
    lines += [_tensor(program.values[value]) for value in numbers]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def _text(call: Call, numbers: dict[int, int]) -> str:
    arguments = [_argument(argument, numbers) for argument in call.args]
    arguments += [f"{key}={_argument(call.kwargs[key], numbers)}" for key in sorted(call.kwargs)]
    made = [None if v is None else numbers.setdefault(v, len(numbers)) for v in call.outputs]
    return f"{call.target}({', '.join(arguments)}) -> {made}"


def _argument(argument: Any, numbers: dict[int, int]) -> str:
    match argument:
        case Ref(value):
            return f"t{numbers.setdefault(value, len(numbers))}"
        case list() | tuple():
            return f"[{', '.join(_argument(item, numbers) for item in argument)}]"
        case _:  # numbers, text, and names of torch such as torch.float32
            return repr(argument)


def _tensor(value: Value) -> str:
    return f"{value.dtype} {list(value.shape)} {list(value.stride)}"
