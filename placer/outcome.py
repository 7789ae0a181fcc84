"""What an optimization found: the placement, what it was compared with, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from envs.measured import Measurement, contended, tied
from envs.placement import Placement
from envs.problem import Problem
from graphs.extract import Extraction

NO_HEADROOM: Final = 0.02
"""One device this close to the lower bound leaves nothing to win."""
SIMPLEST_FIRST: Final = (
    "single",
    "layer split",
    "round robin",
    "HEFT",
    "ETF",
    "policy",
    "evolution",
    "annealing",
)


class PlacementError(RuntimeError):
    """No placement can be given; the message says what stands in the way."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """One candidate: its placement, predicted step and memory, and measurement if it was run."""

    name: str
    placement: Placement
    predicted_s: float  # inf where it is not feasible
    peak_memory_bytes: dict[str, int]
    why: str = ""  # it is not feasible
    measurement: Measurement | None = None

    @property
    def is_single(self) -> bool:
        """Whether all ops are on one device."""
        return len(set(self.placement.devices)) == 1

    @property
    def simplicity(self) -> int:
        """Lower is simpler: everything on one device, then fixed rules, then search."""
        if self.is_single:
            return 0
        kinds = [i for i, name in enumerate(SIMPLEST_FIRST) if self.name.startswith(name)]
        return kinds[0] if kinds else len(SIMPLEST_FIRST)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Optimization:
    """The result of the main job: a placement map that knows how it came about.

    ``rows`` are all candidates, ``best`` the chosen one; ``placement`` is its placement with
    predicted and measured times filled in.
    """

    placement: Placement
    problem: Problem
    rows: tuple[Row, ...]
    best: Row
    lower_bound_s: float
    search_s: float
    stopped: bool  # the user stopped it early
    extraction: Extraction | None = None

    def device_of(self, name: str) -> str:
        """The device of an op, or the home of a module; see :meth:`Placement.device_of`."""
        return self.placement.device_of(name)

    def devices_of(self, module: str) -> dict[str, int]:
        """How many ops of a module run on each device."""
        return self.placement.devices_of(module)

    def save(self, path: str | Path) -> None:
        """Write the placement as JSON."""
        self.placement.save(Path(path))

    @property
    def loaded(self) -> bool:
        """Whether the machine was loaded while candidates ran: rebuilt times count then."""
        return contended([row.measurement for row in self.rows if row.measurement is not None])

    @property
    def single(self) -> Row | None:
        """The best single device: measured if one was, else predicted; None if none is feasible."""
        singles = [row for row in self.rows if row.is_single and np.isfinite(row.predicted_s)]
        return _fastest(singles, self.loaded)

    def step_s(self, row: Row) -> float:
        """What a candidate is judged by: its measured step, else the predicted one."""
        return judged_s(row, self.loaded)

    @property
    def speed_up(self) -> float:
        """Step time of the best single device over that of the best placement."""
        single = self.single
        return np.nan if single is None else self.step_s(single) / self.step_s(self.best)

    @property
    def verdict(self) -> str:
        """One sentence for people: how much was won, or why there was nothing to win."""
        single = self.single
        if single is None:
            return "No single device has room for the whole step; this placement makes it fit."
        gap = single.predicted_s / self.lower_bound_s - 1
        if self.best.is_single and gap <= NO_HEADROOM:
            return (
                f"No headroom: one device is within {gap:.1%} of the lower bound of "
                f"{self.lower_bound_s * 1e3:.3g} ms, which no placement can beat."
            )
        if self.best.is_single:
            return (
                "No headroom was found: no other placement is faster than one device by more than "
                f"noise (the lower bound leaves {gap:.0%})."
            )
        how = "measured" if self.best.measurement is not None else "predicted"
        return f"{self.speed_up:.2f}x faster than {single.name.removeprefix('single ')}, {how}."


def judged_s(row: Row, loaded: bool) -> float:
    """Measured step of a candidate (rebuilt on a loaded machine), else the predicted one."""
    seen = row.measurement
    return row.predicted_s if seen is None else seen.step_s(contended=loaded)


def choose(rows: Sequence[Row]) -> Row:
    """The best candidate: measured before predicted, and of those in a tie the simplest.

    Raises:
        PlacementError: no candidate is feasible, or every one failed when it was run.
    """
    seen = [row for row in rows if row.measurement is not None]
    if not seen:
        feasible = [row for row in rows if np.isfinite(row.predicted_s)]
        if not feasible:
            raise PlacementError(f"The model fits nowhere: {rows[0].why}")
        return min(feasible, key=lambda row: (row.predicted_s, row.simplicity))
    ran = [(row, m) for row in seen if (m := row.measurement) is not None and m.ok]
    if not ran:
        failures = {row.measurement.failure for row in seen if row.measurement is not None}
        raise PlacementError("Every candidate failed when it was run: " + "; ".join(failures))
    loaded = contended([m for _, m in ran])
    fastest, fastest_runs = min(ran, key=lambda pair: pair[1].step_s(contended=loaded))
    equal = [row for row, m in ran if tied(m, fastest_runs, loaded=loaded)]
    ceiling = min((judged_s(row, loaded) for row, _ in ran if row.is_single), default=np.inf)
    simple = [row for row in equal if judged_s(row, loaded) <= ceiling]
    return min([*simple, fastest], key=lambda row: (row.simplicity, judged_s(row, loaded)))


def _fastest(rows: Sequence[Row], loaded: bool) -> Row | None:
    measured = [row for row in rows if row.measurement is not None and row.measurement.ok]
    return min(measured or rows, key=lambda row: judged_s(row, loaded), default=None)
