"""Results of a benchmark in one JSON file, part by part: one that fails loses no other."""

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
    """What a benchmark found; the file is written anew after every part."""

    def __init__(self, out: Path | None, limit_s: float) -> None:
        self.out = out
        self.limit_s = limit_s
        self.began = time.perf_counter()
        self.data: dict[str, Any] = {"environment": environment(), "parts": {}}

    @property
    def left_s(self) -> float:
        """Seconds until the time limit."""
        return self.limit_s - (time.perf_counter() - self.began)

    def part(self, name: str, work: Callable[[dict[str, Any]], None]) -> None:
        """Do one part, which fills the dict it is given; a failure is told and written down."""
        found: dict[str, Any] = {}
        self.data["parts"][name] = found
        if self.left_s <= 0:
            found["skipped"] = f"the limit of {self.limit_s:.0f} s was reached"
            self.say(f"{name}: {found['skipped']}")
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
        self.save()

    def save(self) -> None:
        """Write the file."""
        if self.out is not None:
            write_whole(self.out, json.dumps(plain(self.data), indent=1) + "\n")

    def say(self, text: str) -> None:
        """Tell people where it is."""
        print(f"[{time.perf_counter() - self.began:6.1f} s] {text}", file=sys.stderr, flush=True)


def quartiles(seconds: Any) -> dict[str, Any]:
    """Median, quartiles and all repeats of a time."""
    values = np.asarray(seconds, np.float64)
    if not len(values):
        return {"repeats_s": []}
    low, middle, high = np.percentile(values, [25, 50, 75]).tolist()
    return {"median_s": middle, "low_s": low, "high_s": high, "repeats_s": values.tolist()}


def arguments(description: str, limit_s: float) -> argparse.Namespace:
    """The options that benchmarks on torch devices have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the results go (JSON)")
    parser.add_argument(
        "--limit", type=float, default=limit_s, metavar="SECONDS", help=f"default: {limit_s:.0f}"
    )
    parser.add_argument(
        "--small", action="store_true", help="small models, as where there is no CUDA device"
    )
    return parser.parse_args()
