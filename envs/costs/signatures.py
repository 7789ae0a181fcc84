"""Signatures of ops and calls, under which their times are cached: equal ones cost the same."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from envs.executors.cores.instruction_lists import Run, single_list
from graphs.extract import Extraction
from graphs.extract.placeable import CallGraph
from graphs.extract.program import Call, Ref, StepProgram, Value


def op_signatures(program: StepProgram) -> tuple[str, ...]:
    """Return the signature of every op, (N,).

    It covers the operator, shape, stride and dtype of every input tensor, which arguments are the
    same tensor, all other arguments, which outputs are read, and the same for views made for the
    call. It omits what else an op's time depends on in its step: tensor values (the rows that an
    embedding looks up) and the state that earlier ops leave in caches and allocator.
    """
    signatures = [""] * program.op_count
    for instruction in single_list(program):
        if isinstance(instruction, Run):
            calls = [program.calls[i] for i in (*instruction.views, instruction.call)]
            signatures[calls[-1].op] = _signature(program, calls)
    return tuple(signatures)


def node_signatures(extraction: Extraction, calls: CallGraph) -> tuple[str, ...]:
    """Return the signature of every node, (M,): of its ops and the precision of matrix products."""
    ops: defaultdict[int, list[str]] = defaultdict(list)
    for node, signature in zip(
        calls.node_of.tolist(), op_signatures(extraction.program), strict=True
    ):
        ops[node].append(signature)
    precision = torch.get_float32_matmul_precision()
    return tuple(_digest([precision, *ops[node]]) for node in range(len(calls.graph)))


def _signature(program: StepProgram, calls: Sequence[Call]) -> str:
    numbers: dict[int, int] = {}  # {value: its number in this signature}
    lines = [_text(call, numbers) for call in calls]
    lines += [_tensor(program.values[value]) for value in numbers]
    return _digest(lines)


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def _text(call: Call, numbers: dict[int, int]) -> str:
    arguments = [_argument(argument, numbers) for argument in call.args]
    arguments += [f"{key}={_argument(call.kwargs[key], numbers)}" for key in sorted(call.kwargs)]
    outputs = [None if v is None else numbers.setdefault(v, len(numbers)) for v in call.outputs]
    return f"{call.target}({', '.join(arguments)}) -> {outputs}"


def _argument(argument: Any, numbers: dict[int, int]) -> str:
    match argument:
        case Ref(value):
            return f"t{numbers.setdefault(value, len(numbers))}"
        case list() | tuple():
            return f"[{', '.join(_argument(item, numbers) for item in argument)}]"
        case _:  # numbers, strings, and torch constants such as torch.float32
            return repr(argument)


def _tensor(value: Value) -> str:
    return f"{value.dtype} {list(value.shape)} {list(value.stride)}"
