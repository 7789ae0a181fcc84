"""The log of a training: a line of CSV for every rollout, and TensorBoard where it is installed."""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from graphs.whole_file import written_file

COLUMNS: Final = (
    "seed",
    "rollout",
    "stage",
    "decodes",
    "mean_ratio",  # geometric, of step / best of {single device, HEFT, ETF}
    "best_ratio",
    "log_std",
    "policy_loss",
    "value_loss",
    "entropy_loss",
    "approx_kl",
    "clip_fraction",
    "learning_rate",
    "spent_s",
)
INDICES: Final = ("seed", "rollout", "stage", "decodes")


class Log:
    """``NAME.csv``, continued where a checkpoint left it, and ``NAME.tensorboard/seed-N``."""

    def __init__(self, path: Path, *, keep_bytes: int = 0) -> None:
        """Continue ``path``.csv after ``keep_bytes``; what comes behind is told anew.

        Raises:
            ValueError: the log is shorter than that.
            OSError: it cannot be written.
        """
        self.path = path.with_name(f"{path.name}.csv")
        self._file = written_file(self.path).open("r+b" if keep_bytes else "wb")
        if self._file.seek(0, 2) < keep_bytes:
            self._file.close()
            raise ValueError(
                f"{self.path} is shorter than its checkpoint says: give --fresh to begin anew"
            )
        self._file.seek(keep_bytes)
        self._file.truncate()
        if not keep_bytes:
            self._write(COLUMNS)
        self._folder = written_file(path.with_name(f"{path.name}.tensorboard"))
        if not keep_bytes:
            for old in self._folder.glob("seed-*"):
                shutil.rmtree(old)
        self._board: Any = None
        self._board_seed: object = None
        self._excepthook = threading.excepthook

    def __enter__(self) -> Log:
        """Itself."""
        threading.excepthook = self._told
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the files.

        Raises:
            OSError: one cannot be written to its end, and there was no error before.
        """
        threading.excepthook = self._excepthook
        with suppress(OSError) if error is not None else nullcontext():
            self._file.close()
        with suppress(OSError) if error is not None else nullcontext():
            if self._board is not None:
                self._board.close()

    def _told(self, args: threading.ExceptHookArgs) -> None:
        """Print the error of a thread, but not of TensorBoard's: the next write raises it."""
        if not type(args.thread).__module__.startswith("tensorboard."):
            self._excepthook(args)

    def kept_bytes(self) -> int:
        """How long it is, all of it on the disk, for a checkpoint to count on."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def tell(self, row: Mapping[str, float]) -> None:
        """Write a row, so that it is there whatever happens next.

        Raises:
            OSError: it cannot be written; names the file.
        """
        self._write(_shown(row[column]) for column in COLUMNS)
        with _named(self._folder):
            board = self._board_for(row)
            for column in COLUMNS:
                if board is not None and column not in INDICES and math.isfinite(row[column]):
                    board.add_scalar(column, row[column], int(row["decodes"]))

    def _write(self, items: Any) -> None:
        with _named(self.path):
            self._file.write((",".join(items) + "\n").encode())
            self._file.flush()

    def _board_for(self, row: Mapping[str, float]) -> Any:
        """The writer of a seed, None without TensorBoard."""
        if self._board_seed != row["seed"] and importlib.util.find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            if self._board is not None:
                self._board.close()
            folder = self._folder / f"seed-{row['seed']:g}"
            self._board_seed = row["seed"]
            self._board = SummaryWriter(str(folder), purge_step=int(row["decodes"]))
        return self._board


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Give errors of the system the name of what is written."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _shown(value: float) -> str:
    """In all digits; nothing where there is no value."""
    return "" if math.isnan(value) else repr(value)
