"""The result of an optimization: the placement, all candidates, and how sure the gain is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from envs.hardware.units import milliseconds, ratio_of
from envs.measurement import Measurement, contention_warning
from envs.placement import Placement
from envs.problem import Problem
from graphs.text import html_table
from placer.choose import best_single_device, runs_contended
from placer.messages import remarks, verdicts
from placer.search.candidate import Candidate
from placer.search.request import SearchTrace

if TYPE_CHECKING:
    from graphs.extract import Extraction

MOST_SENTENCES: Final = 3
"""Maximum number of sentences after a table of candidates, those of the verdict included."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Result:
    """The result of an optimization: the chosen placement and all candidates.

    ``placement`` is that of ``best``, the chosen candidate, with predicted and measured times
    recorded, and ``problem`` the problem that it solves: where the unplaced model won, that of one
    device. ``lower_bound_s`` is a lower bound of the objective over all placements.
    """

    placement: Placement
    problem: Problem
    candidates: tuple[Candidate, ...]
    best: Candidate
    lower_bound_s: float
    search_s: float
    stopped: bool  # the user stopped it early
    extraction: Extraction | None = None
    cost_source: Mapping[str, str] = field(default_factory=dict)  # {device kind: source}
    search_trace: SearchTrace = field(default_factory=SearchTrace)
    trouble: str = ""  # why nothing could be run
    measuring_s: float = 0.0  # time spent on running candidates
    mispredicted: Candidate | None = None  # for which costs were fitted
    unconfirmed: bool = False  # few rounds decided, for want of time
    limits: Mapping[str, int] = field(default_factory=dict)  # {device: bytes} of steps that are run

    def __str__(self) -> str:
        """Return the chosen candidate and the verdict."""
        return verdicts.headline(self.best, self.verdict)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self}>"

    def _repr_html_(self) -> str:
        def ms(seconds: float) -> str:
            return milliseconds(seconds) if np.isfinite(seconds) else ""

        rows = (
            (
                f"{'> ' if each is self.best else ''}{each.name}",
                ms(each.predicted_s),
                ms(self.step_s(each)) if each.measurement is not None else "",
                f"{ratio:.2f}x" if np.isfinite(ratio := self.speedup_of(each)) else each.why,
            )
            for each in self.candidates
        )
        columns = ("candidate", "predicted ms", "measured ms", "speed-up")
        return html_table(str(self), columns, rows)

    def device_of(self, name: str) -> str:
        """Return the device of an op or module; see :meth:`Placement.device_of`."""
        return self.placement.device_of(name)

    def devices_of(self, module: str) -> dict[str, int]:
        """Return {device: number of ops} for a module."""
        return self.placement.devices_of(module)

    def save(self, path: str | Path) -> None:
        """Write the placement as JSON."""
        self.placement.save(Path(path))

    def report(self, path: str | Path) -> None:
        """Write the report, one HTML page.

        Raises:
            ValueError: the placement cannot run, so there is no step to show.
            OSError: the file cannot be written.
        """
        html = import_module("placer.report.html")  # by name: reports are a layer above results
        html.write_report(html.report_data(self), Path(path))

    @property
    def contended(self) -> bool:
        """Return whether the machine was busy during the runs; CPU-clock times count then."""
        return runs_contended(self.candidates)

    @property
    def single(self) -> Candidate | None:
        """Return the best candidate on one device, measured ones first; None if none can run.

        It may be the unplaced model on that device.
        """
        return best_single_device(self.candidates)

    @property
    def unplaced(self) -> Candidate | None:
        """Return the fastest unplaced model that was run, None if none was."""
        busy = self.contended
        return min(
            (each for each in self.candidates if each.is_unplaced and each.measurement),
            key=lambda each: (
                each.eliminated,
                not each.is_comparable(contended=busy),
                each.ranking_s(contended=busy),
            ),
            default=None,
        )

    def step_s(self, candidate: Candidate) -> float:
        """Return the time that ranks a candidate: its measured step time or the predicted one."""
        return candidate.ranking_s(contended=self.contended)

    def speedup_of(self, candidate: Candidate) -> float:
        """Return the best single device's step time over this candidate's; nan if unknown.

        Both are measured if both were run in the rounds that decide, else both are predicted.
        """
        single = self.single
        if single is None or not candidate.can_run:
            return np.nan
        if not candidate.is_comparable(contended=self.contended):  # by another clock
            return np.nan
        ran = candidate.measurement is not None and not candidate.eliminated
        if single.measurement is not None and ran:
            return ratio_of(self.step_s(single), self.step_s(candidate))
        return ratio_of(single.predicted_s, candidate.predicted_s)

    @property
    def speedup(self) -> float:
        """Return the speed-up of the best candidate over the best single device; nan if unknown."""
        return self.speedup_of(self.best)

    @property
    def verdict(self) -> str:
        """Return sentences on the gain or its absence, the unplaced baseline and what is proved."""
        return " ".join(self._verdict)

    @property
    def _verdict(self) -> list[str]:
        best, single, contended = self.best, self.single, self.contended
        if not np.isfinite(best.predicted_s):
            return [verdicts.does_not_fit(best)]
        placed = [each for each in self.candidates if not each.is_unplaced]
        if not placed:
            others = [each for each in self.candidates if each is not best]
            sentences = [verdicts.only_unplaced(best, others, contended=contended)]
            return [*sentences, *self._undecided_threads, *self._refusal]
        contended = self._by_cpu_clock
        baseline = single
        if best.is_unplaced:
            where = best.placement.used_devices
            # On the same device a program leaves the model unplaced, too.
            elsewhere = [each for each in placed if each.placement.used_devices != where]
            baseline = _fastest(elsewhere, contended=contended)
        if contended and (sentence := verdicts.undecided(best, baseline)):
            return [sentence]
        if best.is_unplaced:
            left = verdicts.leave_unplaced(
                best, self._fastest_placement, contended=contended, is_short=self.unconfirmed
            )
            return [left, *self._undecided_threads]
        against = self._undecided_threads
        if not against and self.unplaced is not single:
            against = [verdicts.against_unplaced(best, self.unplaced, contended=contended)]
        sentences = [
            verdicts.no_single_device(placed, self.problem)
            if single is None
            else verdicts.gain(best, single, self.lower_bound_s, contended=contended),
            *against,
            verdicts.proof(placed, self.lower_bound_s),
        ]
        return [sentence for sentence in sentences if sentence]

    @property
    def _by_cpu_clock(self) -> bool:
        """Return whether CPU-clock times compare the best; threads of one process have none."""
        return self.contended and self.best.is_comparable(contended=True)

    @property
    def _fastest_placement(self) -> Candidate | None:
        placed = [each for each in self.candidates if not each.is_unplaced]
        return _fastest(placed, contended=self._by_cpu_clock)

    @property
    def _undecided_threads(self) -> list[str]:
        """Return that the model with torch's threads ran beside the best, but tells nothing."""
        contended = self._by_cpu_clock
        return [
            verdicts.against_unplaced(self.best, each, contended=contended)
            for each in self.candidates
            if each.is_on_threads and each.measurement is not None
            if each.failure or not each.is_comparable(contended=contended)
        ]

    @property
    def _refusal(self) -> list[str]:
        """Return why no op could be placed, where only the unplaced model was run."""
        if self.extraction is None or not all(each.is_unplaced for each in self.candidates):
            return []
        return list(filter(None, [remarks.core_refusal_in_short(self.extraction)]))

    @property
    def remarks(self) -> list[str]:
        """Return remarks that qualify the numbers, the most important first."""
        best, single, contended = self.best, self.single, self.contended
        was_run = best.measurement is not None
        lines = [
            remarks.not_measured(
                self.trouble, stopped=self.stopped and self.measuring_s > 0 and not was_run
            )
        ]
        if self.extraction is not None:
            lines.append(remarks.whole_modules(self.extraction))
        is_said = verdicts.is_undecided(best, self._fastest_placement, contended=self._by_cpu_clock)
        if self.unconfirmed and not is_said:
            lines.append(remarks.few_rounds(best))
        lines.append(remarks.busy_machine(self.candidates, contended=contended))
        if single is not None and not (best.is_unplaced or single.is_unplaced):
            lines.append(remarks.impossible_gain(self.speedup, single, self.lower_bound_s))
        if not is_said:
            lines.append(remarks.tie(best, self.candidates, contended=contended))
        lines.append(remarks.scatter(best))
        if single is not None and single is not best:
            lines.append(remarks.scatter(single))
        if self.mispredicted is not None:
            lines.append(remarks.fitted_costs(self.mispredicted))
        if was_run:
            if not best.is_unplaced:  # its costs are of no use to a search
                lines.append(remarks.prediction_error(best, contended=contended))
            if self.extraction is not None:
                lines.append(remarks.no_hand_over(self.problem, self.placement))
        lines += remarks.unpredicted_memory(best)
        lines += remarks.failures(self.candidates)
        if self.extraction is not None:
            of_extraction = remarks.extraction_remarks(self.extraction, refusal=not self._refusal)
            lines += [line for line in of_extraction if line not in lines]
        lines += [remarks.no_optimizer(self.problem), contention_warning(self.problem.cluster)]
        return [line for line in lines if line]

    @property
    def main_remarks(self) -> list[str]:
        """Return the most important remarks, few enough to read with the verdict."""
        said = sum(map(verdicts.sentence_count, self._verdict))
        return self.remarks[: max(MOST_SENTENCES - said, 0)]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data for JSON; units are in the names, None is unknown."""
        data = self.placement.to_dict()
        times = data["measured"] or data["predicted"] or {}  # files may lack both
        return {
            "best": self.best.name,
            "objective": data["objective"],
            "micro_batches": data["micro_batches"],
            "in_flight": self.placement.in_flight,
            "step_s": times.get("step_s"),
            "predicted": data["predicted"],
            "measured": data["measured"],
            "speed_up": finite(self.speedup),
            "lower_bound_s": self.lower_bound_s,
            "verdict": self.verdict,
            "remarks": self.remarks,
            "cost_source": dict(self.cost_source),
            "search_s": self.search_s,
            "measuring_s": self.measuring_s,
            "seed": self.placement.made_by.seed,
            "stopped": self.stopped,
            **extraction_to_dict(self.extraction),
            "candidates": [self._candidate_to_dict(each) for each in self.candidates],
        }

    def _candidate_to_dict(self, candidate: Candidate) -> dict[str, Any]:
        runs, measured = candidate.measurement, None
        if runs is not None and runs.ok:
            measured = {
                **_clocks(runs),
                "spread": runs.spread,
                **_peaks(runs),
                **({"node": runs.node} if runs.node else {}),
            }
        step_s = candidate.times_s.get("step_s", candidate.predicted_s)
        return {
            "name": candidate.name,
            "predicted_step_s": step_s if np.isfinite(candidate.predicted_s) else None,
            "peak_memory_bytes": dict(candidate.peak_memory_bytes),
            "measured": measured,
            "speed_up": finite(self.speedup_of(candidate)),
            "chosen": candidate is self.best,
            "eliminated": candidate.eliminated,
            "why": candidate.why,
        }

    def with_times(self) -> Result:
        """Return the result with the best candidate's times recorded in its placement."""
        best = self.best
        predicted = {
            "step_s": best.predicted_s,
            **best.times_s,
            "peak_memory_bytes": dict(best.peak_memory_bytes),
            "lower_bound_s": self.lower_bound_s,
        }
        placement = replace(self.placement, predicted=predicted, measured=self._measured())
        return replace(self, placement=placement)

    def _measured(self) -> dict[str, Any] | None:
        runs, single, unplaced = self.best.measurement, self.single, self.unplaced
        if runs is None:
            return None
        measured: dict[str, Any] = {
            "step_s": self.step_s(self.best),
            "clock": "cpu" if self.contended else "wall",
            **_clocks(runs),
            "spread": runs.spread,
            "contention": runs.contention,
            "rounds": len(runs.wall_s),
        }
        if runs.peak_memory_bytes:
            measured |= _peaks(runs)
        if single is not None and single.measurement is not None:
            measured["single_device_step_s"] = self.step_s(single)
            measured |= _clocks(single.measurement, "single_device_")
        if unplaced is not None and unplaced.measurement is not None and unplaced.can_run:
            measured |= _clocks(unplaced.measurement, "unplaced_")
            del measured["unplaced_cpu_clock_s"]  # torch's threads have no common CPU clock
        return measured


