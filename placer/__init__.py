"""Find the device for each op of a PyTorch model that minimizes the measured step time.

::

    import placer

    placement = placer.optimize(model, example_inputs, loss=loss, devices="auto", budget="60s")
    placement.device_of("mixed_5b.branch1x1")
    with placer.apply(model, placement) as placed:
        loss = placed.step(batch)

Submodules are imported on first use. If Gymnasium was imported before this package, the
environments ``placer/Placement-v0``, ``placer/GeneratedPlacement-v0`` and
``placer/PlacementParams-v0`` are registered; otherwise ``import placer.registration`` does it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from placer.shadow_guard import refuse_shadows

if TYPE_CHECKING:
    from envs.placement import Placement
    from envs.replicas.spec import Replication
    from graphs.optimizer import Optimizer
    from placer.api import optimize, train, weigh_devices
    from placer.applying import apply, export_placement
    from placer.outcome import Optimization

__version__ = "0.1.0"
__all__ = [
    "Optimization",
    "Optimizer",
    "Placement",
    "Replication",
    "__version__",
    "apply",
    "export_placement",
    "optimize",
    "train",
    "weigh_devices",
]

_HOMES = {
    "apply": "placer.applying",
    "export_placement": "placer.applying",
    "optimize": "placer.api",
    "train": "placer.api",
    "weigh_devices": "placer.api",
    "Optimization": "placer.outcome",
    "Optimizer": "graphs.optimizer",
    "Placement": "envs.placement",
    "Replication": "envs.replicas.spec",
}

refuse_shadows()
if "gymnasium" in sys.modules:  # make gymnasium.make("placer/...") work
    import placer.registration as _registration  # noqa: F401 - importing it registers them


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'placer' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
