"""Repeated runs of placements: their statistics, and which differences are within noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from envs.hardware.cluster import Cluster

CONTENDED: Final = 1.15
"""Ratio of wall to CPU-clock time above which other processes used the cores."""
SMALLEST_DIFFERENCE: Final = 0.005
"""Relative difference below which two placements are a tie, however often they were run."""
ONE_ROUND_DIFFERENCE: Final = 0.25
"""Relative difference up to which two placements that ran once are a tie."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryExcess:
    """Memory that a step held on a device beyond the limit of that device."""

    device: str
    held_bytes: int
    limit_bytes: int

    def __str__(self) -> str:
        return (
            f"the worker of {self.device} held {self.held_bytes / 1e6:.1f} MB, "
            f"{(self.held_bytes - self.limit_bytes) / 1e6:.1f} MB more than its limit: raise the "
            "limit, or place fewer ops there"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Repeated runs of one placement. Arrays are in order of the rounds.

    ``cpu_clock_s`` is the CPU-clock time: the step time recomputed from CPU clocks, equal to
    ``wall_s`` where there are none. An ``exact`` time comes without noise: one round is enough.
    ``peak_memory_bytes`` holds the devices that report it, by name: for accelerators the memory in
    tensors, for workers what they have alone and what they touch of the shared memory (see
    :meth:`envs.executors.cores.pool.WorkerPool.peak_memory_bytes`). ``reserved_memory_bytes`` are
    the peaks of what allocators of accelerators reserved for it, with the gaps between tensors:
    limits are about these. ``overfull`` is set if the
    placement failed because memory did not suffice; ``excess`` is that of a worker beyond its
    limit. ``node`` names the node of a cluster where it ran, "" for this machine: measurements are
    only compared with those of the same node.
    """

    wall_s: NDArray[np.float64]
    cpu_clock_s: NDArray[np.float64]
    failure: str = ""
    peak_memory_bytes: Mapping[str, int] = field(default_factory=dict)
    reserved_memory_bytes: Mapping[str, int] = field(default_factory=dict)
    overfull: bool = False
    excess: MemoryExcess | None = None
    exact: bool = False
    node: str = ""

    @property
    def counts(self) -> bool:
        """Return whether it ran or failed; False if the measurement stopped before it."""
        return bool(self.failure) or len(self.wall_s) > 0

    @property
    def ok(self) -> bool:
        """Return whether it ran without failure."""
        return not self.failure and len(self.wall_s) > 0

    @property
    def median_s(self) -> float:
        """Median wall time of a step."""
        return float(np.median(self.wall_s)) if self.ok else np.inf

    @property
    def min_s(self) -> float:
        """Shortest wall time."""
        return float(self.wall_s.min()) if self.ok else np.inf

    @property
    def spread(self) -> float:
        """Interquartile range, relative to the median."""
        if not self.ok:
            return np.nan
        low, high = np.percentile(self.wall_s, [25, 75])
        return float(high - low) / self.median_s

    @property
    def cpu_clock_median_s(self) -> float:
        """Median CPU-clock time of a step."""
        return float(np.median(self.cpu_clock_s)) if self.ok else np.inf

    @property
    def contention(self) -> float:
        """Ratio of wall time to CPU-clock time."""
        return self.median_s / self.cpu_clock_median_s if self.ok else np.nan

    @property
    def has_cpu_clock(self) -> bool:
        """Return whether CPU clocks measured another step time than the wall clock."""
        return self.ok and not np.array_equal(self.cpu_clock_s, self.wall_s)

    def joined(self, other: Measurement) -> Measurement:
        """Return the rounds of both, of the same placement; a failure of either is one of both."""
        if self.failure or other.failure:
            return self if self.failure else other
        return replace(
            self,
            wall_s=np.concatenate((self.wall_s, other.wall_s)),
            cpu_clock_s=np.concatenate((self.cpu_clock_s, other.cpu_clock_s)),
            peak_memory_bytes=larger(self.peak_memory_bytes, other.peak_memory_bytes),
            reserved_memory_bytes=larger(self.reserved_memory_bytes, other.reserved_memory_bytes),
        )

    def step_s(self, *, contended: bool = False) -> float:
        """Return the step time to rank by: wall time, or CPU-clock time under contention."""
        return self.cpu_clock_median_s if contended else self.median_s


def larger(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """Return the larger of two sizes by name; names may lack in either."""
    return {name: max(one.get(name, 0), other.get(name, 0)) for name in {**one, **other}}


def contended(measurements: Sequence[Measurement]) -> bool:
    """Return whether other processes used the cores during these measurements.

    Only those with CPU-clock times can tell.
    """
    ratios = [m.contention for m in measurements if m.has_cpu_clock]
    return bool(ratios) and float(np.median(ratios)) > CONTENDED


def tied(a: Measurement, b: Measurement, *, contended: bool = False) -> bool:
    """Return whether two placements, run in the same rounds, differ by no more than noise.

    The rounds are paired: with r the logarithms of the time ratios, the placements differ if
    ``|median(r)|`` exceeds both the smallest difference and two standard errors of the median,
    1.253 * 1.4826 * MAD(r) / sqrt(rounds). A single round shows no noise: there the difference has
    to be large.
    """
    assert a.node == b.node, f"runs of {a.node} are not compared with those of {b.node}"
    if not (a.ok and b.ok):
        return a.ok == b.ok
    ratio = np.log(a.cpu_clock_s / b.cpu_clock_s) if contended else np.log(a.wall_s / b.wall_s)
    middle = float(np.median(ratio))
    if min(len(a.wall_s), len(b.wall_s)) == 1 and not (a.exact and b.exact):
        return bool(abs(middle) <= np.log1p(ONE_ROUND_DIFFERENCE))
    error = 1.253 * 1.4826 * float(np.median(np.abs(ratio - middle))) / np.sqrt(len(ratio))
    return bool(abs(middle) <= max(SMALLEST_DIFFERENCE, 2 * error))


def contention_warning(cluster: Cluster) -> str:
    """Return a warning if device speeds were measured under contention, or "" if not."""
    ratios = ", ".join(
        f"{device.name} {device.contention:.3g} x"
        for device in cluster.devices
        if device.contention > CONTENDED
    )
    if not ratios:
        return ""
    return (
        "Speeds of devices and links were measured while others used the cores (wall over CPU time "
        f"of {ratios}, where up to {CONTENDED} x is quiet): links may look much slower than they "
        "are. They count for an hour; run again on a quiet machine."
    )


def noise(measurement: Measurement) -> dict[str, float]:
    """Return the parts of a result that describe its noise."""
    return {
        "median_s": measurement.median_s,
        "min_s": measurement.min_s,
        "spread": measurement.spread,
        "cpu_clock_s": measurement.cpu_clock_median_s,
        "contention": measurement.contention,
    }
