"""``placer devices``: shows the devices of this machine with calibrated speeds."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placer.cli.arguments import add_devices
from placer.cli.failures import BAD_USAGE, JOB_FAILED, fail, why_not_outputs, why_not_written
from placer.cli.talk import progress_of, say

if TYPE_CHECKING:
    from envs.hardware.cluster import Cluster


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
    """Discover and calibrate the devices, print and write them."""
    if (why := why_not_outputs({"--out": args.out}, {})) is not None:
        return fail(BAD_USAGE, why)
    from envs.executors.cores.errors import WorkerError
    from envs.hardware.cluster import cluster_to_toml
    from envs.hardware.discover import discover
    from envs.measurement import contention_warning
    from envs.runtime import calibrated
    from graphs.files import write_whole
    from placer.report.console import stdout_console
    from placer.report.table import print_cluster

    try:
        cluster = discover(args.devices or "auto", args.memory)
    except ValueError as error:
        return fail(BAD_USAGE, error)
    try:
        with progress_of(args) as progress:
            progress.stage("Calibrating devices")
            cluster = calibrated(cluster, again=args.again)
    except WorkerError as error:
        return fail(JOB_FAILED, error)
    if args.json:
        print(json.dumps(cluster_to_dict(cluster), allow_nan=False))
    else:
        print_cluster(cluster, stdout_console())
    if doubt := contention_warning(cluster):
        say(args, doubt)
    if args.out is not None:
        try:
            write_whole(args.out, cluster_to_toml(cluster))
        except OSError as error:
            return fail(JOB_FAILED, why_not_written(args.out, error))
    return 0


def cluster_to_dict(cluster: Cluster) -> dict[str, Any]:
    """Return devices and links as plain data for JSON; units are in the names, None is infinite."""
    from dataclasses import asdict

    def finite(items: list[tuple[str, Any]]) -> dict[str, Any]:
        infinite = (name for name, v in items if isinstance(v, float) and not math.isfinite(v))
        return {**dict(items), **dict.fromkeys(infinite)}

    return asdict(cluster, dict_factory=finite)
