"""Entry point of ``placer``; it imports little, so that Ctrl-C works while the rest is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from placer.interrupt import EXIT_CODE, NOTHING_KEPT, leave_imports_at_once


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 1 if the job failed, 2 for bad usage."""
    from placer.cli.commands import run_command

    return run_command(arguments)


def script() -> NoReturn:
    """Run the installed command and exit.

    Exits without Python's finalization: unloading torch's and numba's modules takes up to a second,
    and Ctrl-C should end the command within one. No files are open by then.
    """
    try:
        leave_imports_at_once()
        from placer.cli.failures import StandardOutput

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
