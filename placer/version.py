"""The version of this distribution, apart from the package so that its modules can import it."""

from __future__ import annotations

from typing import Final

VERSION: Final = "0.1.0"
