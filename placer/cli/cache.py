"""``placer cache``: lists or clears the measurements kept on this machine."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from placer.cli.failures import BAD_USAGE, JOB_FAILED, fail
from placer.cli.talk import say

if TYPE_CHECKING:
    from envs.costs.cache import CostCache, Holding

EVERYTHING: Final = "everything"
SPEEDS: Final = "speeds"

EPILOG = f"""\
examples:
  placer cache
  placer cache --clear            all of it
  placer cache --clear core*2     the op times of one kind of device
  placer cache --clear {SPEEDS}     the speeds of devices and links

The cache is in $PLACER_CACHE, by default ~/.cache/device-placer.
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "cache",
        help="list the measurements that are kept, or clear them",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--clear",
        nargs="?",
        const=EVERYTHING,
        metavar="WHAT",
        help=f"forget everything, the op times of one kind of device, or the {SPEEDS}",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Clear what ``--clear`` names, then list what is left."""
    from envs.costs.cache import CostCache, UnreadableCacheError

    cache = CostCache()
    try:
        why = None if args.clear is None else _clear(cache, args.clear)
        if why is not None:
            return fail(BAD_USAGE, why)
        holdings = cache.holdings()
    except UnreadableCacheError as error:
        return fail(JOB_FAILED, f"{error}; placer cache --clear removes it")
    except (ValueError, OSError) as error:
        return fail(JOB_FAILED, error)
    listing = _listing(cache, holdings)
    if args.json:
        print(json.dumps(listing))
        return 0
    if listing["folder"] is None:  # a warning says so
        return 0
    _print(listing)
    if not listing["op_times"]["files"] and not listing[SPEEDS]:
        say(args, "nothing is kept")
    return 0


def _clear(cache: CostCache, what: str) -> str | None:
    """Clear part of the cache; return why that part does not exist, or None."""
    from envs.hardware.cache_folder import speed_files

    kinds: list[str] = []
    if what not in (EVERYTHING, SPEEDS):
        kinds = sorted({holding.conditions.kind for holding in cache.holdings()})
        if what not in kinds:
            there = ", ".join([*kinds, SPEEDS])
            return f"the cache has no op times of kind {what!r}; there are {there}"
        cache.clear(what)
        return None
    for path in [*(cache.files() if what == EVERYTHING else ()), *speed_files()]:
        path.unlink(missing_ok=True)
    return None


def _listing(cache: CostCache, holdings: list[Holding]) -> dict[str, Any]:
    from envs.hardware.cache_folder import NOWHERE, speed_files

    folder = cache.path.parent
    return {
        "folder": None if NOWHERE in folder.parents else str(folder),
        "op_times": {
            "files": [_file(path) for path in cache.files()],
            "kinds": [
                {
                    "kind": holding.conditions.kind,
                    "hardware": holding.conditions.hardware,
                    "torch": holding.conditions.torch,
                    "entries": holding.signatures,
                    "sessions": holding.sessions,
                    "first": holding.first,
                    "last": holding.last,
                }
                for holding in holdings
            ],
        },
        SPEEDS: [_file(path) for path in speed_files()],
    }


def _file(path: Path) -> dict[str, Any]:
    import datetime

    about = path.stat()
    day = datetime.date.fromtimestamp(about.st_mtime).isoformat()
    return {"file": path.name, "size_bytes": about.st_size, "written": day}


def _print(listing: dict[str, Any]) -> None:
    from rich import box
    from rich.table import Table

    from envs.hardware.byte_size import human_bytes
    from placer.report.console import stdout_console

    console = stdout_console()
    console.print(listing["folder"], highlight=False)
    files = [*listing["op_times"]["files"], *listing[SPEEDS]]
    if not files:
        return
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("file", "size", "written"):
        table.add_column(name, justify="right" if name == "size" else "left", overflow="fold")
    for file in files:
        table.add_row(file["file"], human_bytes(file["size_bytes"]), file["written"])
    console.print(table)
    if listing["op_times"]["kinds"]:
        table = Table(box=box.SIMPLE_HEAD)
        for name in ("op times", "torch", "entries", "sessions", "measured", "hardware"):
            number = name in ("entries", "sessions")
            table.add_column(name, justify="right" if number else "left", overflow="fold")
        for kind in listing["op_times"]["kinds"]:
            days = kind["first"] if kind["first"] == kind["last"] else None
            table.add_row(
                kind["kind"],
                kind["torch"],
                str(kind["entries"]),
                str(kind["sessions"]),
                days or f"{kind['first']} .. {kind['last']}",
                kind["hardware"],
            )
        console.print(table)
