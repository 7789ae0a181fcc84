"""Register this package's environments with Gymnasium, without importing them.

Importing this module registers them; Gymnasium can also import it by itself::

    gymnasium.make("envs.registration:placer/Placement-v0", problem=problem)
"""

from __future__ import annotations

from typing import Final

import gymnasium

PLACEMENT_ID: Final = "placer/Placement-v0"


def register_environments() -> None:
    """Register every environment that is not registered yet."""
    if PLACEMENT_ID not in gymnasium.registry:
        gymnasium.register(PLACEMENT_ID, entry_point="envs.placement_env:PlacementEnv")


register_environments()
