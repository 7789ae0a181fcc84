"""``placer placers``: lists the search algorithms."""

from __future__ import annotations

import argparse
import json


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("placers", help="list what placer optimize --placer takes")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print name, summary and requirements of each placer; none of them is imported."""
    from placer.search.registry import listings

    rows = [(listing.name, listing.summary, listing.needs) for listing in listings()]
    if args.json:
        keys = ("name", "summary", "needs")
        print(json.dumps([dict(zip(keys, row, strict=True)) for row in rows]))
        return 0
    rows = [("placer", "what it does", "what it needs"), *rows]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, summary, needs in rows:
        print(f"{name:{widths[0]}}  {summary:{widths[1]}}  {needs}".rstrip())
    return 0
