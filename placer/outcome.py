"""The result of an optimization: placement, candidates, and how certain the gain is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from envs.measurement import CONTENDED, Measurement, contended, tied, why_doubtful
from envs.placement import Placement
from envs.problem import Problem
from graphs.graph import PHASES
from placer.milliseconds import milliseconds, ratio_of
from placer.search.candidate import WHERE_ALLOWED
from placer.search.trail import Trail

if TYPE_CHECKING:
    from graphs.extract import Extraction
    from placer.replicate.result import ReplicaPlan

NO_HEADROOM: Final = 0.02
"""Relative gap to the lower bound below which a single device leaves no headroom."""
NOISY: Final = 0.2
"""Spread (interquartile range over median) above which a measurement gets a remark."""
PREDICTION_ERROR: Final = 0.15
UNPREDICTED_BYTES: Final = 64 << 20
"""Tolerated excess over predicted memory, for libraries and kernels of any model."""
REBUILT: Final = "rebuilt from CPU clocks"
"""Label of CPU-clock times in every message."""
SMALLEST_GAIN: Final = 0.01
"""Relative difference below which two step times count as equal."""
SIMPLEST_FIRST: Final = (
    "single",
    "warm start",
    "layer split",
    "first layers",
    "round robin",
    "min-cut",
    "HEFT",
    "ETF",
    "m-ETF",
    "policy",
    "evolution",
    "annealing",
)


class PlacementError(RuntimeError):
    """No placement is possible; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """One candidate: placement, predicted step time and memory, measurement if it was run.

    ``predicted_s`` is the predicted value of the objective: the step time unless another was
    chosen.
    """

    name: str
    placement: Placement
    predicted_s: float  # inf if infeasible
    peak_memory_bytes: dict[str, int]
    why: str = ""  # why it is infeasible
    missing_bytes: int = 0  # memory shortfall summed over its devices
    measurement: Measurement | None = None
    times_s: Mapping[str, float] = field(default_factory=dict)  # predicted times by name
    bound_s: float | None = None  # proved bound on all placements; inf: none can run

    @property
    def is_single(self) -> bool:
        """Return whether all ops are on one device."""
        return len(set(self.placement.devices)) == 1

    @property
    def failure(self) -> str:
        """Return why it could not be run; "" if it ran or was not tried."""
        return "" if self.measurement is None else self.measurement.failure

    @property
    def can_run(self) -> bool:
        """Return whether it is feasible and did not fail when it was run."""
        return bool(np.isfinite(self.predicted_s)) and not self.failure

    @property
    def simplicity(self) -> int:
        """Return a rank, lower is simpler: single device, then fixed rules, then search."""
        if self.is_single or self.name.endswith(WHERE_ALLOWED):
            return 0
        kinds = [i for i, name in enumerate(SIMPLEST_FIRST) if self.name.startswith(name)]
        return kinds[0] if kinds else len(SIMPLEST_FIRST)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Optimization:
    """The result of an optimization: the chosen placement and all candidates.

    ``rows`` are the candidates, ``best`` the chosen one; ``placement`` is its placement, with
    predicted and measured times filled in. ``lower_bound_s`` is the simulator's lower bound over
    all placements; ``solved`` says whether a solver contributed to it. ``all_cores`` is the
    baseline without placement: one process with torch's own threads on all cores.
    """

    placement: Placement
    problem: Problem
    rows: tuple[Row, ...]
    best: Row
    lower_bound_s: float
    search_s: float
    stopped: bool  # the user stopped it early
    extraction: Extraction | None = None
    all_cores: Measurement | None = None
    cost_source: Mapping[str, str] = field(default_factory=dict)  # {device kind: source}
    trail: Trail = field(default_factory=Trail)  # search trace
    trouble: str = ""  # why nothing could be run
    measuring_s: float = 0.0  # time spent on running candidates
    solved: bool = False
    replication: ReplicaPlan | None = None  # alternatives, with replicas

    def device_of(self, name: str) -> str:
        """Return the device of an op or module; see :meth:`Placement.device_of`."""
        return self.placement.device_of(name)

    def devices_of(self, module: str) -> dict[str, int]:
        """Return {device: number of ops} for a module."""
        return self.placement.devices_of(module)

    def save(self, path: str | Path) -> None:
        """Write the placement as JSON."""
        self.placement.save(Path(path))

    @property
    def loaded(self) -> bool:
        """Return whether the machine was loaded during the runs; CPU-clock times count then."""
        return contended([row.measurement for row in self.rows if row.measurement is not None])

    @property
    def single(self) -> Row | None:
        """Return the best single-device candidate, measured ones first; None if none can run."""
        singles = [row for row in self.rows if row.is_single and row.can_run]
        measured = [row for row in singles if row.measurement is not None]
        return min(measured or singles, key=lambda r: judged_s(r, self.loaded), default=None)

    def step_s(self, row: Row) -> float:
        """Return the time that ranks a candidate: its measured step time or the predicted one."""
        return judged_s(row, self.loaded)

    def speed_up_of(self, row: Row) -> float:
        """Return the best single device's step time over this candidate's; nan if unknown.

        Both are measured if both were run, else both are predicted.
        """
        single = self.single
        if single is None or not row.can_run:
            return np.nan
        if single.measurement is not None and row.measurement is not None:
            return ratio_of(self.step_s(single), self.step_s(row))
        return ratio_of(single.predicted_s, row.predicted_s)

    @property
    def speed_up(self) -> float:
        """Return the speed-up of the best candidate over the best single device; nan if unknown."""
        return self.speed_up_of(self.best)

    @property
    def clock(self) -> str:
        """Return the source of the best step time: "measured", REBUILT or "predicted"."""
        if self.best.measurement is None:
            return "predicted"
        return REBUILT if self.loaded else "measured"

    @property
    def verdict(self) -> str:
        """Return sentences on the gain or its absence, the unplaced baseline and what is proved."""
        return " ".join(filter(None, (self._gain, self._against_unplaced, self._proof)))

    @property
    def _gain(self) -> str:
        single = self.single
        if single is None:
            failed = [row for row in self.rows if row.is_single and row.failure]
            if failed:
                return f"No single device could be run to compare with: {failed[0].failure}"
            return self._why_no_single()
        gap = single.predicted_s / self.lower_bound_s - 1 if self.lower_bound_s else 0.0
        if self.best.is_single and gap <= NO_HEADROOM:
            return (
                f"No headroom: one device is within {gap:.1%} of the lower bound of "
                f"{milliseconds(self.lower_bound_s)} ms, which no placement can beat."
            )
        if self.best.is_single:
            return (
                "No headroom was found: no other placement is faster than one device by more than "
                f"noise (the lower bound leaves {gap:.0%})."
            )
        both = self.best.measurement is not None and single.measurement is not None
        seen = self.best.measurement
        how = self.clock if both else "predicted"
        if self.loaded and seen is not None and single.measurement is not None:
            by_wall = single.measurement.median_s / seen.median_s
            how += f" ({by_wall:.2f}x by the wall clock of a busy machine)"
        return f"{self.speed_up:.2f}x faster than {single.name.removeprefix('single ')}, {how}."

    @property
    def _against_unplaced(self) -> str:
        seen, unplaced = self.best.measurement, self.all_cores
        if seen is None or unplaced is None or not (seen.ok and unplaced.ok):
            return ""
        # OpenMP threads have slow phases, so the shortest steps decide.
        gain, by_median = unplaced.min_s / seen.min_s, unplaced.median_s / seen.median_s
        what = "not placing the model, with torch's threads on all cores"
        if self.loaded:  # the threads have wall times only, which mean little here
            return f"Whether {what}, is faster cannot be judged now: run again when it is quiet."
        if gain > 1 + SMALLEST_GAIN:
            return (
                f"The placement is {gain:.2f}x faster than {what}, by the shortest wall times "
                f"({by_median:.2f}x by their medians)."
            )
        if 1 / gain > 1 + SMALLEST_GAIN:
            return (
                f"{what.capitalize()}, is {1 / gain:.2f}x faster still by the shortest wall times "
                f"({1 / by_median:.2f}x by their medians)."
            )
        return f"The placement is as fast as {what}, by the shortest wall times."

    @property
    def _proof(self) -> str:
        if not self.solved:
            return ""
        shortest = min(self.rows, key=lambda row: row.predicted_s)
        told = f"{shortest.name}, {milliseconds(shortest.predicted_s)} ms"
        gap = 1 - ratio_of(self.lower_bound_s, shortest.predicted_s)
        if gap <= 0:
            return f"Proven optimal: no placement has a shorter predicted step than {told}."
        return (
            f"Not proven optimal: the solver stopped with a gap of {gap:.1%} between {told}, and "
            f"the lower bound of {milliseconds(self.lower_bound_s)} ms."
        )

    def _why_no_single(self) -> str:
        able = self.problem.allowed.all(axis=0)
        pinned_to = {name for names in self.problem.graph.allowed for name in names or ()}
        if able.any():
            which = "that the pins allow " if pinned_to else "that knows all ops "
            return (
                f"No single device {'' if able.all() else which}has room for the whole step; this "
                "placement makes it fit."
            )
        if pinned_to:
            names = " and ".join(name for name in self.problem.cluster.names if name in pinned_to)
            return f"No single device may run the whole step: ops are pinned to {names}."
        return "No single device has costs for all ops."

    @property
    def _how_busy(self) -> str:
        ran = [(row, m) for row in self.rows if (m := row.measurement) is not None and m.ok]
        times = float(np.median([seen.contention for _, seen in ran]))
        names = self.problem.cluster.names
        cores = ", ".join(
            f"{seen.contention:.3g} x on {names[row.placement.devices[0]]}"
            for row, seen in ran
            if row.is_single
        )
        return (
            f"This machine was busy while candidates ran: wall times are {times:.3g} x rebuilt ones"
            f"{f' ({cores} alone)' if cores else ''}, where up to {CONTENDED} x is quiet. They are "
            f"judged by times {REBUILT}; run again with --fresh when `placer doctor` says good."
        )

    @property
    def remarks(self) -> list[str]:
        """Return remarks that qualify the numbers, one sentence each."""
        found = [f"Nothing was measured: {self.trouble}"] if self.trouble else []
        phases = set(self.problem.graph.phase.tolist())
        if PHASES.index("backward") in phases and PHASES.index("optimizer") not in phases:
            found.append("No optimizer is in the step: neither its time nor its state is counted.")
        found += [f"{row.name} failed: {row.failure}" for row in self.rows if row.failure]
        if self.loaded:
            found.append(self._how_busy)
        if doubt := why_doubtful(self.problem.cluster):
            found.append(doubt)
        if self.extraction is not None:
            found += extraction_remarks(self.extraction)
        if self.stopped and self.measuring_s > 0 and self.best.measurement is None:
            found.append("Nothing was measured: it was stopped before the first complete round.")
        judged = [self.best] if self.single in (None, self.best) else [self.best, self.single]
        for row in judged:
            seen = row.measurement if row is not None else None
            if row is not None and seen is not None and seen.spread > NOISY:
                found.append(
                    f"The runs of {row.name} scatter by {seen.spread:.0%}: a quieter machine may "
                    "rank differently."
                )
        step_s = self.step_s(self.best)
        if self.best.measurement is not None:
            error = ratio_of(self.best.predicted_s, step_s)
            if abs(error - 1) > PREDICTION_ERROR:
                found.append(
                    f"The prediction for {self.best.name} is {error:.2f} of what was measured"
                    f"{f' ({REBUILT})' if self.loaded else ''}: the search was guided by a rough "
                    "model."
                )
            for name, size in self.best.measurement.peak_memory_bytes.items():
                thought = self.best.peak_memory_bytes.get(name, 0)
                if size > thought * (1 + PREDICTION_ERROR) + UNPREDICTED_BYTES:
                    found.append(
                        f"{self.best.name} took {size / 1e9:.3g} GB on {name}, "
                        f"{thought / 1e9:.3g} GB was predicted."
                    )
        single = self.single
        if single is not None and self.lower_bound_s > 0:
            possible = single.predicted_s / self.lower_bound_s
            if self.speed_up > possible * (1 + PREDICTION_ERROR):
                found.append(
                    f"More than {possible:.2f}x is not possible by the costs of the ops: something "
                    "disturbed the runs of one device. Measure again on a quieter machine."
                )
        return found


