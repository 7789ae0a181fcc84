"""Where measurements are kept, and the names of what they are valid for."""

from __future__ import annotations

import os
import platform
import warnings
from pathlib import Path
from typing import Final

from graphs.printable import escaped

SPEEDS: Final = ("cores-", "torch-")
"""How the names of calibration files begin, see envs/calibrate.py."""


NOWHERE: Final = Path(os.devnull)
"""Is no folder: what is to be kept below it is not kept."""


class CacheWarning(UserWarning):
    """Something about the cache that its user may want to mend; the work goes on without."""


def cache_folder() -> Path:
    """``$PLACER_CACHE``, by default ``device-placer`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.

    A folder that cannot be made, with a warning, where there is no home.
    """
    if own := os.environ.get("PLACER_CACHE"):
        return Path(own)
    if caches := os.environ.get("XDG_CACHE_HOME"):
        return Path(caches) / "device-placer"
    try:
        return Path.home() / ".cache" / "device-placer"
    except RuntimeError:
        warnings.warn(
            "this user has no home folder and HOME is not set, so measurements are not kept: set "
            "PLACER_CACHE to a folder for them",
            CacheWarning,
            stacklevel=1,
        )
        return NOWHERE / "device-placer"


def host() -> str:
    """The name of this host."""
    return escaped(platform.node())


def processor() -> str:
    """The model of this host's processor."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    named = (line for line in lines if line.startswith("model name"))
    return escaped(next((line.partition(":")[2].strip() for line in named), platform.machine()))


def speed_files() -> list[Path]:
    """The files with calibrated speeds of devices and links, see envs/calibrate.py."""
    return sorted(path for start in SPEEDS for path in cache_folder().glob(f"{start}*.toml"))
