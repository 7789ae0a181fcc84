"""Progress of a job: bars on a terminal, plain lines elsewhere, nothing for a library."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Final, Protocol, TextIO

if TYPE_CHECKING:
    from rich.progress import TaskID

SECONDS_BETWEEN_FRAMES: Final = 0.1
SECONDS_BETWEEN_TICKS: Final = 0.25
SECONDS_BETWEEN_LINES: Final = 10.0
NARROWEST_TITLE: Final = 24
BESIDE_TITLE: Final = 62
"""Columns of a terminal that bar, clock, time left and text need."""
SHORTEST_STEP_S: Final = 1.0
STEPS_KEPT: Final = 60
FEWEST_STEPS: Final = 2
SHORTEST_SHARE: Final = 0.002
"""Share of a stage that must be done before its remaining time is estimated."""


class Progress(Protocol):
    """Receives the progress of a job."""

    def stage(self, title: str) -> None:
        """Begin a new stage; the previous one is complete."""
        ...

    def advance(self, share: float, text: str = "") -> None:
        """Report the share of the stage that is done, 0 .. 1; ``text`` says what is going on."""
        ...

    def remark(self, text: str) -> None:
        """Show a sentence that matters before the job ends, if it is not empty."""
        ...


def counter(progress: Progress) -> Callable[[int, int], None]:
    """Return a callback of (done, total) that advances the stage."""
    return lambda done, total: progress.advance(done / total)


class Pace:
    """Estimates the remaining time of a stage, from its first report on, as a job may be resumed.

    The estimate uses the faster half of the progress, so that a single stall, such as a worker
    that does not answer for a minute, does not count.
    """

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None
        self._steps: deque[tuple[float, float]] = deque(maxlen=STEPS_KEPT)  # seconds, shares

    def left(self, share: float) -> str:
        """Return the remaining time at a share, as text; "" if too little is known."""
        if not 0.0 < share < 1.0:
            return ""
        now = time.perf_counter()
        if self._last is None:
            self._last = now, share
        spent_s, done = now - self._last[0], share - self._last[1]
        if spent_s >= SHORTEST_STEP_S and done > 0.0:
            self._last = now, share
            self._steps.append((spent_s, done))
        if len(self._steps) < FEWEST_STEPS or sum(done for _, done in self._steps) < SHORTEST_SHARE:
            return ""
        return time_left(self._usual_s() * (1.0 - share))

    def _usual_s(self) -> float:
        """Return the seconds of the whole stage at the pace of the faster half of the progress."""
        half = sum(done for _, done in self._steps) / 2
        for spent_s, done in sorted(self._steps, key=lambda step: step[0] / step[1]):
            half -= done
            if half <= 1e-9:  # shares are rounded
                return spent_s / done
        raise AssertionError("there are steps")


class Silent:
    """Shows no progress."""

    def stage(self, title: str) -> None:
        """Do nothing."""

    def advance(self, share: float, text: str = "") -> None:
        """Do nothing."""

    def remark(self, text: str) -> None:
        """Do nothing."""


class TimedStages:
    """Passes progress on, and adds up the seconds of every stage."""

    def __init__(self, progress: Progress) -> None:
        self.seconds: dict[str, float] = {}
        self._progress = progress
        self._title, self._began = "", 0.0

    def __enter__(self) -> TimedStages:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def stage(self, title: str) -> None:
        """End the previous stage and begin a new one."""
        self._end()
        self._title, self._began = title, time.perf_counter()
        self._progress.stage(title)

    def advance(self, share: float, text: str = "") -> None:
        """Pass it on."""
        self._progress.advance(share, text)

    def remark(self, text: str) -> None:
        """Pass it on."""
        self._progress.remark(text)

    def _end(self) -> None:
        if self._title:
            passed_s = time.perf_counter() - self._began
            self.seconds[self._title] = self.seconds.get(self._title, 0.0) + passed_s


class PlainLines:
    """Prints a line to stderr when a stage begins and ends, and some in between."""

    def __init__(self) -> None:
        self._title = ""
        self._began = self._printed = 0.0
        self._pace = Pace()

    def __enter__(self) -> PlainLines:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._complete()

    def stage(self, title: str) -> None:
        """Print the end of the previous stage and the new title."""
        self._complete()
        self._title, self._began = title, time.perf_counter()
        self._printed, self._pace = self._began, Pace()
        print(f"{title} ...", file=sys.stderr, flush=True)

    def advance(self, share: float, text: str = "") -> None:
        """Print the share, at most every ten seconds."""
        left = self._pace.left(share)
        if time.perf_counter() - self._printed >= SECONDS_BETWEEN_LINES:
            self._printed = time.perf_counter()
            line = ", ".join(part for part in (f"{share:.0%}", left, text) if part)
            print(f"{self._title}: {line}", file=sys.stderr, flush=True)

    def remark(self, text: str) -> None:
        """Print it on a line of its own."""
        if text:
            print(text, file=sys.stderr, flush=True)

    def _complete(self) -> None:
        if self._title:
            seconds = time.perf_counter() - self._began
            print(f"{self._title}: {seconds:.1f} s", file=sys.stderr, flush=True)


class Bars:
    """Shows one bar per stage on a terminal.

    Until the first advance of a stage, a thread keeps the clock running. After that the bar is
    drawn only on reports: drawing in a thread would disturb measurements.
    """

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column

        console = Console(stderr=True)
        title = Column(no_wrap=True, max_width=max(NARROWEST_TITLE, console.width - BESIDE_TITLE))
        self._bars = RichProgress(
            TextColumn("{task.description:<24}", markup=False, table_column=title),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            TextColumn("{task.fields[text]}", style="dim", markup=False),
            console=console,
            auto_refresh=False,
        )
        self._task: TaskID | None = None
        self._drawn = 0.0
        self._pace = Pace()
        self._ticking: threading.Event | None = None

    def __enter__(self) -> Bars:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._complete()
        self._stop_ticking()
        self._bars.stop()

    def stage(self, title: str) -> None:
        """Complete the previous bar and add one."""
        self._complete()
        self._task, self._pace = self._bars.add_task(title, total=None, text=""), Pace()
        self._bars.refresh()
        self._ticking = threading.Event()
        threading.Thread(target=self._tick, args=(self._ticking,), daemon=True).start()

    def advance(self, share: float, text: str = "") -> None:
        """Move the bar, at most ten times a second."""
        self._stop_ticking()
        left = self._pace.left(share)
        if self._task is None or time.perf_counter() - self._drawn < SECONDS_BETWEEN_FRAMES:
            return
        text = ", ".join(part for part in (left, text) if part)
        self._bars.update(self._task, total=1.0, completed=share, text=text)
        self._bars.refresh()
        self._drawn = time.perf_counter()

    def remark(self, text: str) -> None:
        """Print it above the bars."""
        if text:
            self._bars.console.print(text, markup=False, highlight=False)

    def _tick(self, stopped: threading.Event) -> None:
        while not stopped.wait(SECONDS_BETWEEN_TICKS):
            self._bars.refresh()

    def _stop_ticking(self) -> None:
        if self._ticking is not None:
            self._ticking.set()
            self._ticking = None

    def _complete(self) -> None:
        self._stop_ticking()
        if self._task is not None:
            self._bars.update(self._task, total=1.0, completed=1.0, text="")
            self._bars.stop_task(self._task)
            self._bars.refresh()


def progress_for(stream: TextIO | None) -> AbstractContextManager[Progress]:
    """Return bars for a terminal, plain lines for another stream, for None what shows nothing."""
    if stream is None:
        return nullcontext(Silent())
    return Bars() if stream.isatty() else PlainLines()


def time_left(left_s: float) -> str:
    """Format a remaining time in a suitable unit.

    >>> time_left(180.0)
    '3 min left'
    """
    if left_s >= 5400:
        return f"{left_s / 3600:.1f} h left"
    return f"{left_s / 60:.0f} min left" if left_s >= 90 else f"{left_s:.0f} s left"