def extraction_remarks(extraction: Extraction) -> list[str]:
    """Return remarks on the extraction: fallbacks and limitations, one sentence each."""
    from graphs.extract.export import lstm_layers
    from graphs.extract.extraction import shown_lines

    found = [f"Not by {tried.extractor}: {tried.reason}" for tried in extraction.fell_back]
    if extraction.own_program is None:
        found.append(
            "This is a graph of modules, timed one by one. On cuda:N and cpu the model's own code "
            "runs it placed; for other devices there is no program that does, so the simulator's "
            "answer counts."
        )
    if extraction.step.training and (layers := lstm_layers(extraction.step)):
        found.append(
            f"LSTM layers ({shown_lines(layers)}) are traced cell by cell: bytes saved for "
            "backward and times may differ from those of the fused kernel that torch trains them "
            "with where nothing is placed."
        )
    if extraction.depends_on_data:
        found.append(
            "The ops were recorded on the example inputs, and the placement is for these: the "
            f"model reads values of tensors ({shown_lines(extraction.depends_on_data)}), so that "
            "other inputs may take another path."
        )
    return found


def judged_s(row: Row, loaded: bool) -> float:
    """Return the measured step time (CPU-clock time if loaded), else the predicted one."""
    seen = row.measurement
    return row.predicted_s if seen is None else seen.step_s(contended=loaded)


