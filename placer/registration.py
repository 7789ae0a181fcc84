"""Registers the environments with Gymnasium, without importing them.

``import placer`` does so if Gymnasium was imported before; otherwise import this module::

    import placer.registration
    gymnasium.make("placer/Placement-v0", graph="graph.json", cluster="cluster.toml")

Gymnasium can also import it by itself, as in ``gymnasium.make("placer.registration:placer/...")``.
It does not discover plug-ins since version 1.0.
"""

from __future__ import annotations

from typing import Final

import gymnasium

_ENTRIES: Final = {
    "placer/Placement-v0": "envs.placement_env:PlacementEnv",
    "placer/Scheduler-v0": "placer.policies.scheduler_env:SchedulerEnv",
}


def register_environments() -> None:
    """Register the environments that are not registered yet."""
    for name, entry in _ENTRIES.items():
        if name not in gymnasium.registry:
            gymnasium.register(name, entry_point=entry)


register_environments()
