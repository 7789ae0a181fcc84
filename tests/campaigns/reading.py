"""Read one file, use what was read, and report the rules that it broke."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import shutil
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from placer.cli.main import main

from . import ROOT
from .formats import Format
from .mutation import CANARY

Codes: TypeAlias = Sequence[int]

LOADING_S: Final = 1.0
"""CPU seconds to load any format; imports are done, as valid files were read before."""
USING_S: Final = 10.0
LOADING_BYTES: Final = 300e6
USING_BYTES: Final = 1e9
LONGEST: Final = 600
"""Largest length of a message in characters."""
SPARE_BYTES: Final = 4 << 30
"""Address space that the child may use beyond its size at the start."""
STATUS: Final = Path("/proc/self/status")


class Failure(NamedTuple):
    """A broken rule: short, without varying numbers, and in full."""

    rule: str
    what: str
    details: str

    @property
    def cause(self) -> str:
        """Return a text that failures of the same cause probably share."""
        return f"{self.rule}: {self.what}"


def read(form: Format, content: bytes, folder: Path, codes: Codes = (0, 1, 2)) -> list[Failure]:
    """Load a file of a format, then use it in every possible way, in its own folder.

    Without 2 among the codes, the file must not be refused.
    """
    scratch = folder / form.name.replace(" ", "-")
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(form.specimen.parent, scratch)
    path = scratch / form.specimen.name
    path.write_bytes(content)
    os.environ["PLACER_CACHE"] = str(scratch)
    failures = _read(form, path, codes)
    if (scratch / CANARY).exists():
        failures.append(Failure("executed", "a text of the file was run as code", ""))
    return failures


def _read(form: Format, path: Path, codes: Codes) -> list[Failure]:
    failures: list[Failure] = []
    with contextlib.chdir(path.parent), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", RuntimeWarning)  # numpy's warning: a number was not checked
        with _limited("loading", LOADING_S, LOADING_BYTES, failures):
            try:
                loaded = form.load(path)
            except (ValueError, OSError) as error:
                if 2 not in codes:
                    raise
                _check_message(str(error), f"the message of {form.name}", failures)
                return failures
            except Exception as error:  # noqa: BLE001 - which is what is looked for
                return [*failures, _raised(error)]
        for command in form.commands(path, loaded):
            _use(command, codes, failures)
    return failures


def limit_memory() -> None:
    """Limit the address space of this process to some GB above its current size."""
    limit = _status_bytes("VmSize") + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _use(command: list[str], codes: Codes, failures: list[Failure]) -> None:
    stderr = io.StringIO()
    name = f"placer {command[0]}"
    with (
        _limited(name, USING_S, USING_BYTES, failures),
        contextlib.redirect_stderr(stderr),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        try:
            code = main(command)
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 1
        except Exception as error:  # noqa: BLE001 - which is what is looked for
            failures.append(_raised(error, name))
            return
    if code not in codes:
        failures.append(Failure("exit code", f"{name}: {code}", stderr.getvalue()))
    _, mark, message = stderr.getvalue().rpartition("placer: ")
    if code and mark:  # a placement that cannot run ends with code 1 and progress, but no message
        _check_message(message.rstrip("\n"), name, failures)


@contextlib.contextmanager
def _limited(name: str, seconds: float, size: float, failures: list[Failure]) -> Iterator[None]:
    """Record a failure if the block takes too much CPU time or memory."""
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    held, began_s = _status_bytes("VmRSS"), time.process_time()
    try:
        yield
    finally:
        spent_s = time.process_time() - began_s
        taken = _status_bytes("VmHWM") - held
        if spent_s > seconds:
            failures.append(Failure("slow", f"{name} above {seconds} s", f"{spent_s:.1f} s"))
        if taken > size:
            failures.append(
                Failure("memory", f"{name} above {size / 1e6:.0f} MB", f"{taken} bytes")
            )


def _check_message(message: str, name: str, failures: list[Failure]) -> None:
    if "\n" in message:
        failures.append(Failure("message", f"{name} has several lines", message))
    elif len(message) > LONGEST:
        failures.append(Failure("message", f"{name} is longer than {LONGEST}", message))
    elif not message.isprintable():
        failures.append(Failure("message", f"{name} is unprintable", repr(message)))


def _raised(error: BaseException, name: str = "loading") -> Failure:
    """Return the failure of an unexpected exception: its type and the project's last line."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if str(ROOT) in f.filename and "/.venv/" not in f.filename]
    last = next((f for f in reversed(own) if "/campaigns/" not in f.filename), frames[-1])
    where = f"{Path(last.filename).name}:{last.lineno} ({last.name})"
    details = "".join(traceback.format_exception(error))
    return Failure("traceback", f"{name}: {type(error).__name__} in {where}", details[-6_000:])


def _status_bytes(key: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024
