"""Results of a benchmark in one JSON file, part by part, so that a failed part loses no other.

A part has a name such as "translation: profile"; the text after the last colon is its kind.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from graphs.whole_file import write_whole
from placer.bench.environment import environment, plain


class Record:
    """Results of a benchmark; the file is rewritten after every part."""

    def __init__(self, out: Path | None, limit_s: float) -> None:
        self.out = out
        self.limit_s = limit_s
        self.began = time.perf_counter()
        self.data: dict[str, Any] = {"environment": environment(), "parts": {}}
        self.longest_s: dict[str, float] = {}  # by kind of part

    @property
    def left_s(self) -> float:
        """Return the seconds until the time limit."""
        return self.limit_s - (time.perf_counter() - self.began)

    def part(self, name: str, work: Callable[[dict[str, Any]], None]) -> None:
        """Run one part, which fills the dict it is given; report and record its failure.

        The part is skipped if the longest part of its kind so far took longer than the time left.
        """
        found: dict[str, Any] = {}
        self.data["parts"][name] = found
        kind = name.rpartition(": ")[2]
        if why := self._why_not(kind):
            found["skipped"] = why
            self.say(f"{name}: {why}")
            return
        self.say(f"{name} ...")
        start = time.perf_counter()
        try:
            work(found)
        except Exception as error:  # noqa: BLE001 - the other parts shall run whatever it is
            found["failure"] = f"{type(error).__name__}: {error}"[:2000]
            found["traceback"] = traceback.format_exc()[-4000:]
            self.say(f"{name} failed: {found['failure']}")
        found["part_s"] = time.perf_counter() - start
        self.longest_s[kind] = max(self.longest_s.get(kind, 0.0), found["part_s"])
        self.save()

    def _why_not(self, kind: str) -> str:
        left_s, longest_s = self.left_s, self.longest_s.get(kind, 0.0)
        if left_s <= 0:
            return f"the limit of {self.limit_s:.0f} s was reached"
        if longest_s > left_s:
            return (
                f"such a part took {longest_s:.0f} s, and {left_s:.0f} s of the limit of "
                f"{self.limit_s:.0f} s were left"
            )
        return ""

    def save(self) -> None:
        """Write the file, if there is one."""
        if self.out is not None:
            write_whole(self.out, json.dumps(plain(self.data), indent=1) + "\n")

    def say(self, text: str) -> None:
        """Print progress to standard error."""
        print(f"[{time.perf_counter() - self.began:6.1f} s] {text}", file=sys.stderr, flush=True)


def quartiles(seconds: Any) -> dict[str, Any]:
    """Return the median, the quartiles and all repeats of a time."""
    values = np.asarray(seconds, np.float64)
    if not len(values):
        return {"repeats_s": []}
    low, middle, high = np.percentile(values, [25, 50, 75]).tolist()
    return {"median_s": middle, "low_s": low, "high_s": high, "repeats_s": values.tolist()}


def arguments(description: str, limit_s: float) -> argparse.Namespace:
    """Parse the options of the benchmarks on torch devices."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the results go (JSON)")
    parser.add_argument(
        "--limit", type=float, default=limit_s, metavar="SECONDS", help=f"default: {limit_s:.0f}"
    )
    parser.add_argument(
        "--small", action="store_true", help="small models, as where there is no CUDA device"
    )
    return parser.parse_args()
