"""The command ``placer``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import placer
from placer.cli import (
    bench,
    cache,
    completion,
    devices,
    doctor,
    evaluate_policy,
    export,
    extract,
    measure,
    optimize,
    placers,
    report,
    show,
    simulate,
    train,
)
from placer.cli.arguments import add_output
from placer.cli.failures import JOB_FAILED, fail
from placer.cli.parser import CommandParser

COMMANDS = (
    optimize,
    placers,
    extract,
    export,
    measure,
    simulate,
    devices,
    doctor,
    cache,
    show,
    report,
    bench,
    train,
    evaluate_policy,
    completion,
)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each sets ``run``, which takes the parsed arguments."""
    parser = CommandParser(
        prog="placer",
        description="Finds which op of a PyTorch model should run on which device, by measured "
        "step time.",
    )
    parser.add_argument("--version", action="version", version=f"placer {placer.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_to(commands)
    for command_parser in commands.choices.values():
        add_output(command_parser)
        command_parser.allow_abbrev = False  # --device is a slip, not --devices
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 0, 1 for a job that failed, 2 for bad usage."""
    parsed = build_parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = parsed.run
    try:
        return run(parsed)
    except KeyboardInterrupt:
        print("placer: stopped before there was anything to keep", file=sys.stderr)
        return JOB_FAILED
    except BrokenPipeError:
        return JOB_FAILED
    except OSError as error:  # standard output on a full disk, for one
        return fail(JOB_FAILED, error)


def script() -> NoReturn:
    """Entry of the installed command.

    Leaves without Python's farewell: taking torch's and numba's modules down one by one takes up
    to a second, and Ctrl-C shall end the command within one. Nothing is open by then.
    """
    try:
        code = main()
    except SystemExit as leaving:  # argparse, on --help and bad usage
        code = leaving.code if isinstance(leaving.code, int) else 1
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        code = JOB_FAILED
    except OSError as error:
        code = fail(JOB_FAILED, error)
    finally:
        os._exit(code)


if __name__ == "__main__":
    script()
