"""``placer machine``: devices and their speeds, fitness for measuring, cached measurements."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from graphs.text import suggestion
from placer.cli.arguments import add_devices, flag, option, output_group
from placer.cli.completion import PLACES, completion_script
from placer.cli.errors import JobError, UsageError, usage_errors
from placer.cli.output import check_outputs, print_result, progress_of, say, writing

if TYPE_CHECKING:
    from rich.console import Console

    from envs.costs.cache import CostCache, Holding
    from placer.report.doctor import Checkup

EVERYTHING: Final = "everything"
SPEEDS: Final = "speeds"
HELP: Final = "show devices, speeds, noise and cached measurements of this machine"
EPILOG: Final = f"""\
examples:
  placer machine --devices core:0,core:1 --out here.toml
  placer machine --cache
  placer machine --clear-cache            all measurements
  placer machine --clear-cache core*2     the op times of one kind of device
  placer machine --clear-cache {SPEEDS}     the speeds of devices and links

The cache is in $PLACER_CACHE, by default ~/.cache/device-placer.

shell completion in every new shell:
""" + "".join(f"  placer machine --completion {name} > {place}\n" for name, place in PLACES.items())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    group = parser.add_argument_group("devices")
    add_devices(group, "auto")
    group = parser.add_argument_group("cache and shell")
    flag(group, "--cache", "list of cached measurements")
    option(
        group,
        "--clear-cache",
        f"cached measurements to remove: a device kind, {SPEEDS} or",
        shown=EVERYTHING,
        nargs="?",
        const=EVERYTHING,
        metavar="WHAT",
    )
    option(group, "--completion", "completion script to print for a shell", choices=list(PLACES))
    option(output_group(parser), "--out", "cluster file (TOML) of the devices to write", type=Path)


def run(args: argparse.Namespace) -> int:
    """Show the machine, its cache or a completion script."""
    _check_options(args)
    if args.completion is not None:
        script = completion_script(args.parser, args.completion)
        data = {"shell": args.completion, "script": script}
        print_result(args, lambda: data, lambda _: print(script))
    elif args.cache or args.clear_cache is not None:
        _show_cache(args)
    else:
        _show_devices(args)
    return 0


def _check_options(args: argparse.Namespace) -> None:
    """Check that a completion script or the cache is asked for alone."""
    asked = {"--completion": args.completion, "--clear-cache": args.clear_cache}
    asked |= {"--cache": args.cache, "--devices": args.devices}
    asked |= {"--memory": args.memory, "--out": args.out}
    given = [name for name, value in asked.items() if value]
    if len(given) > 1 and given[0] in ("--completion", "--clear-cache", "--cache"):
        raise UsageError(f"{given[1]} has no effect beside {given[0]}: leave it out")


def _show_devices(args: argparse.Namespace) -> None:
    """Discover and calibrate the devices, measure noise, print and write them."""
    check_outputs({"--out": args.out}, {})
    from envs.hardware.cluster import cluster_to_toml
    from envs.hardware.discover import discover
    from envs.runtime import calibrated
    from graphs.files import write_whole
    from placer.report.doctor import check_machine

    with usage_errors():
        cluster = discover(args.devices or "auto", args.memory)
    with progress_of(args) as progress:
        progress.stage("Calibrating devices")
        cluster = calibrated(cluster)
        progress.stage("Measuring the noise of this machine")
        checkup = check_machine(cluster)
    print_result(
        args,
        lambda: _checkup_to_dict(checkup),
        lambda console: _print_checkup(checkup, console),
        checkup.verdict,
    )
    if args.out is not None:
        with writing(args.out):
            write_whole(args.out, cluster_to_toml(cluster))


def _print_checkup(checkup: Checkup, console: Console) -> None:
    from envs.hardware.units import human_bytes
    from placer.report.console import print_rows
    from placer.report.table import print_cluster

    console.print(checkup.processor)
    console.print(", ".join(f"{name} {version}" for name, version in checkup.versions.items()))
    load = f"load {checkup.load:.1f} on {checkup.cores} core{'s'[: checkup.cores > 1]}"
    console.print(f"free memory {human_bytes(checkup.free_bytes)}; {load}")
    print_cluster(checkup.cluster, console)
    print_rows(
        console,
        ("core", "equal work, median", "quartiles apart", "wall / CPU time"),
        [
            (
                noise.core,
                f"{noise.median_s * 1e6:.0f} us",
                f"{noise.spread:.0%}",
                f"{noise.contention:.2f}",
            )
            for noise in checkup.noise
        ],
    )
    for remark in (*checkup.advice, checkup.verdict):
        console.print(remark)


def _checkup_to_dict(checkup: Checkup) -> dict[str, Any]:
    """Return the checkup as plain data for JSON; infinite rates are None."""

    def finite(items: list[tuple[str, Any]]) -> dict[str, Any]:
        infinite = (name for name, v in items if isinstance(v, float) and not math.isfinite(v))
        return {**dict(items), **dict.fromkeys(infinite)}

    return {
        **asdict(checkup, dict_factory=finite),
        "governors": sorted(checkup.governors),
        "advice": checkup.advice,
        "is_good": checkup.is_good,
        "verdict": checkup.verdict,
    }


def _show_cache(args: argparse.Namespace) -> None:
    """Clear what ``--clear-cache`` names, then list what is left."""
    from envs.costs.cache import CostCache, UnreadableCacheError

    cache = CostCache()
    folder = cache.path.parent
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is not a folder: set PLACER_CACHE to one")
    try:
        if args.clear_cache is not None:
            _clear(cache, args.clear_cache)
        holdings = cache.holdings()
    except UnreadableCacheError as error:
        raise JobError(f"{error}; placer machine --clear-cache removes it") from error
    listing = _listing(cache, holdings)
    if listing["folder"] is None and not args.json:  # a warning says so
        return
    print_result(args, lambda: listing, lambda console: _print_listing(listing, console))
    if not listing["files"]:
        say(args, "the cache is empty")


def _clear(cache: CostCache, what: str) -> None:
    from envs.hardware.cache_folder import speed_files

    if what in (EVERYTHING, SPEEDS):
        for path in [*(cache.files() if what == EVERYTHING else ()), *speed_files()]:
            path.unlink(missing_ok=True)
        return
    kinds = sorted({holding.conditions.kind for holding in cache.holdings()})
    if what not in kinds:
        existing = [*kinds, SPEEDS]
        hint = suggestion(what, [*existing, EVERYTHING])
        raise UsageError(
            f"the cache has no op times of kind {what!r}; there are {', '.join(existing)}{hint}"
        )
    cache.clear(what)


def _listing(cache: CostCache, holdings: list[Holding]) -> dict[str, Any]:
    from envs.hardware.cache_folder import NOWHERE, speed_files

    folder = cache.path.parent
    return {
        "folder": None if NOWHERE in folder.parents else str(folder),
        "op_times": [asdict(holding) for holding in holdings],
        "files": {path.name: path.stat().st_size for path in [*cache.files(), *speed_files()]},
    }


def _print_listing(listing: dict[str, Any], console: Console) -> None:
    from envs.hardware.units import human_bytes
    from placer.report.console import print_rows

    console.print(listing["folder"], highlight=False)
    sizes = [(name, human_bytes(size_bytes)) for name, size_bytes in listing["files"].items()]
    print_rows(console, ("file", "size"), sizes)
    columns = ("op times", "torch", "entries", "sessions", "first", "last", "hardware")
    rows = []
    for holding in listing["op_times"]:
        conditions = holding["conditions"]
        numbers = (holding[name] for name in ("signatures", "sessions", "first", "last"))
        rows.append((conditions["kind"], conditions["torch"], *numbers, conditions["hardware"]))
    print_rows(console, columns, rows)
