"""Fuzzing: mutated files of every format that placer reads, and property tests on random examples.

    python -m tests.campaigns.fuzz --minutes 5
    python -m tests.campaigns.fuzz --minutes 1 --files 10000 --seed 0
    python -m tests.campaigns.fuzz --check graph out/fuzz/0-123/graph.json

A file may be accepted, or refused with a ValueError or OSError of one short line, within one second
of CPU time and 300 MB. Accepted files are then used by commands of placer in the same process,
which may end with code 0, 1 or 2 and a short message, see :mod:`tests.campaigns.reading`.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from pathlib import Path
from random import Random
from typing import Final

from . import ROOT, TESTS
from .formats import Format, formats
from .lanes import LANES, forked, lanes
from .mutation import mutated
from .reading import Codes, Failure, limit_memory, read

CHUNK: Final = 25
"""Number of files that a child process reads, unless it dies."""
LONGEST_S: Final = 60
"""CPU seconds after which a file counts as hung; three times as many by wall time."""
SHOWN: Final = 3
"""Number of failures of one cause that are printed and saved."""
SHORTEST_S: Final = 15.0
"""Property tests do not start with less time left."""


_known: list[Format] = []
"""Shared with the lanes, which are forked after this is filled."""


def mutated_files(seed: int, out: Path, *, files: int | None, seconds: float) -> int:
    """Read mutated files up to a number or a time limit; return the number of failures."""
    end_s = time.monotonic() + seconds
    done, failed = Counter[str](), {form.name: Counter[str]() for form in _known}
    with lanes() as pool:
        tasks, given = set[Future[list[tuple[int, list[Failure]]]]](), 0
        while True:
            while len(tasks) < LANES and (given < files if files else time.monotonic() < end_s):
                chunk = range(given, min(given + CHUNK, files or sys.maxsize))
                tasks.add(pool.submit(read_chunk, seed, chunk))
                given = chunk.stop
            if not tasks:
                break
            ready, tasks = wait(tasks, return_when=FIRST_COMPLETED)
            for number, failures in (found for task in ready for found in task.result()):
                form, content = drawn(seed, number)
                done[form.name] += 1
                for failure in failures:
                    failed[form.name][failure.cause] += 1
                    if failed[form.name][failure.cause] <= SHOWN:
                        _report(form, content, failure, out / f"{seed}-{number}")
    for name, causes in failed.items():
        print(f"{name:18} {done[name]:6} files, {causes.total()} failures")
        for cause, count in causes.most_common():
            print(f"    {count:5} x {cause}")
    total = sum(causes.total() for causes in failed.values())
    print(f"{done.total()} mutated files of seed {seed}, {total} failures", flush=True)
    return total


def drawn(seed: int, number: int) -> tuple[Format, bytes]:
    """Return the format and the content of a file of a campaign."""
    random = Random(f"{seed}:{number}")
    [form] = random.choices(_known, [one.share for one in _known])
    return form, mutated(random, form.specimen.read_bytes(), form.syntax)


def read_chunk(seed: int, numbers: Sequence[int]) -> list[tuple[int, list[Failure]]]:
    """Read files in a child process; start another one whenever it dies."""
    found: list[tuple[int, list[Failure]]] = []
    with tempfile.TemporaryDirectory() as folder:
        while left := numbers[len(found) :]:
            log = Path(folder, "log")
            _, status = os.waitpid(forked(partial(_read_all, seed, left, log)), 0)
            for line in log.read_text().splitlines():
                found.append((numbers[len(found)], [Failure(*one) for one in json.loads(line)]))
            log.unlink()
            if status:  # keep what was printed about the death of the process
                sys.stderr.write(Path(folder, "stderr").read_text(errors="replace")[-2_000:])
                died = signal.Signals(status & 127).name if status & 127 else "exit"
                rule = "hang" if died in ("SIGALRM", "SIGPROF") else "crash"
                found.append((numbers[len(found)], [Failure(rule, died, "")]))
    return found


def _read_all(seed: int, numbers: Sequence[int], log: Path) -> None:
    """Read files, write a line of the log for each, and end this process."""
    limit_memory()
    stderr = log.with_name("stderr")  # libraries log there and keep the stream of their start
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    with log.open("w", buffering=1) as lines:
        for number in numbers:
            signal.setitimer(signal.ITIMER_PROF, LONGEST_S)
            signal.alarm(3 * LONGEST_S)
            form, content = drawn(seed, number)
            failures = read(form, content, log.parent)
            if "Traceback" in (errors := stderr.read_text(errors="replace")):
                failures.append(Failure("traceback", "on stderr", errors[-6_000:]))
            os.truncate(stderr, 0)
            lines.write(json.dumps(failures) + "\n")
    os._exit(0)


def _report(form: Format, content: bytes, failure: Failure, folder: Path) -> None:
    """Print a failure, save its file, and print the command that repeats it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / form.specimen.name
    path.write_bytes(content)
    (folder / "failure.txt").write_text(f"{failure.cause}\n\n{failure.details}\n", errors="replace")
    print(f"{form.name}: {failure.cause}")
    print(f"    {sys.executable} -m tests.campaigns.fuzz --check '{form.name}' {path}", flush=True)


