"""Seconds that handing a step over to workers takes, besides their run; cached like an op's cost.

They are measured around a run of the step's first op, since they do not depend on what the workers
do in between.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from envs.costs.cached_costs import MeasuredCosts
from envs.executors.cores.arena import load_example
from envs.executors.cores.errors import once_more
from envs.executors.cores.hand_over import HandOver
from envs.executors.cores.instruction_lists import single_list
from envs.executors.cores.pool import WorkerPool
from envs.hardware.cluster import Device
from graphs.extract import Extraction
from graphs.workload import step_copy

REPEATS: Final = 5
STEPS: Final = 5
"""Steps of a repeat, which counts with their median."""


def hand_over_costs(extraction: Extraction) -> MeasuredCosts:
    """Return the cost of handing over a step with a program, as that of its only op.

    Measuring raises WorkerError where a worker does not start.
    """
    return MeasuredCosts(
        profile=functools.partial(profile_hand_over, extraction),
        method=" around short steps",
        signatures=(hand_over_signature(extraction),),
    )


def profile_hand_over(
    extraction: Extraction, devices: Sequence[Device]
) -> dict[str, NDArray[np.float64]]:
    """Return the seconds of hand-overs, {device kind: (REPEATS, 1)}.

    This is thread CPU time. It is 0 where the model cannot be copied: such a step is measured
    without its hand-over.
    """
    return {
        device.kind: once_more(functools.partial(_hand_overs_s, extraction, device))
        for device in devices
    }


def _hand_overs_s(extraction: Extraction, device: Device) -> NDArray[np.float64]:
    try:
        step = step_copy(extraction.step)
    except Exception:  # noqa: BLE001  # as the model's own code raises it
        return np.zeros((REPEATS, 1))
    with WorkerPool(extraction.program, [device]) as pool:
        load_example(pool.arena, extraction.step)
        number = pool.load([single_list(extraction.program)[:1]])
        handed = HandOver(pool.arena, step, extraction.outputs)
        handed.share()

        def once() -> float:
            for tensor in step.named_state().values():
                tensor.grad = None
            start_s = time.thread_time()
            handed.step(lambda: pool.run(number), step.step_inputs, step.keywords)
            return time.thread_time() - start_s

        once()
        return np.array([[np.median([once() for _ in range(STEPS)])] for _ in range(REPEATS)])


def hand_over_signature(extraction: Extraction) -> str:
    """Return what the time of a hand-over depends on: the tensors that a step reads and returns."""
    program = extraction.program
    tensors = [
        *((source.role, program.values[source.value]) for source in program.sources),
        *((result.role, program.values[result.value]) for result in program.results),
    ]
    lines = [f"{role} {value.dtype} {list(value.shape)}" for role, value in tensors]
    return hashlib.sha256("\n".join(["hand-over", *lines]).encode()).hexdigest()[:32]
