"""``placer devices``: what was discovered, with calibrated speeds."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from placer.cli.arguments import add_devices
from placer.cli.failures import BAD_USAGE, JOB_FAILED, fail, why_not_outputs, why_not_written


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "devices", help="show this machine's devices and links, with measured speeds"
    )
    add_devices(parser, "auto")
    parser.add_argument("--again", action="store_true", help="measure anew, not from the cache")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write them as a cluster file (TOML)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Discover, calibrate, print."""
    if (why := why_not_outputs({"--out": args.out}, {})) is not None:
        return fail(BAD_USAGE, why)
    from envs.calibrate import calibrated
    from envs.cluster import cluster_to_toml
    from envs.discover import discover
    from envs.executor.pool import WorkerError
    from graphs.whole_file import write_whole
    from placer.report.console import stdout_console
    from placer.report.progress import progress_for
    from placer.report.table import print_cluster

    try:
        cluster = discover(args.devices or "auto", args.memory)
    except ValueError as error:
        return fail(BAD_USAGE, error)
    try:
        with progress_for(sys.stderr.isatty()) as progress:
            progress.stage("Calibrating devices")
            cluster = calibrated(cluster, again=args.again)
    except WorkerError as error:
        return fail(JOB_FAILED, error)
    print_cluster(cluster, stdout_console())
    if args.out is not None:
        try:
            write_whole(args.out, cluster_to_toml(cluster))
        except OSError as error:
            return fail(JOB_FAILED, why_not_written(args.out, error))
    return 0
