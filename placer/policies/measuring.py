"""Costs of decoder weights on real devices, measured beside a reference candidate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import placer
from envs.executor.worker_error import WorkerError
from envs.measurement import Measurement, contended, tied
from envs.placement import MadeBy, Placement
from envs.simulator import OVERFULL_NS, Simulator
from placer.policies.pool import CANNOT_RUN
from placer.rigs import MeasuringBackend, Rig
from placer.search.candidate import Candidate, Kind
from placer.search.judge import Judge


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """A measured candidate, in the same rounds as the reference ``known``."""

    candidate: Candidate
    placement: Placement
    measurement: Measurement
    step_s: float  # inf if it failed
    ratio: float  # to the reference's step time; 1 if within noise


@dataclass(slots=True, kw_only=True, eq=False)
class Measuring:
    """Decoders that measure the placements of one problem.

    A cost is the simulated step time of the reference ``known`` times the measured ratio to it, so
    that neither changes of the machine's load nor differences within noise affect the reward.
    ``also`` are candidates to run with the next ones; ``seen`` holds every run.
    """

    judge: Judge
    rig: Rig
    backend: MeasuringBackend
    known: Candidate
    seen: list[Run] = field(default_factory=list)
    also: list[Candidate] = field(default_factory=list)

    def costs(
        self, numbers: NDArray[np.int64], weights: NDArray[np.floating[Any]]
    ) -> NDArray[np.int64]:
        """Return costs (B,) of decoded ``weights`` (B, K); there is only one problem.

        Raises:
            KeyboardInterrupt: the measurement was stopped.
            WorkerError: the workers do not start.
        """
        del numbers
        devices, priority, _ = self.judge.decoded(weights)
        plans = [
            self.judge.candidate(Kind.TUNED_POLICY, *own)
            for own in zip(devices, priority, strict=True)
        ]
        fitting = [plan for plan in plans if plan.step_ns < OVERFULL_NS]
        runs = self.run([*fitting, *self.also])
        self.also.clear()
        ratio_of = {id(plan): run.ratio for plan, run in zip(fitting, runs, strict=False)}
        ratios = np.array([ratio_of.get(id(plan), CANNOT_RUN) for plan in plans])
        return np.asarray(np.rint(self.known.step_ns * ratios), np.int64)

    def run(self, candidates: Sequence[Candidate]) -> list[Run]:
        """Measure feasible candidates and the reference in turn, equal ones once.

        Raises:
            KeyboardInterrupt: the measurement was stopped.
            WorkerError: the workers do not start, or the reference cannot be run.
        """
        placements = {_key(own): self.placement(own) for own in (self.known, *candidates)}
        runs = self.backend.measure(list(placements.values()))
        if self.backend.interrupted:
            raise KeyboardInterrupt
        measured = dict(zip(placements, runs, strict=True))
        loaded = contended(runs)
        known = measured[_key(self.known)]
        if not known.ok:
            raise WorkerError(f"{self.known.name} cannot be run: {known.failure}")
        found: dict[bytes, Run] = {}
        for candidate in (self.known, *candidates):
            key, own = _key(candidate), measured[_key(candidate)]
            if key not in found:
                found[key] = Run(
                    candidate=candidate,
                    placement=placements[key],
                    measurement=own,
                    step_s=own.step_s(contended=loaded),
                    ratio=_ratio(own, known, loaded=loaded),
                )
        self.seen += found.values()
        return [found[_key(candidate)] for candidate in candidates]

    def placement(self, candidate: Candidate) -> Placement:
        """Return a candidate as a placement whose priorities give the simulated order."""
        problem = self.judge.problem
        schedule = Simulator(problem, memory=False).run(candidate.devices, candidate.priority)
        priority = np.empty(problem.op_count)
        priority[self.rig.order(problem, schedule)] = np.arange(problem.op_count, 0, -1)
        made_by = MadeBy(placer=candidate.name, version=placer.__version__)
        made = Placement.of(problem.graph, problem.cluster, candidate.devices, priority, made_by)
        return replace(made, predicted={"step_s": candidate.step_ns / 1e9})

    def close(self) -> None:
        """Stop the workers."""
        self.backend.close()


@dataclass(frozen=True, slots=True, eq=False)
class Fitted:
    """Decoders for one problem whose simulator was fitted to measurements.

    A cost is the reference's simulated step time times the ratio to its fitted one.
    """

    judge: Judge  # of the fitted problem
    known: Candidate  # with its step time before the fit

    def costs(
        self, numbers: NDArray[np.int64], weights: NDArray[np.floating[Any]]
    ) -> NDArray[np.int64]:
        """Return costs (B,) of decoded ``weights`` (B, K); there is only one problem."""
        del numbers
        costs = self.judge.decoded(weights)[2]
        fitted_ns = self.judge.costs(self.known.devices[None], self.known.priority[None])[0]
        ratios = np.where(costs < OVERFULL_NS, costs / max(int(fitted_ns), 1), CANNOT_RUN)
        return np.asarray(np.rint(self.known.step_ns * ratios), np.int64)

    def close(self) -> None:
        """Do nothing."""


def _ratio(own: Measurement, known: Measurement, *, loaded: bool) -> float:
    if not own.ok:
        return CANNOT_RUN
    if own is known or tied(own, known, loaded=loaded):
        return 1.0
    return own.step_s(contended=loaded) / known.step_s(contended=loaded)


def _key(candidate: Candidate) -> bytes:
    return candidate.devices.tobytes() + candidate.priority.tobytes()