def choose(rows: Sequence[Row]) -> Row:
    """Return the best candidate: measured before predicted, and the simplest of those in a tie.

    A candidate that is slower than the best single device, or within noise of it, never wins.

    Raises:
        PlacementError: no candidate is feasible, or all failed when they were run.
    """
    seen = [row for row in rows if row.measurement is not None]
    if not seen:
        feasible = [row for row in rows if np.isfinite(row.predicted_s)]
        if not feasible:
            raise PlacementError(_why_none(rows))
        return min(feasible, key=lambda row: (row.predicted_s, row.simplicity))
    ran = [(row, m) for row in seen if (m := row.measurement) is not None and m.ok]
    if not ran:
        failures = dict.fromkeys(row.failure for row in seen)
        raise PlacementError("Every candidate failed when it was run: " + "; ".join(failures))
    loaded = contended([m for _, m in ran])

    def order(pair: tuple[Row, Measurement]) -> float:
        return judged_s(pair[0], loaded)

    fastest, best_runs = min(ran, key=order)
    equal = [(row, m) for row, m in ran if tied(m, best_runs, loaded=loaded)]
    single = min((pair for pair in ran if pair[0].is_single), key=order, default=None)
    if single is not None and single not in equal:
        equal = [
            (row, m)
            for row, m in equal
            if order((row, m)) < order(single) and not tied(m, single[1], loaded=loaded)
        ]
    if not equal:
        return single[0] if single is not None else fastest
    return min(equal, key=lambda pair: (pair[0].simplicity, order(pair)))[0]


def _why_none(rows: Sequence[Row]) -> str:
    if any(row.bound_s == np.inf for row in rows):
        return (
            "The model fits nowhere: the solver proved that no placement keeps to memory and "
            "links, even without activations. Add a device, or one with more memory."
        )
    short = [row for row in rows if row.missing_bytes]
    if not short:
        return (
            f"No placement that was found within the budget can run. {rows[0].name}: {rows[0].why}"
        )
    nearest = min(short, key=lambda row: row.missing_bytes)
    return (
        "No placement that was found within the budget keeps to memory. "
        f"{nearest.name} misses by least: {nearest.why} A longer --budget or --placer "
        "portfolio may find one that fits."
    )
