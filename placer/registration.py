"""Registers all environments with Gymnasium, without importing them.

Importing this module registers them, so either of these works::

    import placer.registration
    gymnasium.make("placer/PlacementParams-v0", pool=pool)
    gymnasium.make("placer/GeneratedPlacement-v0", pool=pool)

    gymnasium.make("placer.registration:placer/Placement-v0", problem=problem)

Gymnasium 1.0 and later do not discover plug-ins.
"""

from __future__ import annotations

from typing import Final

import gymnasium

from envs import registration

PARAMS_ID: Final = "placer/PlacementParams-v0"
GENERATED_ID: Final = "placer/GeneratedPlacement-v0"
_ENTRIES: Final = {
    PARAMS_ID: "placer.policies.params_env:PlacementParamsEnv",
    GENERATED_ID: "placer.policies.generated_env:GeneratedPlacementEnv",
}


def register_environments() -> None:
    """Register the environments of ``placer`` and ``envs`` that are not registered yet."""
    registration.register_environments()
    for name, entry in _ENTRIES.items():
        if name not in gymnasium.registry:
            gymnasium.register(name, entry_point=entry)


register_environments()
