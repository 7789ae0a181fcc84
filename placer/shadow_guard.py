"""Check that no user folder shadows the packages ``envs`` and ``graphs``.

Imports would otherwise fail later, with a message about a missing module.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Final

FLOORS: Final = ("envs", "graphs")


def refuse_shadows() -> None:
    """Check that ``envs`` and ``graphs`` resolve to the packages beside this ``placer``.

    Raises:
        ImportError: another package or folder comes first on the import path.
    """
    home = Path(__file__).resolve().parents[1]
    for name in FLOORS:
        place = _place_of(name)
        if place is not None and place.resolve() == home / name:
            continue
        found = f"{place} comes first on the import path" if place else "it is nowhere to be found"
        raise ImportError(
            f"placer needs its own package {name!r} ({home / name}), but {found}. "
            f"Rename that {name!r}, start Python from another folder, or run the command `placer`, "
            "which does not look into the current folder."
            if place
            else f"placer needs its own package {name!r} ({home / name}), but {found}: "
            "install device-placer again."
        )


def _place_of(name: str) -> Path | None:
    loaded = sys.modules.get(name)
    spec = loaded.__spec__ if loaded is not None else importlib.util.find_spec(name)
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(spec.origin) if spec.origin else None
