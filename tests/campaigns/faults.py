"""Random faults: jobs of placer are killed, stopped or starved; nothing may be lost or left over.

    python -m tests.campaigns.faults --count 500 --seed 0
    python -m tests.campaigns.faults --seed 0 --only 17      # repeat one of them

The seed determines the faults; their exact timing also depends on the machine. The output of a job
must be complete or unchanged, no process may outlive it, nothing may stay in TMPDIR or shared
memory, stderr may have no traceback, and the exit code must be 0, 1, 2 or the signal's.
"""

from __future__ import annotations

import argparse
import gc
import secrets
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import as_completed
from pathlib import Path
from random import Random
from typing import Final, get_args

import torch

from .case import Case, Wrong
from .jobs import SHARED_MEMORY, end_all, own_mounts
from .kinds import KINDS
from .lanes import lanes
from .world import World

GOLDEN: Final = 0.618033988749895
"""Golden ratio; its multiples are evenly spread, so every kind gets its share of the faults."""
_world: World | None = None
_has_own_mounts = False
"""Shared with the lanes, which are forked after these are set."""


def kind_of(seed: int, number: int, skipped: Sequence[str] = ()) -> str:
    """Return the kind of a fault of a campaign."""
    names = [name for name, (_, share) in KINDS.items() for _ in range(share)]
    names = [name for name in names if name not in skipped]
    return names[int((Random(seed).random() + GOLDEN * number) % 1.0 * len(names))]


def one_fault(kind: str, seed: int, number: int) -> tuple[int, list[tuple[Wrong, str]], str]:
    """Run one fault; return its number, the rules it broke and what happened."""
    assert _world is not None
    folder = Path(tempfile.mkdtemp(dir=_world.folder))
    case = Case(_world, Random(f"{seed}:{number}"), folder)
    happens, _ = KINDS[kind]
    try:
        happens(case)
    except Exception:  # noqa: BLE001 - whatever it was, other faults shall go on
        case.expect(False, "others", traceback.format_exc())
    finally:
        end_all()
        left = [path.name for path in SHARED_MEMORY.iterdir()] if _has_own_mounts else []
        case.expect(not left, "others", f"left in shared memory: {left}")
        shutil.rmtree(folder, ignore_errors=True)
    return number, case.wrong, "; ".join(case.story)


def campaign(seed: int, numbers: Sequence[int], *, verbose: bool = False) -> int:
    """Run the faults of these numbers, two at a time; return the number of broken rules."""
    global _world, _has_own_mounts  # noqa: PLW0603 - lanes inherit them by being forked
    began_s = time.monotonic()
    faults, broken = Counter[str](), Counter[Wrong]()
    with tempfile.TemporaryDirectory(prefix="placer-faults-") as folder:
        _world = World(Path(folder).resolve())
        print(f"seed {seed}; ready after {time.monotonic() - began_s:.0f} s", flush=True)
        _has_own_mounts = own_mounts()
        skipped = [] if _has_own_mounts else ["full disk"]
        if skipped:
            print("no full disks, no look at /dev/shm: this process may not mount file systems")
        gc.freeze()  # so that lanes and jobs share the memory
        pool = lanes(own_mounts)
        try:
            kinds = {number: kind_of(seed, number, skipped) for number in numbers}
            tasks = [pool.submit(one_fault, kind, seed, n) for n, kind in kinds.items()]
            for task in as_completed(tasks):
                number, wrong, story = task.result()
                faults[kinds[number]] += 1
                broken.update(what for what, _ in wrong)
                if wrong or verbose:
                    print(f"fault {number}, {kinds[number]}: {story}", flush=True)
                for what, details in wrong:
                    print(f"    {what}: {details}")
                if wrong:
                    again = f"-m tests.campaigns.faults --seed {seed} --only {number}"
                    print(f"    {sys.executable} {again}", flush=True)
        finally:
            pool.shutdown(cancel_futures=True)
    for kind, count in faults.items():
        print(f"{kind:20} {count:5} faults")
    counts = ", ".join(f"{broken[what]} {what}" for what in get_args(Wrong))
    print(f"{faults.total()} faults: {counts}; {time.monotonic() - began_s:.0f} s")
    return broken.total()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a campaign and return 0 if no rule was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.faults", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--count", type=int, default=500, help="number of faults [500]")
    parser.add_argument("--seed", type=int, help="of what happens [random]")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="only these faults")
    parser.add_argument("--kind", choices=list(KINDS), help="only faults of this kind")
    parser.add_argument("--verbose", action="store_true", help="a line for every fault")
    args = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    torch.set_num_threads(1)  # OpenMP's threads would not survive a fork
    seed = secrets.randbelow(10**6) if args.seed is None else args.seed
    numbers = args.only or range(args.count)
    if args.kind:
        numbers = [number for number in numbers if kind_of(seed, number) == args.kind]
    return 1 if campaign(seed, numbers, verbose=args.verbose or bool(args.only)) else 0


if __name__ == "__main__":
    sys.exit(main())
