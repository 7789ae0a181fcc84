"""The parser and entry point of all commands of ``placer``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from placer.cli import (
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
from placer.cli.failures import JOB_FAILED, fail, why_no_memory
from placer.cli.parser import CommandParser
from placer.cli.talk import plain_warnings
from placer.interrupt import NOTHING_KEPT
from placer.version import VERSION

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
    train,
    evaluate_policy,
    completion,
)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; each sets ``run``, which takes the parsed arguments."""
    parser = CommandParser(
        prog="placer",
        description="Finds which op of a PyTorch model should run on which device, by measured "
        "step time.",
    )
    parser.add_argument("--version", action="version", version=f"placer {VERSION}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_to(commands)
    for command_parser in commands.choices.values():
        add_output(command_parser)
        command_parser.allow_abbrev = False  # --device is a typing error, not --devices
    return parser


def run_command(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 1 if the job failed, 2 for bad usage."""
    try:
        parsed = build_parser().parse_args(arguments)
        run: Callable[[argparse.Namespace], int] = parsed.run
        with plain_warnings():
            return run(parsed)
    except KeyboardInterrupt:
        print(NOTHING_KEPT, file=sys.stderr)
        return JOB_FAILED
    except BrokenPipeError:
        return JOB_FAILED
    except OSError as error:
        return fail(JOB_FAILED, error)
    except (MemoryError, SystemError, ImportError) as error:
        if (why := why_no_memory(error)) is None:
            raise
        return fail(JOB_FAILED, why)
