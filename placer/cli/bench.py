"""``placer bench``: benchmarks on this machine."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from placer.cli.arguments import add_devices
from placer.cli.failures import BAD_USAGE, JOB_FAILED, fail, why_not_written
from placer.cli.talk import progress_of, say

if TYPE_CHECKING:
    from placer.bench.evidence import Evidence


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "bench",
        help="measure here how good plans are, how fast the simulator is, and what placements win",
        description="Speed of the simulator, distances to known optima and lower bounds, all "
        "placers at equal budgets, and training steps that really run. Takes a quarter of an hour.",
    )
    parser.add_argument("--quick", action="store_true", help="less of everything: two minutes")
    add_devices(parser, "auto")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="PATH",
        help="write all figures as JSON: a file, or a folder, where it is named by day and machine "
        "(default: the tables are printed, and nothing is kept)",
    )
    parser.add_argument(
        "--markdown",
        type=Path,
        metavar="FILE",
        help="write the tables into a Markdown file, between its lines <!-- placer bench: begin "
        "--> and <!-- placer bench: end -->; a new file gets them",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the benchmarks, print and write the results."""
    from envs.discover import discover
    from placer.bench.environment import plain
    from placer.bench.evidence import FULL, QUICK, around_tables, gather
    from placer.choose import PlacementError
    from placer.report.console import stdout_console

    try:
        cluster = discover(args.devices or "auto", args.memory)
        if args.markdown is not None:
            around_tables(args.markdown)
    except (ValueError, OSError) as error:
        return fail(BAD_USAGE, error)
    try:
        with progress_of(args) as progress:
            found = gather(QUICK if args.quick else FULL, cluster, progress)
    except (PlacementError, OSError) as error:
        return fail(JOB_FAILED, error)
    if args.json:
        print(json.dumps(plain(found.figures), allow_nan=False))
    else:
        console = stdout_console()
        for table in found.tables:
            table.show(console)
    return _write(found, args)


def _write(found: Evidence, args: argparse.Namespace) -> int:
    from placer.bench.evidence import put_into

    path = args.out
    try:
        if path is not None:
            say(args, f"Figures are in {found.save(path)}")
        path = args.markdown
        if path is not None:
            put_into(path, found.markdown())
            say(args, f"Tables are in {path}")
    except OSError as error:
        return fail(JOB_FAILED, why_not_written(path, error))
    return 0
