"""Standard output whose errors say that they are its own."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager


class StandardOutput(io.TextIOWrapper):
    """Standard output that names itself in its first error, and takes everything afterwards."""

    def write(self, text: str) -> int:
        """Write text, as every file does."""
        with self._named():
            super().write(text)
        return len(text)

    def flush(self) -> None:
        """Hand on what was written."""
        with self._named():
            super().flush()

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            with open(os.devnull, "wb") as nothing:  # noqa: PTH123 - a device
                os.dup2(nothing.fileno(), self.fileno())
            raise OSError(error.errno, error.strerror, "standard output") from None
