"""The command ``placer``; it imports little, so that Ctrl-C is heeded before the rest is there."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from placer.interrupt import EXIT_CODE, NOTHING_KEPT, leave_imports_at_once


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 0, 1 for a job that failed, 2 for bad usage."""
    from placer.cli.commands import run_command

    return run_command(arguments)


def script() -> NoReturn:
    """Entry of the installed command.

    Leaves without Python's farewell: taking torch's and numba's modules down one by one takes up
    to a second, and Ctrl-C shall end the command within one. Nothing is open by then.
    """
    try:
        leave_imports_at_once()
        from placer.cli.standard_output import StandardOutput

        if (old := sys.stdout) is not None:  # it may be closed
            lines = bool(old.line_buffering)
            sys.stdout = StandardOutput(old.buffer, old.encoding, old.errors, line_buffering=lines)
        code = main()
    except SystemExit as leaving:  # argparse, on --help and bad usage
        code = leaving.code if isinstance(leaving.code, int) else 1
    except KeyboardInterrupt:
        print(NOTHING_KEPT, file=sys.stderr)
        code = EXIT_CODE
    try:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
    except BrokenPipeError:
        code = EXIT_CODE
    except OSError as error:
        from placer.cli.failures import fail

        code = fail(EXIT_CODE, error)
    finally:
        os._exit(code)


if __name__ == "__main__":
    script()
