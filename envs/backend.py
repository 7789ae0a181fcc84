"""The protocol that every backend implements, and the results of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np

from envs.measurement import Measurement, noise
from envs.placement import Placement

ProgressCallback: TypeAlias = Callable[[int, int], None]
"""Called with (runs done, total runs)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of evaluating one placement.

    ``step_s`` is the step time, inf where the placement is not ``feasible``; ``why`` then explains
    the reason to users. ``parts`` breaks the step time down by name (seconds), as far as the
    backend can. ``period_s`` is the additional time per micro-batch in a step of many
    micro-batches. It is None for a step of one micro-batch, and where it is not known: then
    ``no_period_reason`` gives the reason. ``measurement`` holds the runs of a placement that was
    really run, or failed to; its noise makes up the ``parts``.
    """

    step_s: float
    peak_memory_bytes: Mapping[str, int]  # by device name
    feasible: bool = True
    why: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    period_s: float | None = None
    no_period_reason: str = ""
    measurement: Measurement | None = None

    @classmethod
    def infeasible(cls, why: str, peak_memory_bytes: Mapping[str, int]) -> StepResult:
        """Return the result of a placement that cannot be run."""
        return cls(step_s=math.inf, peak_memory_bytes=peak_memory_bytes, feasible=False, why=why)

    @classmethod
    def of_measurement(
        cls,
        measurement: Measurement,
        simulated_peaks: Mapping[str, int],
        *,
        contended: bool = False,
    ) -> StepResult:
        """Return the result of a measurement; without any runs it is infeasible.

        Args:
            measurement: runs of the placement.
            simulated_peaks: {device name: bytes}, for devices that do not report their peak memory.
            contended: whether other processes used the cores, so that CPU-clock times count.
        """
        if not measurement.ok:
            return cls(
                step_s=math.inf,
                peak_memory_bytes=dict(measurement.peak_memory_bytes),
                feasible=False,
                why=measurement.failure or "the measuring was stopped before it was run",
                measurement=measurement,
            )
        return cls(
            step_s=measurement.step_s(contended=contended),
            peak_memory_bytes={**simulated_peaks, **measurement.peak_memory_bytes},
            parts=noise(measurement),
            measurement=measurement,
        )


@runtime_checkable
class Backend(Protocol):
    """Evaluates placements of a graph by step time: a simulator, or real devices."""

    def evaluate(
        self, placements: Sequence[Placement], progress: ProgressCallback | None = None
    ) -> list[StepResult]:
        """Evaluate every placement, in order; one that fails is infeasible, the rest continue.

        ``progress`` is called with (runs done, total runs) by backends that take long.
        """
        ...


def check_protocol(backend: object) -> None:
    """Raise TypeError unless an object can evaluate placements."""
    if not isinstance(backend, Backend):
        raise TypeError(f"{backend!r} is no placer.Backend: it has no method evaluate")


def evaluated(
    backend: Backend, placements: Sequence[Placement], progress: ProgressCallback | None = None
) -> list[StepResult]:
    """Return a backend's results; raise ValueError unless they are what the protocol asks for."""
    callback = () if progress is None else (progress,)
    answer: object = backend.evaluate(placements, *callback)
    results = list(answer) if isinstance(answer, Iterable) else None
    others = {type(r).__name__ for r in results or () if not isinstance(r, StepResult)}
    if results is None or others or len(results) != len(placements):
        kinds = f" ({', '.join(sorted(others))})" if others else ""
        gave = type(answer).__name__ if results is None else f"{len(results)} results{kinds}"
        raise ValueError(
            f"the backend gave {gave} for {len(placements)} placements: return one StepResult for "
            "each, in order"
        )
    for result in results:
        if not (0.0 <= result.step_s < math.inf if result.feasible else result.step_s >= 0.0):
            raise ValueError(
                f"the backend gave a step time of {result.step_s:g}: return "
                "StepResult.infeasible(why, {}) for a placement without one"
            )
    return results


def measurements(results: Sequence[StepResult]) -> list[Measurement]:
    """Return the measurement of every result; a step time without one counts as exact."""
    return [one.measurement or _exact(one) for one in results]


def _exact(result: StepResult) -> Measurement:
    times_s = np.array([result.step_s] if result.feasible else [])
    return Measurement(
        wall_s=times_s,
        cpu_clock_s=times_s,
        failure="" if result.feasible else result.why or "the backend calls it infeasible",
        peak_memory_bytes=result.peak_memory_bytes,
        exact=True,
    )
