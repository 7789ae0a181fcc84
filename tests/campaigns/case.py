"""One fault case: signals sent to a job, and the checks of what it leaves behind."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final, Literal, TypeAlias

from envs.placement import Placement

from . import ROOT
from .jobs import Command, Ended, Job
from .world import World, contents

Wrong: TypeAlias = Literal["lost", "orphans", "tracebacks", "hangs", "others"]
Signals: TypeAlias = tuple[signal.Signals, ...]

KILL: Final[Signals] = (signal.SIGKILL,)
PAUSE: Final[Signals] = (signal.SIGSTOP, signal.SIGCONT)
ENDS: Final[tuple[Signals, ...]] = (
    *(KILL, KILL, (signal.SIGTERM,), (signal.SIGINT,)),
    *(PAUSE, (signal.SIGSTOP, signal.SIGKILL)),
)
PAUSE_S: Final = 0.5
SLOW_DISK_S: Final = 0.2
"""Delay of an fsync that is long enough to kill the job in it."""
OLD: Final = b'{"old": true}' + b" " * 3_000
STOPPED: Final = "stopped early"
OWN_LINE: Final = re.compile(rf'File "{re.escape(str(ROOT))}/(placer|envs|graphs)/')


@dataclass
class Case:
    """One fault with its random numbers, its folder and the rules it broke."""

    world: World
    random: Random
    folder: Path
    wrong: list[tuple[Wrong, str]] = field(default_factory=list)
    story: list[str] = field(default_factory=list)
    missing: list[Path] = field(default_factory=list)  # results that did not exist before

    def expect(self, holds: bool, wrong: Wrong, what: str) -> None:
        """Record a broken rule unless it holds."""
        if not holds:
            self.wrong.append((wrong, what))

    def strike(
        self,
        job: Job,
        signals: Signals,
        within_s: float,
        *,
        after: Callable[[], object] = lambda: True,
        victims: Callable[[], list[int]] | None = None,
    ) -> tuple[int, ...]:
        """Send signals at a random moment after a condition; return the allowed exit codes.

        The job may end before. If the victims are other processes than its main one, it must go on.
        """
        part = self.random.random()
        hit = job.when(after)
        end_s = time.monotonic() + part * within_s
        hit = hit and job.when(lambda: time.monotonic() >= end_s)
        pids = victims() if victims else [job.pid]
        hit = hit and bool(pids)
        victim = self.random.choice(pids or [job.pid])
        for number in signals if hit else ():
            job.send(number, victim)
            time.sleep(PAUSE_S if number == signal.SIGSTOP else 0.0)
        names = ", ".join(number.name for number in signals)
        self.story.append(f"{names} at {part:.2f}" if hit else f"{names} came too late")
        if not hit or victims or signals == PAUSE:
            return (0,)
        last = signals[-1]
        return (0, -last) if last == signal.SIGKILL else (0, 1, -last, 128 + last)

    def evaluator(self, job: Job, codes: Sequence[int]) -> Ended:
        """Wait for a job and check how it ended."""
        ended = job.finish()
        self.story.append(f"code {ended.code}")
        self.expect(not ended.hung, "hangs", f"not over after {time.monotonic() - job.began_s} s")
        self.expect(not ended.orphans, "orphans", f"processes are left: {ended.orphans}")
        is_foreign = job.interrupted or job.command.module.startswith("torch")
        self.expect_no_traceback(ended.errors, is_foreign=is_foreign)
        self.expect(not ended.left, "others", f"files are left: {ended.left}")
        if not ended.hung:
            what = f"code {ended.code}, not one of {codes}: {ended.errors[-1_000:]}"
            self.expect(ended.code in codes, "others", what)
        return ended

    def expect_no_traceback(self, errors: str, *, is_foreign: bool = False) -> None:
        """Record a traceback on stderr; a foreign one counts only if it has a line of the project.

        Python prints one on Ctrl-C before the project's first line, torchrun whenever a rank ends.
        """
        has_any = OWN_LINE.search(errors) if is_foreign else "Traceback" in errors
        self.expect(not has_any, "tracebacks", errors[-1_500:])

    def expect_no_partial_file(self) -> None:
        """Record partial files of killed writers: the next write should have removed them."""
        left = sorted(path.name for path in self.folder.rglob("*.partial"))
        self.expect(not left, "others", f"after the next write there still are {left}")

    def run(self, command: Command, codes: Sequence[int] = (0,)) -> Ended:
        """Run a job without a fault."""
        return self.evaluator(Job(command), codes)

    def placement(self, name: str = "placement.json") -> Path:
        """Return the path of a placement to write, usually with an older one there."""
        out = self.folder / name
        if self.random.random() < 0.7:
            out.write_bytes(OLD)
        else:
            self.missing.append(out)
        return out

    def check_placement(self, out: Path, ended: Ended) -> None:
        """Check that the file is whole: the old one, or, as code 0 requires, a new one."""
        before = None if out in self.missing else OLD
        if before == (out.read_bytes() if out.exists() else None):
            self.expect(ended.code != 0, "lost", "code 0, but no placement was written")
            return
        try:
            Placement.load(out)
        except (ValueError, OSError) as error:
            self.expect(False, "lost", f"the placement is damaged: {error}")

    def expect_usual(self, name: str) -> None:
        """Check that a job wrote the same files as without a fault."""
        usual = self.world.usual[name].files
        same = contents(self.folder, [*usual]) == usual
        self.expect(same, "lost", f"what {name} wrote is different")

    def write_again(self, out: Path) -> None:
        """Write once more and check that this removes what a killed job left behind."""
        self.run(self.world.graph_command(out, evaluations=5))
        self.expect_no_partial_file()
