"""Candidates: proposed placements, from search to measurement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from envs.hardware.core_sets import has_several_cores, is_core_set
from envs.measurement import Measurement
from envs.placement import Placement
from envs.problem import Floats, Ints
from envs.simulator import INFEASIBLE_NS


class Kind(Enum):
    """Origin of a candidate, the simplest first; the value is the usual display name.

    Of equally fast candidates the simplest wins. Kinds after ``ANNEALING`` are equally simple.
    """

    UNPLACED = "unplaced"
    SINGLE_DEVICE = "single device"
    WARM_START = "warm start"
    LAYER_SPLIT = "layer split"
    FIRST_LAYERS = "first layers"
    ROUND_ROBIN = "round robin"
    HEFT = "HEFT"
    ETF = "ETF"
    M_ETF = "m-ETF"
    POLICY = "policy"
    EVOLUTION = "evolution"
    BEAM = "beam search"
    ANNEALING = "annealing"
    CONTIGUOUS_PARTS = "contiguous parts"
    BALANCED_LOADS = "balanced loads"
    EXACT = "exact"
    OTHER = "other"  # of plug-ins, and of placements whose origin is unknown


_RANKS = {kind: rank for rank, kind in enumerate(Kind)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prediction:
    """The simulator's prediction for a candidate.

    ``objective_s`` is the value of the objective, inf if the placement is infeasible: the step time
    unless another objective was chosen.
    """

    placement: Placement  # its priorities give the simulated order
    objective_s: float
    peak_memory_bytes: Mapping[str, int]  # {device: bytes}
    times_s: Mapping[str, float] = field(default_factory=dict)  # "step_s" and other known times
    why: str = ""  # why it is infeasible
    missing_bytes: int = 0  # memory shortfall summed over devices


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """A device and a priority for each of N ops; among ready ops the highest priority runs first.

    A search sets the first fields. ``step_ns`` is the simulated step time, INFEASIBLE_NS if the
    placement breaks a limit or takes 550 s or more. ``cost`` then tells by how much it does not fit
    into memory, see :class:`placer.search.evaluator.Evaluator`. ``bound_ns`` is a lower bound over
    all placements of the problem that the search proved: INFEASIBLE_NS if none is feasible, None if
    nothing was proved.

    Later steps add the ``prediction``, which the properties below require, and the ``measurement``
    if it was run; ``eliminated`` if only faster ones were run once more. A ``spare`` one, worse by
    prediction than others of its kind, is for nodes of a cluster that run many. Decisions depend
    on ``kind``, never on the display name.
    """

    kind: Kind
    name: str
    devices: Ints  # (N,)
    priority: Floats  # (N,)
    step_ns: int
    cost: int = INFEASIBLE_NS
    bound_ns: int | None = None
    prediction: Prediction | None = None
    measurement: Measurement | None = None
    eliminated: bool = False
    spare: bool = False

    @property
    def is_single(self) -> bool:
        """Return whether all ops are on one device of the cluster."""
        return not self.is_unplaced and bool((self.devices == self.devices[0]).all())

    @property
    def is_unplaced(self) -> bool:
        """Return whether it is the model as it is; its placement has a device of its own."""
        return self.kind is Kind.UNPLACED

    @property
    def is_on_one_device(self) -> bool:
        """Return whether it is on one device of the cluster, placed or not."""
        return self.is_single or (self.is_unplaced and not self.is_on_threads)

    @property
    def is_on_threads(self) -> bool:
        """Return whether it is the unplaced model with torch's threads on several cores."""
        if not self.is_unplaced:
            return False
        [device] = self.placement.used_devices
        return is_core_set(device) and has_several_cores(device)

    def is_comparable(self, *, contended: bool) -> bool:
        """Return whether its measured time can be compared with those of placements.

        On a busy machine CPU-clock times are compared, which several threads of torch do not have.
        """
        return not (contended and self.is_on_threads)

    @property
    def simplicity(self) -> int:
        """Return a rank, lower is simpler: unplaced, single device, fixed rules, then search."""
        return (
            _RANKS[Kind.SINGLE_DEVICE]
            if self.is_single
            else min(_RANKS[self.kind], _RANKS[Kind.ANNEALING] + 1)
        )

    @property
    def bound_s(self) -> float | None:
        """Return the proved bound in seconds, inf if no placement is feasible."""
        if self.bound_ns is None:
            return None
        return self.bound_ns / 1e9 if self.bound_ns < INFEASIBLE_NS else np.inf

    @property
    def placement(self) -> Placement:
        """Return the predicted placement."""
        return self._predicted.placement

    @property
    def predicted_s(self) -> float:
        """Return the predicted value of the objective, inf if infeasible."""
        return self._predicted.objective_s

    @property
    def peak_memory_bytes(self) -> Mapping[str, int]:
        """Return the predicted peak memory by device."""
        return self._predicted.peak_memory_bytes

    @property
    def times_s(self) -> Mapping[str, float]:
        """Return the predicted times by name."""
        return self._predicted.times_s

    @property
    def why(self) -> str:
        """Return why it cannot run: the failure when it was run, or the prediction's reason."""
        return self.failure or self._predicted.why

    @property
    def failure(self) -> str:
        """Return why the run failed; "" if it ran or was not tried."""
        return "" if self.measurement is None else self.measurement.failure

    @property
    def can_run(self) -> bool:
        """Return whether it is feasible and did not fail when it was run."""
        return bool(np.isfinite(self.predicted_s)) and not self.failure

    def ranking_s(self, *, contended: bool) -> float:
        """Return the time to compare by: measured (CPU-clock time if contended), else predicted."""
        if self.measurement is None:
            return self.predicted_s
        return self.measurement.step_s(contended=contended)

    @property
    def _predicted(self) -> Prediction:
        assert self.prediction is not None, f"{self.name} was not simulated"
        return self.prediction


def ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates sorted by step time; those that do not fit by their costs (stable)."""
    return sorted(candidates, key=lambda candidate: (candidate.step_ns, candidate.cost))


def distinct(candidates: Iterable[Candidate], count: int) -> list[Candidate]:
    """Return the first ``count`` candidates with different devices.

    Of candidates that differ only in priorities the first is kept.
    """
    kept: dict[bytes, Candidate] = {}
    for candidate in candidates:
        if len(kept) == count:
            break
        kept.setdefault(candidate.devices.tobytes(), candidate)
    return list(kept.values())
