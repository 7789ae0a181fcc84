"""Where measurements are kept, and the names of what they are valid for."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Final

SPEEDS: Final = ("cores-", "torch-")
"""How the names of calibration files begin, see envs/calibrate.py."""


def cache_folder() -> Path:
    """``$PLACER_CACHE``, by default ``device-placer`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("PLACER_CACHE") or caches / "device-placer")


def host() -> str:
    """The name of this host."""
    return platform.node()


def processor() -> str:
    """The model of this host's processor."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    named = (line for line in lines if line.startswith("model name"))
    return next((line.partition(":")[2].strip() for line in named), platform.machine())


def speed_files() -> list[Path]:
    """The files with calibrated speeds of devices and links, see envs/calibrate.py."""
    return sorted(path for start in SPEEDS for path in cache_folder().glob(f"{start}*.toml"))
