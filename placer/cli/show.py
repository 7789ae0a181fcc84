"""``placer show``: what a placement file says."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from placer.cli.failures import BAD_USAGE, fail


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("show", help="show a placement file")
    parser.add_argument("placement", type=Path)
    parser.add_argument("name", nargs="?", help="an op or a module: print its device")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the placement by module, or the device of one op or module."""
    from envs.placement import Placement
    from placer.report.console import stdout_console
    from placer.report.table import placement_to_dict, print_placement

    try:
        placement = Placement.load(args.placement)
        if args.name is not None:
            device = placement.device_of(args.name)
            told = {"name": args.name, "device": device}
            print(json.dumps(told) if args.json else device)
            return 0
    except KeyError as error:
        return fail(BAD_USAGE, error.args[0])
    except (ValueError, OSError) as error:
        return fail(BAD_USAGE, error)
    if args.json:
        print(json.dumps(placement_to_dict(placement)))
    else:
        print_placement(placement, stdout_console())
    return 0
