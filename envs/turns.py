"""The turns of a placement that is measured in this process."""

from __future__ import annotations

from typing import Any

import numpy as np

from envs.measurement import Measurement


class Turns:
    """Results of the turns of one placement, or the reason why there are none."""

    def __init__(self, failure: str, *, overfull: bool = False) -> None:
        self.failure = failure
        self.overfull = overfull
        self.wall_s: list[float] = []
        self.peak_bytes: dict[str, int] = {}

    def keep_peaks(self, peaks: dict[str, int]) -> None:
        """Merge the peak memory of one turn, {device name: bytes}, keeping the maximum."""
        for name, size in peaks.items():
            self.peak_bytes[name] = max(size, self.peak_bytes.get(name, 0))

    def measurement(self, rounds: int) -> Measurement:
        """Return the measurement of the first ``rounds`` turns."""
        wall_s: Any = np.array(self.wall_s[:rounds])
        return Measurement(
            wall_s=wall_s,
            rebuilt_s=wall_s,
            failure=self.failure,
            peak_memory_bytes=dict(self.peak_bytes),
            overfull=self.overfull,
        )
