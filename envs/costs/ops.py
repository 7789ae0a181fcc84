"""Costs of ops on pinned cores, measured in context, and the signatures to cache op times by.

Workers run the whole step and time every op: a call repeated alone finds its inputs in the cache
and its memory mapped, and sums of such times came out up to a fifth below the step time.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from envs.costs.cached_costs import MeasuredCosts, first_of_kinds
from envs.costs.factors import classes_of
from envs.costs.modules import MODULE_BY_MODULE, profile_modules
from envs.executors.cores.arena import load_example
from envs.executors.cores.errors import once_more
from envs.executors.cores.instruction_lists import Give, Run, single_list
from envs.executors.cores.pool import WorkerPool
from envs.hardware.cluster import Device
from graphs.extract import Extraction
from graphs.extract.placeable import CallGraph
from graphs.extract.program import Call, Ref, StepProgram, Value

WARM_UP: Final = 2
REPEATS: Final = 5
PROFILE_TIMEOUT_S: Final = 600.0


def core_costs(
    extraction: Extraction,
    progress: Callable[[int, int], None] | None = None,
    *,
    unplaced: bool = False,
) -> MeasuredCosts:
    """Return the costs of the ops of a step on core sets of this machine, one of each kind.

    Those of the ``unplaced`` model are the same until they are fitted to its measured step.
    Ops of a graph of modules have no signature to cache them by. Measuring raises WorkerError where
    an op cannot run on a device, ExtractionError where modules cannot be timed.
    """
    if extraction.step_program is None:
        return MeasuredCosts(
            profile=functools.partial(profile_modules, extraction, progress=progress),
            method=MODULE_BY_MODULE,
        )
    return MeasuredCosts(
        profile=functools.partial(profile_runs, extraction, progress=progress),
        method=" in runs of the whole step",
        signatures=op_signatures(extraction.program),
        classes=classes_of(extraction.graph),
        unplaced=unplaced,
    )


def profile_runs(
    extraction: Extraction,
    devices: Sequence[Device],
    *,
    repeats: int = REPEATS,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, NDArray[np.float64]]:
    """Return the seconds of every op in every run, {device kind: (repeats, N)}.

    The whole step runs on the first device of each kind; the time of an op is that of its call, of
    the views made for it, and of handing over the results of the step that it makes. On one core
    this is thread CPU time, which excludes time when other processes use the core; on several cores
    it is wall time, since that clock does not include other threads. A worker that dies is replaced
    once.
    """
    program = extraction.program
    instructions = single_list(program)
    makers = program.makers()
    op_of = {k: program.calls[i.call].op for k, i in enumerate(instructions) if isinstance(i, Run)}
    for k, instruction in enumerate(instructions):
        if isinstance(instruction, Give):
            root = program.values[program.results[instruction.result].value].root
            if root in makers:
                op_of[k] = makers[root]
    timed, ops = list(op_of), list(op_of.values())
    first_of = first_of_kinds(devices)
    total = len(first_of) * (WARM_UP + repeats)
    done = itertools.count(1)

    def runs_on(device: Device) -> NDArray[np.float64]:
        runs_s = np.zeros((WARM_UP + repeats, program.op_count))
        names = tuple(extraction.graph)
        with WorkerPool(
            program, [device], op_names=names, step_timeout_s=PROFILE_TIMEOUT_S
        ) as pool:
            load_example(pool.arena, extraction.step)
            number = pool.load([instructions])
            for run_s in runs_s:
                np.add.at(run_s, ops, pool.run(number).cpu_s[0][timed])
                if progress is not None:
                    progress(min(next(done), total), total)
        return runs_s[WARM_UP:]

    return {
        kind: once_more(functools.partial(runs_on, device))
        for kind, device in sorted(first_of.items())
    }


def op_signatures(program: StepProgram, *, results: bool = True) -> tuple[str, ...]:
    """Return the signature of every op, (N,).

    It covers the operator, shape, stride and dtype of every input tensor, which arguments are the
    same tensor, all other arguments, which outputs are read, the same for views made for the call,
    and with ``results`` how many results of the step lie in which output. It omits what else an
    op's time depends on in its step: tensor values (the rows that an embedding looks up) and the
    state that earlier ops leave in caches and allocator.
    """
    signatures = [""] * program.op_count
    given = Counter(program.values[result.value].root for result in program.results if results)
    for instruction in single_list(program):
        if isinstance(instruction, Run):
            calls = [program.calls[i] for i in (*instruction.views, instruction.call)]
            signatures[calls[-1].op] = _signature(program, calls, given)
    return tuple(signatures)


def node_signatures(extraction: Extraction, calls: CallGraph) -> tuple[str, ...]:
    """Return the signature of every node, (M,): of its ops and the precision of matrix products."""
    ops: defaultdict[int, list[str]] = defaultdict(list)
    for node, signature in zip(
        calls.node_of.tolist(), op_signatures(extraction.program, results=False), strict=True
    ):
        ops[node].append(signature)
    precision = torch.get_float32_matmul_precision()
    return tuple(_digest([precision, *ops[node]]) for node in range(len(calls.graph)))


def _signature(program: StepProgram, calls: Sequence[Call], given: Counter[int]) -> str:
    numbers: dict[int, int] = {}  # {value: its number in this signature}
    lines = [_text(call, numbers) for call in calls]
    lines += [_tensor(program.values[value]) for value in numbers]
    if any(counts := [given[value] for value in calls[-1].made]):
        lines.append(f"results: {counts}")
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
