"""Entry point of ``placer``; it imports little, so that Ctrl-C works while the rest is imported."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn, TextIO

from placer.interrupt import EXIT_CODE, NOTHING_KEPT, leave_imports_at_once


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 1 if the job failed, 2 for bad usage."""
    from placer.cli.errors import EXPECTED, exit_code_of
    from placer.cli.output import plain_warnings

    try:
        parsed = build_parser().parse_args(arguments)
        run: Callable[[argparse.Namespace], int] = parsed.run
        with plain_warnings():
            return run(parsed)
    except EXPECTED as error:
        code = exit_code_of(error)
        if code is None:
            raise
        return code


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; each sets ``run``, which takes the parsed arguments."""
    from placer.cli import evaluate, export, extract, machine, optimize, run, show, train
    from placer.cli.arguments import CommandParser, add_output
    from placer.startup import VERSION

    parser = CommandParser(
        prog="placer",
        description="Finds which op of a PyTorch model should run on which device, by measured "
        "step time.",
    )
    parser.add_argument("--version", action="version", version=f"placer {VERSION}")
    parser.set_defaults(parser=parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (optimize, extract, evaluate, export, run, show, train, machine):
        command_parser = commands.add_parser(
            command.__name__.rpartition(".")[2],
            help=command.HELP,
            epilog=optimize.epilog() if command is optimize else command.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,  # --device is a typing error, not --devices
        )
        command.add_arguments(command_parser)
        add_output(command_parser)
        command_parser.set_defaults(run=command.run)
    return parser


def script(*command: str) -> NoReturn:
    """Run the command line, which ``command`` precedes, and exit.

    Exits without Python's finalization: unloading torch's and numba's modules takes up to a second,
    Ctrl-C should end the command within one, and gloo's threads may abort it. No files are open by
    then.
    """
    try:
        leave_imports_at_once()
        from placer.cli.output import StandardOutput

        if (old := sys.stdout) is None:  # it is closed
            sys.stdout = _nowhere()
        else:
            lines = bool(old.line_buffering)
            sys.stdout = StandardOutput(old.buffer, old.encoding, old.errors, line_buffering=lines)
        if sys.stderr is None:
            sys.stderr = _nowhere()
        code = main([*command, *sys.argv[1:]])
    except SystemExit as leaving:  # argparse, on --help and bad usage
        code = leaving.code if isinstance(leaving.code, int) else 1
    except KeyboardInterrupt:
        print(NOTHING_KEPT, file=sys.stderr)
        code = EXIT_CODE
    try:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
    except OSError as error:
        from placer.cli.errors import exit_code_of

        exit_code_of(error)
        code = EXIT_CODE
    finally:
        os._exit(code)


def _nowhere() -> TextIO:
    """Return a stream that takes the place of a closed one."""
    from pathlib import Path

    # It is in use to the end of the process, so nothing could close it earlier.
    return Path(os.devnull).open("w", encoding="utf-8")


if __name__ == "__main__":
    script()