def extraction_to_dict(extraction: Extraction | None) -> dict[str, Any]:
    """Return how a graph was extracted as plain data for JSON; empty for a graph file."""
    if extraction is None:
        return {}
    return {
        "extractor": extraction.extractor,
        "fell_back": [
            {"extractor": tried.extractor, "reason": tried.reason} for tried in extraction.fell_back
        ],
        "depends_on_data": list(extraction.depends_on_data),
        "unchecked": list(extraction.unchecked),
    }


def _fastest(candidates: Sequence[Candidate], *, contended: bool) -> Candidate | None:
    """Return the fastest candidate that was run, and was not eliminated."""
    ran = [
        each
        for each in candidates
        if each.measurement is not None and each.can_run and not each.eliminated
    ]
    return min(ran, key=lambda each: each.ranking_s(contended=contended), default=None)


def _clocks(runs: Measurement, whose: str = "") -> dict[str, float]:
    return {
        f"{whose}wall_median_s": runs.median_s,
        f"{whose}wall_min_s": runs.min_s,
        f"{whose}cpu_clock_s": runs.cpu_clock_median_s,
    }


def _peaks(runs: Measurement) -> dict[str, dict[str, int]]:
    """Return peaks of memory by device; with the gaps between tensors, where there are any."""
    peaks = {"peak_memory_bytes": dict(runs.peak_memory_bytes)}
    if runs.reserved_memory_bytes:
        peaks["reserved_memory_bytes"] = dict(runs.reserved_memory_bytes)
    return peaks


def finite(value: float) -> float | None:
    """Return a number for JSON, None for one that is not finite."""
    return float(value) if np.isfinite(value) else None
