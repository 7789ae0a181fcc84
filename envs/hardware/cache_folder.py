"""The cache folder for measurements, and names of the machine that they are valid for."""

from __future__ import annotations

import os
import platform
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Final

from graphs.text import escaped

SPEEDS: Final = ("cores-*.toml", "torch-*.toml", "collectives-*.json", "replicas-*.json")
"""Names of calibration files, see envs/costs/calibrate.py, placer/parallel/collectives.py and
placer/replicate/fitting.py."""


NOWHERE: Final = Path(os.devnull)
"""Not a folder: nothing can be stored below it."""


class CacheWarning(UserWarning):
    """A problem of the cache that its user may want to fix; work continues without the cache."""


def cache_folder() -> Path:
    """Return ``$PLACER_CACHE``, or ``device-placer`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.

    Without a home folder, warn and return a folder that cannot be created.
    """
    if folder := os.environ.get("PLACER_CACHE"):
        return Path(folder)
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


def unwritable(folder: object) -> str:
    """Return what to tell the user of a cache folder in which nothing can be kept."""
    return (
        f"{folder} cannot be written: op times are measured anew each time. Set PLACER_CACHE to a "
        "folder of yours."
    )


def is_writable(folder: Path) -> bool:
    """Return whether files can be written in a folder, which need not exist yet."""
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryFile(dir=existing):
            return True
    except OSError:
        return False


@cache
def warn_if_unwritable(folder: Path) -> None:
    """Warn once if files cannot be written in a folder; a missing home has a warning of its own."""
    if NOWHERE not in folder.parents and not is_writable(folder):
        warnings.warn(unwritable(folder), CacheWarning, stacklevel=1)


def host() -> str:
    """Return the name of this host."""
    return escaped(platform.node())


def processor() -> str:
    """Return the processor model of this host."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return escaped(next(models, platform.machine()))


def speed_files() -> list[Path]:
    """Return the calibration files of devices, links and collectives."""
    return sorted(path for name in SPEEDS for path in cache_folder().glob(name))
