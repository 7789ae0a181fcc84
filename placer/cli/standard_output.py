"""Standard output whose errors name it."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager


class StandardOutput(io.TextIOWrapper):
    """Standard output that names itself in its first error and discards everything after it."""

    def write(self, text: str) -> int:
        """Write text, like any file."""
        with self._named():
            super().write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the buffer."""
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
