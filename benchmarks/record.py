"""Results of benchmarks in one JSON file, part by part, so that a failed part loses no other.

A part has a name such as "translation: profile"; the text after the last colon is its kind.
"""

from __future__ import annotations

import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from benchmarks.environment import environment, machine_name
from benchmarks.tables import Table
from graphs.files import write_whole

T = TypeVar("T")
Part: TypeAlias = Callable[[dict[str, Any]], Table | None]
"""Part of a benchmark: stores its results in the dict and returns a table of them."""


@dataclass(frozen=True, slots=True)
class Effort:
    """The amount of measuring: quick, normal or full."""

    level: Literal["quick", "normal", "full"] = "normal"
    seeds: int | None = None  # instead of each benchmark's own number

    def pick(self, *, quick: T, normal: T, full: T) -> T:
        """Return the value for this level."""
        return {"quick": quick, "normal": normal, "full": full}[self.level]

    def seed_count(self, *, quick: int, normal: int, full: int) -> int:
        """Return the number of seeds: the one asked for, or that of this level."""
        return self.seeds or self.pick(quick=quick, normal=normal, full=full)


class Record:
    """Results of a run; the file is rewritten after every part.

    ``out`` may be a folder; the file in it is named after the day and the machine. Only parts of
    ``kinds`` are run, if any are given.
    """

    def __init__(
        self,
        out: Path | None = None,
        limit_s: float = math.inf,
        *,
        kinds: Collection[str] = (),
    ) -> None:
        self.kinds = kinds
        self.limit_s = limit_s
        self.began = time.perf_counter()
        self.data: dict[str, Any] = {"environment": environment(), "parts": {}}
        if out is not None and out.is_dir():
            out /= f"{date.today().isoformat()}-{machine_name(self.data['environment'])}.json"
        self.out = out
        self.longest_s: dict[str, float] = {}  # by kind of part

    @property
    def left_s(self) -> float:
        """Return the seconds until the time limit."""
        return self.limit_s - (time.perf_counter() - self.began)

    @property
    def failed(self) -> list[str]:
        """Return the names of the parts that failed."""
        return [name for name, part in self.data["parts"].items() if "failure" in part]

    def part(self, name: str, work: Part, *, expected_s: float = 0.0) -> Table | None:
        """Run one part and return its table; report and record its failure.

        The part is skipped if it is expected to take longer than the time left, or the longest part
        of its kind so far did.
        """
        kind = name.rpartition(": ")[2]
        if self.kinds and kind not in self.kinds:
            return None
        found: dict[str, Any] = {}
        self.data["parts"][name] = found
        if why := self._why_not(kind, expected_s):
            found["skipped"] = why
            self.say(f"{name}: {why}")
            return None
        self.say(f"{name} ...")
        start, table = time.perf_counter(), None
        try:
            table = work(found)
        except Exception as error:  # noqa: BLE001 - the other parts shall run whatever it is
            found["failure"] = f"{type(error).__name__}: {error}"[:2000]
            found["traceback"] = traceback.format_exc()[-4000:]
            self.say(f"{name} failed: {found['failure']}")
        found["part_s"] = time.perf_counter() - start
        self.longest_s[kind] = max(self.longest_s.get(kind, 0.0), found["part_s"])
        self.save()
        return table

    def _why_not(self, kind: str, expected_s: float) -> str:
        left_s, longest_s = self.left_s, max(self.longest_s.get(kind, 0.0), expected_s)
        if left_s <= 0:
            return f"the limit of {self.limit_s:.0f} s was reached"
        if longest_s > left_s:
            return (
                f"such a part takes {longest_s:.0f} s, and {left_s:.0f} s of the limit of "
                f"{self.limit_s:.0f} s were left"
            )
        return ""

    def save(self) -> None:
        """Write the file, if there is one; values that JSON does not know as their text."""
        if self.out is not None:
            write_whole(self.out, json.dumps(plain(self.data), indent=1, default=str) + "\n")

    def say(self, text: str) -> None:
        """Print progress to standard error."""
        print(f"[{time.perf_counter() - self.began:6.1f} s] {text}", file=sys.stderr, flush=True)


def plain(value: Any) -> Any:
    """Return the value as JSON knows it, with None for what is no finite number."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def quartiles(seconds: Any) -> dict[str, Any]:
    """Return the median, the quartiles and all repeats of a time."""
    values = np.asarray(seconds, np.float64)
    if not len(values):
        return {"repeats_s": []}
    low, middle, high = np.percentile(values, [25, 50, 75]).tolist()
    return {"median_s": middle, "low_s": low, "high_s": high, "repeats_s": values.tolist()}


def seconds(
    work: Callable[[], object],
    repeats: int = 9,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Return the sorted times of a few runs."""
    times = []
    for _ in range(repeats):
        start = clock()
        work()
        times.append(clock() - start)
    return sorted(times)
