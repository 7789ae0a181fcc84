"""``placer doctor``: checks whether this machine is fit for measuring, and how to improve it."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from placer.cli.arguments import add_devices
from placer.cli.failures import BAD_USAGE, JOB_FAILED, fail
from placer.cli.talk import progress_of

if TYPE_CHECKING:
    from placer.doctor import Checkup


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "doctor", help="check versions, devices and noise, and say what would make them better"
    )
    add_devices(parser, "auto")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Discover and calibrate the devices, measure noise, print the checkup."""
    from envs.executors.cores.errors import WorkerError
    from envs.hardware.discover import discover
    from envs.runtime import calibrated
    from placer.doctor import check_machine

    try:
        cluster = discover(args.devices or "auto", args.memory)
    except ValueError as error:
        return fail(BAD_USAGE, error)
    try:
        with progress_of(args) as progress:
            progress.stage("Calibrating devices")
            cluster = calibrated(cluster)
            progress.stage("Listening to the noise of this machine")
            found = check_machine(cluster)
    except (WorkerError, OSError) as error:
        return fail(JOB_FAILED, error)
    if args.json:
        print(json.dumps(_to_dict(found), allow_nan=False))
    elif args.quiet:
        print(found.verdict)
    else:
        _print(found)
    return 0


def _print(found: Checkup) -> None:
    from rich import box
    from rich.table import Table

    from envs.hardware.byte_size import human_bytes
    from placer.report.console import stdout_console
    from placer.report.table import print_cluster

    console = stdout_console()
    console.print(found.processor)
    console.print(", ".join(f"{name} {version}" for name, version in found.versions.items()))
    load = f"load {found.load:.1f} on {found.cores} core{'s'[: found.cores > 1]}"
    console.print(f"free memory {human_bytes(found.free_bytes)}; {load}")
    print_cluster(found.cluster, console)
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("core", "equal work, median", "quartiles apart", "wall / CPU time"):
        table.add_column(name, justify="right")
    for noise in found.noise:
        table.add_row(
            str(noise.core),
            f"{noise.median_s * 1e6:.0f} us",
            f"{noise.spread:.0%}",
            f"{noise.contention:.2f}",
        )
    console.print(table)
    for sentence in (*found.advice, found.verdict):
        console.print(sentence)


def _to_dict(found: Checkup) -> dict[str, Any]:
    from dataclasses import asdict

    from envs.hardware.cluster import cluster_to_toml
    from envs.measurement import CONTENDED
    from placer.messages import NOISY

    return {
        "versions": dict(found.versions),
        "processor": found.processor,
        "cluster": cluster_to_toml(found.cluster),
        "noise": [asdict(noise) for noise in found.noise],
        "load": found.load,
        "cores": found.cores,
        "quota_cores": found.quota_cores,
        "governors": sorted(found.governors),
        "free_memory_bytes": found.free_bytes,
        "cache": {"folder": found.cache, "writable": found.cache_writable},
        "advice": found.advice,
        "good": found.is_good,
        "verdict": found.verdict,
        "thresholds": {"contention": CONTENDED, "spread": NOISY},
    }
