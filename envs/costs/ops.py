"""Costs of ops on pinned cores, measured in context, and the signatures to cache op times by.

Workers run the whole step and time every op: a call repeated alone finds its inputs in the cache
and its memory mapped, and sums of such times came out up to a fifth below the step time.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from envs.costs.cached_costs import MeasuredCosts, first_of_kinds, loaded_kind
from envs.costs.factors import classes_of
from envs.costs.modules import MODULE_BY_MODULE, profile_modules
from envs.executors.cores.arena import load_example
from envs.executors.cores.errors import once_more
from envs.executors.cores.instruction_lists import Give, Run, single_list
from envs.executors.cores.pool import WorkerPool
from envs.hardware.cluster import Device
from envs.hardware.torch_devices import kernel_settings
from graphs.extract import Extraction
from graphs.extract.export.functions import OwnFunction
from graphs.extract.placeable import CallGraph
from graphs.extract.program import Call, Ref, StepProgram, Value

WARM_UP: Final = 2
REPEATS: Final = 5
LONG_STEP_S: Final = 0.15
"""A step that takes so long is run ``FEWEST_REPEATS`` times: longer runs differ less."""
FEWEST_REPEATS: Final = 3
RUNS_AT_ONCE: Final = 2
"""On each device in a row; the first does not count."""
TIMED_ALONE: Final = "states are read from memory"
"""Way of timing single calls in :mod:`envs.costs.calls`: times of other ways do not count."""
PROFILE_TIMEOUT_S: Final = 600.0


def core_costs(
    extraction: Extraction,
    progress: Callable[[int, int], None] | None = None,
    *,
    beside: Sequence[Device] = (),
    unplaced: bool = False,
) -> MeasuredCosts:
    """Return the costs of the ops of a step on core sets of this machine, one of each kind.

    Costs on single cores are also measured while all cores of ``beside``, at least two, compute.
    Those of the ``unplaced`` model are the same until they are fitted to its measured step.
    Ops of a graph of modules have no signature to cache them by. Measuring raises WorkerError where
    an op cannot run on a device, ExtractionError where modules cannot be timed.
    """
    if extraction.step_program is None:
        return MeasuredCosts(
            profile=functools.partial(profile_modules, extraction, progress=progress),
            method=MODULE_BY_MODULE,
        )
    kinds = {device.kind for device in beside} if len(beside) > 1 else set()
    cores = beside if kinds else ()
    return MeasuredCosts(
        profile=functools.partial(profile_runs, extraction, beside=cores, progress=progress),
        method=" in runs of the whole step",
        signatures=op_signatures(extraction.program),
        classes=classes_of(extraction.graph),
        unplaced=unplaced,
        at_once=dict.fromkeys(kinds, len(beside)),
    )


def profile_runs(
    extraction: Extraction,
    devices: Sequence[Device],
    *,
    beside: Sequence[Device] = (),
    repeats: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, NDArray[np.float64]]:
    """Return the seconds of every op in every run, {device kind: (repeats, N)}.

    By default these are ``REPEATS`` runs, of a long step ``FEWEST_REPEATS``.

    The whole step runs on the first device of each kind; the time of an op is that of its call, of
    the views made for it, and of handing over the results of the step that it makes. On one core
    this is thread CPU time, which excludes time when other processes use the core; on several cores
    it is wall time, since that clock does not include other threads. Runs are scaled so that the
    medians of the ops add up to the median run, which is 1 to 1.5 % longer than they are. A worker
    that dies is replaced once.

    For kinds of devices in ``beside`` there are also runs while all of these compute, {loaded kind:
    (R, N)}: each repeats the step on memory of its own, out of phase with the others. They
    alternate with the runs on one device, so that both see the same drift of the machine.
    """
    first_of = first_of_kinds(devices)
    kinds = {device.kind for device in beside}
    total = len(first_of) * (WARM_UP + (repeats or REPEATS))
    done = itertools.count(1)

    def report() -> None:
        if progress is not None:
            progress(min(next(done), total), total)

    def runs_on(device: Device) -> list[list[NDArray[np.float64]]]:
        nonlocal total
        alone: list[NDArray[np.float64]] = []
        loaded: list[NDArray[np.float64]] = []
        others = [one for one in beside if one.name != device.name and device.kind in kinds]
        with ExitStack() as stack:
            steps = [stack.enter_context(_WholeStep(extraction, one)) for one in (device, *others)]
            if others:
                _at_once(steps)  # warms them all up
            for _ in range(WARM_UP):
                if not others:
                    steps[0].run_s()
                report()
            count = repeats or repeats_for(steps[0].wall_s)
            total -= (repeats or REPEATS) - count
            for repeat in range(count):
                alone.append(steps[0].run_s())
                report()
                if others and repeat % 2 == 0:
                    loaded += _at_once(steps)
        return [alone, loaded]

    profiled = {}
    for kind, device in sorted(first_of.items()):
        alone, loaded = once_more(functools.partial(runs_on, device))
        profiled[kind] = _to_median_run(alone)
        if loaded:
            profiled[loaded_kind(kind, len(beside))] = _to_median_run(loaded)
    return profiled


def repeats_for(step_s: float) -> int:
    """Return how often a step of this length is run."""
    return REPEATS if step_s < LONG_STEP_S else FEWEST_REPEATS


class _WholeStep:
    """The step on one device, run by a worker of its own on memory of its own."""

    def __init__(self, extraction: Extraction, device: Device) -> None:
        program = extraction.program
        instructions = single_list(program)
        makers = program.makers()
        op_of = {
            k: program.calls[i.call].op for k, i in enumerate(instructions) if isinstance(i, Run)
        }
        for k, instruction in enumerate(instructions):
            if isinstance(instruction, Give):
                root = program.values[program.results[instruction.result].value].root
                if root in makers:
                    op_of[k] = makers[root]
        self._timed, self._ops = list(op_of), list(op_of.values())
        self._op_count = program.op_count
        self.device = device
        self.wall_s = 0.0  # of the last run
        self._pool = WorkerPool(
            program, [device], op_names=tuple(extraction.graph), step_timeout_s=PROFILE_TIMEOUT_S
        )
        try:
            load_example(self._pool.arena, extraction.step)
            self._number = self._pool.load([instructions])
        except BaseException:
            self._pool.close()
            raise

    def __enter__(self) -> _WholeStep:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def run_s(self) -> NDArray[np.float64]:
        """Run the step; return the seconds of every op, (N,)."""
        run = self._pool.run(self._number, each=True)
        self.wall_s = run.wall_s
        times_s = np.zeros(self._op_count)
        np.add.at(times_s, self._ops, run.cpu_s[0][self._timed])
        return times_s


def _at_once(steps: Sequence[_WholeStep]) -> list[NDArray[np.float64]]:
    """Repeat the step on several devices at once, out of phase.

    Return the runs, on devices of the kind of the first one, that began and ended while all others
    ran.
    """
    behind = set(range(len(steps)))
    stop = threading.Event()

    def repeated(k: int) -> list[NDArray[np.float64]]:
        runs: list[NDArray[np.float64]] = []
        try:
            time.sleep(steps[k].wall_s * k / len(steps))
            while not stop.is_set():
                run_s = steps[k].run_s()
                if not stop.is_set():  # else others may have ended before it
                    runs.append(run_s)
                if len(runs) == RUNS_AT_ONCE:
                    behind.discard(k)
                    if not behind:
                        stop.set()
        except BaseException:
            stop.set()
            raise
        return runs[1:]  # the first began before others

    with ThreadPoolExecutor(len(steps)) as threads:
        try:
            runs = list(threads.map(repeated, range(len(steps))))
        finally:
            stop.set()
    kind = steps[0].device.kind
    same = (own for step, own in zip(steps, runs, strict=True) if step.device.kind == kind)
    return [run for own in same for run in own]


def _to_median_run(runs: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return runs (R, N), scaled so that the medians of the ops add up to the median run."""
    runs_s = np.array(runs)
    of_ops_s = np.median(runs_s, axis=0).sum()
    return np.asarray(runs_s * (np.median(runs_s.sum(axis=1)) / of_ops_s), np.float64)