def property_tests(seed: int, seconds: float) -> int:
    """Run the property tests with random examples for a time; return 1 if one fails."""
    end_s = time.monotonic() + seconds
    files = sorted(p for p in TESTS.rglob("test_*.py") if "hypothesis" in p.read_text())
    while (left_s := end_s - time.monotonic()) > SHORTEST_S:
        Random(seed).shuffle(files)
        chosen = ["-m", "hypothesis and not slow and not gpu", *map(str, files)]
        manner = ["--hypothesis-profile=fuzz", f"--hypothesis-seed={seed}", "--tb=short"]
        command = [sys.executable, "-m", "pytest", "-q", "-x", *manner, *chosen]
        print(f"property tests with --hypothesis-seed={seed}", flush=True)
        with subprocess.Popen(command, cwd=ROOT) as process:
            try:
                code = process.wait(left_s)
            except subprocess.TimeoutExpired:
                process.kill()  # Ctrl-C would be for the search that a test runs, which then fails
                code = 0  # with a failure it would have ended itself
        if code:
            return 1
        seed += 1
    return 0


def check(form: Format, path: Path, folder: Path, codes: Codes = (0, 1, 2)) -> int:
    """Check one file and print its failures; return 1 if there are any."""
    failures = read(form, path.read_bytes(), folder, codes)
    for failure in failures:
        print(f"{failure.cause}\n{failure.details}")
    print(f"{len(failures)} failures")
    return 1 if failures else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a campaign and return 0 if nothing failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.fuzz", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--minutes", type=float, default=5.0, help="half of it for each [5]")
    parser.add_argument("--files", type=int, help="so many mutated files, however long that takes")
    parser.add_argument("--seed", type=int, help="of all that is drawn [random]")
    parser.add_argument("--check", nargs=2, metavar=("FORMAT", "FILE"), help="check one file")
    parser.add_argument("--out", type=Path, default=ROOT / "out/fuzz", help="for files that fail")
    args = parser.parse_args(arguments)
    seed = secrets.randbelow(10**6) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        _known.extend(formats(Path(folder, "specimens")))
        if args.check:
            [form] = [form for form in _known if form.name == args.check[0]]
            return check(form, Path(args.check[1]), Path(folder))
        for form in _known:
            read(form, form.specimen.read_bytes(), Path(folder, "warm"))  # imports and caches
            if check(form, form.specimen, Path(folder, "valid"), codes=(0,)):
                print(f"{form.name}: the valid file fails")
                return 1
        seconds = args.minutes * 60.0 / 2.0
        found = mutated_files(seed, args.out, files=args.files, seconds=seconds)
    found += property_tests(seed, seconds)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
