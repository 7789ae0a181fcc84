"""Run all benchmarks one after the other, or the named ones.

    python -m benchmarks [--quick | --full] [--out FILE] [NAME ...]

All of them take about an hour; with ``--quick``, which shortens the longest ones, 20 minutes; with
``--full``, which runs five seeds of ten-second searches and longer proofs, three hours. With
``--out`` the printed lines and all ratios of the search benchmark are also written to a JSON file.
"""

from __future__ import annotations

import argparse
import io
import math
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from benchmarks import (
    coarsen,
    extraction,
    max_load,
    placement,
    profiling,
    scaling,
    search,
    simulator,
    slow_network,
    startup,
    sync_methods,
    sync_quality,
)
from benchmarks.record import Record

ALL = {
    "startup": startup,
    "extraction": extraction,
    "coarsen": coarsen,
    "profiling": profiling,
    "simulator": simulator,
    "search": search,
    "max_load": max_load,
    "scaling": scaling,
    "placement": placement,
    "sync_quality": sync_quality,
    "sync_methods": sync_methods,
    "slow_network": slow_network,
}


class Heard(io.StringIO):
    """Text stream that records what is printed and passes it on."""

    def __init__(self, through: TextIO) -> None:
        super().__init__()
        self.through = through

    def write(self, text: str) -> int:
        self.through.write(text)
        self.through.flush()
        return super().write(text)


def heard(work: Callable[[], object], found: dict[str, Any]) -> None:
    """Run a benchmark and keep the lines it prints in ``found``."""
    with redirect_stdout(Heard(sys.stdout)) as said:
        try:
            work()
        finally:
            found["printed"] = said.getvalue().splitlines()


def main(
    names: list[str], *, quick: bool = False, full: bool = False, out: Path | None = None
) -> None:
    if unknown := [name for name in names if name not in ALL]:
        sys.exit(f"there is no benchmark {unknown[0]!r}; there are {', '.join(ALL)}")
    record = Record(out, math.inf)
    works: dict[str, Callable[[], object]] = {name: ALL[name].main for name in ALL}
    works["sync_quality"] = partial(sync_quality.main, quick)
    works["sync_methods"] = partial(sync_methods.main, quick)
    works["max_load"] = partial(max_load.main, effort=max_load.FULL if full else max_load.SHORT)
    for name in names or ALL:
        if name == "search":
            search.main(record, search.QUICK if quick else search.FULL if full else search.Effort())
        else:
            record.part(name, partial(heard, works[name]))
    if failed := [name for name, part in record.data["parts"].items() if "failure" in part]:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    effort = parser.add_mutually_exclusive_group()
    effort.add_argument("--quick", action="store_true", help="the longest ones short")
    effort.add_argument("--full", action="store_true", help="more seeds, longer proofs")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the results go (JSON)")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ALL))
    chosen = parser.parse_args()
    main(chosen.names, quick=chosen.quick, full=chosen.full, out=chosen.out)
