"""All benchmarks, one after the other, or those named.

    python -m benchmarks [--quick | --full] [NAME ...]

All of them take about an hour; with ``--quick``, which makes the longest ones short, 20 minutes;
with ``--full``, which takes five seeds of ten-second searches and proves longer, three hours.
"""

import argparse
import math
import sys

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
    sync_quality,
)
from benchmarks.record import Record

ALL = {
    "extraction": extraction,
    "coarsen": coarsen,
    "profiling": profiling,
    "simulator": simulator,
    "search": search,
    "max_load": max_load,
    "scaling": scaling,
    "placement": placement,
    "sync_quality": sync_quality,
    "slow_network": slow_network,
}


def main(names: list[str], quick: bool = False, full: bool = False) -> None:
    if unknown := [name for name in names if name not in ALL]:
        sys.exit(f"there is no benchmark {unknown[0]!r}; there are {', '.join(ALL)}")
    record = Record(None, math.inf)
    for name in names or ALL:
        if name == "search":
            effort = search.QUICK if quick else search.FULL if full else search.Effort()
            search.main(record, effort)
        elif name == "sync_quality":
            sync_quality.main(quick)
        elif name == "max_load":
            max_load.main(effort=max_load.FULL if full else max_load.SHORT)
        else:
            ALL[name].main()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    effort = parser.add_mutually_exclusive_group()
    effort.add_argument("--quick", action="store_true", help="the longest ones short")
    effort.add_argument("--full", action="store_true", help="more seeds, longer proofs")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ALL))
    arguments = parser.parse_args()
    main(arguments.names, arguments.quick, arguments.full)
