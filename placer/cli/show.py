"""``placer show``: prints a placement file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from placer.cli.failures import BAD_USAGE, fail

if TYPE_CHECKING:
    from envs.placement import Placement


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("show", help="show a placement file")
    parser.add_argument("placement", type=Path)
    parser.add_argument(
        "name", nargs="?", help="an op or a module, (model) for what is in none: print where it is"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the placement by module, or the device of one op or module."""
    from envs.placement import Placement
    from placer.report.console import stdout_console
    from placer.report.table import placement_to_dict, print_placement

    try:
        placement = Placement.load(args.placement)
        if args.name is not None:
            print(_told(placement, args.name, as_json=args.json))
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


def _told(placement: Placement, name: str, *, as_json: bool) -> str:
    """Return where an op or module is; ``device`` is that of a module's parameters.

    Raises:
        KeyError: neither an op nor a module has this name.
    """
    from envs.placement import phase_of
    from placer.report.table import told_devices

    device, is_op = placement.device_of(name), name in placement.ops
    if as_json:
        devices = {device: {phase_of(name): 1}} if is_op else placement.phases_of(name)
        return json.dumps({"name": name, "device": device, "devices": devices})
    return device if is_op else f"{name}: {told_devices(placement, name)}"
