"""Log of a training: a CSV line for every rollout, and TensorBoard if it is installed."""

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

from graphs.files import written_file

COLUMNS: Final = (
    "seed",
    "rollout",
    "stage",
    "decodes",
    "mean_ratio",  # geometric, of step / best of {single device, HEFT, ETF}
    "best_ratio",
    "failed",  # decodes whose placements cannot be run: over memory, or a failed measurement
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
    """``NAME.csv``, continued from a checkpoint, and ``NAME.tensorboard/seed-N``."""

    def __init__(self, path: Path, *, keep_bytes: int = 0) -> None:
        """Continue ``path``.csv after ``keep_bytes``; later lines are cut off."""
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
        """Return self."""
        threading.excepthook = self._print_error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the files."""
        threading.excepthook = self._excepthook
        with suppress(OSError) if error is not None else nullcontext():
            self._file.close()
        with suppress(OSError) if error is not None else nullcontext():
            if self._board is not None:
                self._board.close()

    def _print_error(self, args: threading.ExceptHookArgs) -> None:
        """Print a thread's error, except TensorBoard's, which the next write raises."""
        if not type(args.thread).__module__.startswith("tensorboard."):
            self._excepthook(args)

    def kept_bytes(self) -> int:
        """Flush the log to disk and return its length, for a checkpoint."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def write(self, row: Mapping[str, float]) -> None:
        """Write a row and flush it."""
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
        """Return the writer of a seed, or None without TensorBoard."""
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
    """Add the path to an OSError."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _shown(value: float) -> str:
    """Return all digits, or "" for NaN."""
    return "" if math.isnan(value) else repr(value)
