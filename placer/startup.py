"""Version, check of the packages, and environments: all that ``import placer`` runs."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Final

VERSION = "0.2.0"  # the only source, which pyproject.toml reads
PACKAGES: Final = ("envs", "graphs")
ENVIRONMENTS: Final = {
    "placer/Placement-v0": "envs.placement_env:PlacementEnv",
    "placer/Scheduler-v0": "placer.policies.scheduler_env:SchedulerEnv",
}


def check_packages() -> None:
    """Check that ``envs`` and ``graphs`` resolve to the packages beside this ``placer``.

    Other imports would fail later, with a message about a missing module.
    """
    home = Path(__file__).resolve().parents[1]
    for name in PACKAGES:
        place = _place_of(name)
        if place is None:
            raise ImportError(
                f"placer needs its own package {name!r} ({home / name}), which is missing: install "
                "device-placer again."
            )
        if place.resolve() != home / name:
            raise ImportError(
                f"placer needs its own package {name!r} ({home / name}), but {place} comes first "
                f"on the import path. Rename that {name!r}, start Python from another folder, or "
                "run the command `placer`, which does not look into the current folder."
            )


def _place_of(name: str) -> Path | None:
    loaded = sys.modules.get(name)
    spec = loaded.__spec__ if loaded is not None else importlib.util.find_spec(name)
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(spec.origin) if spec.origin else None


def register_environments() -> None:
    """Register the environments with Gymnasium, now or when it is imported.

    Gymnasium has no plug-ins since version 1.0, and importing it takes longer than ``placer``.
    """
    if "gymnasium" not in sys.modules:
        sys.meta_path.insert(0, _GymnasiumFinder())
        return
    import gymnasium

    for name, entry in ENVIRONMENTS.items():
        if name not in gymnasium.registry:
            gymnasium.register(name, entry_point=entry)


class _GymnasiumFinder(MetaPathFinder):
    """Finds Gymnasium once, with a loader that registers the environments."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "gymnasium":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _GymnasiumLoader(spec.loader)
        return spec


class _GymnasiumLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        register_environments()