def op_signatures(program: StepProgram, *, alone: bool = False) -> tuple[str, ...]:
    """Return the signature of every op, (N,).

    It covers the operator, shape, stride and dtype of every input tensor, which arguments are the
    same tensor, all other arguments, which outputs are read, the same for views made for the call,
    and how many results of the step lie in which output. Of ops that are timed ``alone`` it covers
    which inputs are states of the model, or views of them, and no results. It omits what else an
    op's time depends on in its step: tensor values (the rows that an embedding looks up) and the
    state that earlier ops leave in caches and allocator.
    """
    signatures = [""] * program.op_count
    given = Counter(program.values[r.value].root for r in program.results if not alone)
    states = {s.value for s in program.sources if s.role != "input"} if alone else set()
    for instruction in single_list(program):
        if isinstance(instruction, Run):
            calls = [program.calls[i] for i in (*instruction.views, instruction.call)]
            signatures[calls[-1].op] = _signature(program, calls, given, states)
    return tuple(signatures)


def node_signatures(extraction: Extraction, calls: CallGraph) -> tuple[str, ...]:
    """Return the signature of every node, (M,): of its ops and the settings that choose kernels.

    That of a function with a backward of its own has its name, too.
    """
    ops: defaultdict[int, list[str]] = defaultdict(list)
    targets = {call.key: call.target for call in extraction.forward.calls}
    signatures = op_signatures(extraction.program, alone=True)
    for node, call, signature in zip(
        calls.node_of.tolist(), extraction.call_of, signatures, strict=True
    ):
        target = targets[call]
        ops[node].append(signature)
        if isinstance(target, OwnFunction):  # takes longer than its ops by themselves
            ops[node].append(target.qualified_name)
    settings = (*kernel_settings(), TIMED_ALONE)
    return tuple(_digest([*settings, *ops[node]]) for node in range(len(calls.graph)))


def _signature(
    program: StepProgram, calls: Sequence[Call], given: Counter[int], states: Collection[int]
) -> str:
    numbers: dict[int, int] = {}  # {value: its number in this signature}
    lines = [_text(call, numbers) for call in calls]
    lines += [_tensor(program.values[value]) for value in numbers]
    if any(counts := [given[value] for value in calls[-1].made]):
        lines.append(f"results: {counts}")
    if read := [k for value, k in numbers.items() if program.values[value].root in states]:
        lines.append(f"states: {read}")
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
