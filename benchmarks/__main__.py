"""Run all benchmarks one after the other, or the named ones.

    python -m benchmarks [--quick | --full] [--seeds N] [--out PATH] [--markdown PAGE] [NAME ...]

A name is that of a benchmark, or of one of its parts: ``search`` or ``search:unseen``. All of them
take some hours; with ``--quick``, which does less of everything, a few minutes; with
``--full``, which has more seeds and longer searches, most of a day. ``--out`` keeps all numbers as
JSON, ``--markdown`` replaces the tables between two markers of a page.
Benchmarks that need a GPU are in ``benchmarks.gpu``.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from benchmarks import (
    extraction,
    max_load,
    quality,
    search,
    simulator,
    startup,
    steps,
)
from benchmarks.coverage import campaign as coverage
from benchmarks.large_graphs import huge, large
from benchmarks.machine import cores, hosts, memory, overhead, sets
from benchmarks.record import Effort, Part, Record
from benchmarks.replicas import plans, scaling, slow_network, sync_methods, sync_quality
from benchmarks.tables import Table, around_tables, merged, write_tables


class Benchmark(Protocol):
    """A module with named parts, which are run in this order."""

    def parts(self, effort: Effort, /) -> Mapping[str, Part]:
        """Return all parts by name."""
        ...


BENCHMARKS: Final[Mapping[str, Benchmark]] = {
    "simulator": simulator,
    "quality": quality,
    "search": search,
    "large": large,
    "huge": huge,
    "max_load": max_load,
    "hosts": hosts,
    "cores": cores,
    "sets": sets,
    "steps": steps,
    "memory": memory,
    "overhead": overhead,
    "extraction": extraction,
    "coverage": coverage,
    "startup": startup,
    "replica_plans": plans,
    "scaling": scaling,
    "sync_quality": sync_quality,
    "sync_methods": sync_methods,
    "slow_network": slow_network,
}


def chosen_parts(names: Sequence[str], effort: Effort) -> dict[str, dict[str, Part]]:
    """Return the named parts by benchmark; all parts of all benchmarks without names.

    Raises:
        ValueError: there is no such benchmark or part.
    """
    chosen: dict[str, dict[str, Part]] = {}
    known: dict[str, Mapping[str, Part]] = {}  # made once: parts may share what they prepare
    for name in names or BENCHMARKS:
        benchmark, _, part = name.partition(":")
        if benchmark not in BENCHMARKS:
            raise ValueError(f"there is no benchmark {name!r}; there are {', '.join(BENCHMARKS)}")
        if benchmark not in known:
            known[benchmark] = BENCHMARKS[benchmark].parts(effort)
        parts = known[benchmark]
        if part and part not in parts:
            raise ValueError(f"{benchmark} has no part {part!r}; it has {', '.join(parts)}")
        chosen.setdefault(benchmark, {}).update({part: parts[part]} if part else parts)
    return chosen


def run(chosen: Mapping[str, Mapping[str, Part]], record: Record) -> list[Table]:
    """Run benchmarks, print the tables of each and return all of them."""
    tables: list[Table] = []
    for benchmark, parts in chosen.items():
        found = [record.part(f"{benchmark}: {name}", part) for name, part in parts.items()]
        for table in (own := merged(table for table in found if table is not None)):
            print(table.text(), flush=True)
        tables += own
    return tables


def page_of(tables: Sequence[Table], record: Record, command: str) -> str:
    """Return tables as Markdown, with the machine that they were measured on."""
    seen = record.data["environment"]
    machine = f"{seen['processor']}, {seen['cores']} cores, torch {seen['torch']}"
    return "\n".join(
        [f"Measured on {machine}, by `{command}`.\n", *(table.markdown() for table in tables)]
    )


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    level = parser.add_mutually_exclusive_group()
    level.add_argument("--quick", action="store_true", help="less of everything: a few minutes")
    level.add_argument(
        "--full", action="store_true", help="more seeds, longer searches: most of a day"
    )
    parser.add_argument("--seeds", type=int, metavar="N", help="seeds of searches and trainings")
    parser.add_argument(
        "--limit", type=float, default=math.inf, metavar="SECONDS", help="time limit of the run"
    )
    parser.add_argument("--out", type=Path, metavar="PATH", help="JSON file of results, or folder")
    parser.add_argument(
        "--markdown", type=Path, metavar="PAGE", help="write tables between markers of a page"
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHMARKS))
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the arguments, run the benchmarks and write the results; failed parts exit with 1."""
    parser = build_parser()
    asked = parser.parse_args(arguments)
    effort = Effort("quick" if asked.quick else "full" if asked.full else "normal", asked.seeds)
    try:
        chosen = chosen_parts(asked.names, effort)
        if asked.markdown is not None:
            around_tables(asked.markdown)
    except ValueError as error:
        parser.error(str(error))
    record = Record(asked.out, asked.limit)
    tables = run(chosen, record)
    if asked.markdown is not None:
        options = [] if effort.level == "normal" else [f"--{effort.level}"]
        command = " ".join(["python -m benchmarks", *options, *asked.names])
        write_tables(asked.markdown, page_of(tables, record, command))
    if record.failed:
        sys.exit(f"failed: {', '.join(record.failed)}")


if __name__ == "__main__":
    main()
