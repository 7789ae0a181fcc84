from __future__ import annotations

import contextlib
import importlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NoReturn

import pytest

from placer.cli.main import script
from placer.interrupt import Interrupt, leave_imports_at_once, uninterrupted


def test_ctrl_c_does_nothing_while_results_are_written_and_is_given_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with contextlib.suppress(OSError), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        raise OSError
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Restore the handler of Ctrl-C after the test."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


MODULE = """
import signal
try:
    signal.raise_signal(signal.SIGINT)
except BaseException:
    pass
"""


@pytest.mark.parametrize("outer", [contextlib.nullcontext, Interrupt])
def test_ctrl_c_while_a_module_is_imported_ends_the_command_at_once(
    outer: Callable[[], AbstractContextManager[object]],
    ctrl_c: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "catches_everything.py").write_text(MODULE)
    monkeypatch.delitem(sys.modules, "catches_everything", raising=False)
    leave_imports_at_once()
    with outer():
        importlib.import_module("catches_everything")
    assert ended[:1] == [1]
    assert capfd.readouterr().err.startswith("placer: stopped before")
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_ctrl_c_that_is_ignored_stays_so(ctrl_c: None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    leave_imports_at_once()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_other_threads_write_too() -> None:
    written: list[int] = []

    def write() -> None:
        with uninterrupted():
            written.append(1)

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert written == [1]


@pytest.mark.parametrize("while_in", ["cli.main.build_parser", "cli.output.StandardOutput"])
def test_ctrl_c_before_a_command_runs_is_reported_in_a_line(
    while_in: str,
    ctrl_c: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr("os._exit", sys.exit)
    monkeypatch.setattr("sys.argv", ["placer", "machine"])
    monkeypatch.setattr(f"placer.{while_in}", interrupted)
    with pytest.raises(SystemExit) as ended:
        script()
    assert ended.value.code == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
