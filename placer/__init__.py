"""Find the device for each op of a PyTorch model that minimizes the measured step time.

::

    import placer

    result = placer.optimize(model, example_inputs, loss=loss, devices="auto", budget="60s")
    result.device_of("mixed_5b.branch1x1")
    with placer.apply(model, result) as placed:
        loss_value = placed.step(batch)

Submodules are imported on first use. The environments ``placer/Placement-v0`` and
``placer/Scheduler-v0`` are registered with Gymnasium, whichever of the two is imported first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from placer.startup import VERSION, check_packages, register_environments

if TYPE_CHECKING:
    from envs.backend import Backend, StepResult
    from envs.executors.cores.errors import WorkerError
    from envs.hardware.cluster import Cluster, Device, Link
    from envs.measured import Measured
    from envs.placement import Placement
    from envs.replication import Replication
    from envs.simulator import Simulated, Simulator
    from graphs.graph import Graph
    from graphs.optimizer import Optimizer
    from graphs.workload import ExtractionError, Workload
    from placer.api import evaluate, extract, optimize, train
    from placer.applying import apply, export
    from placer.choose import PlacementError
    from placer.evaluation import Evaluation, measured
    from placer.exports.renaming import ExportError
    from placer.job import Constraints, SearchConfig
    from placer.pipeline.device_maps import device_map
    from placer.policies import load as load_policy
    from placer.replicate.result import ReplicatedResult
    from placer.result import Result
    from placer.search.candidate import Candidate, Kind
    from placer.search.registry import register_placer

__version__ = VERSION
_HOMES = {  # name: module, or module:name there
    "Backend": "envs.backend",
    "Candidate": "placer.search.candidate",
    "Cluster": "envs.hardware.cluster",
    "Constraints": "placer.job",
    "Device": "envs.hardware.cluster",
    "Evaluation": "placer.evaluation",
    "ExportError": "placer.exports.renaming",
    "ExtractionError": "graphs.workload",
    "Graph": "graphs.graph",
    "Kind": "placer.search.candidate",
    "Link": "envs.hardware.cluster",
    "Measured": "envs.measured",
    "measured": "placer.evaluation",
    "Optimizer": "graphs.optimizer",
    "Placement": "envs.placement",
    "PlacementError": "placer.choose",
    "ReplicatedResult": "placer.replicate.result",
    "Replication": "envs.replication",
    "Result": "placer.result",
    "SearchConfig": "placer.job",
    "Simulated": "envs.simulator",
    "Simulator": "envs.simulator",
    "StepResult": "envs.backend",
    "WorkerError": "envs.executors.cores.errors",
    "Workload": "graphs.workload",
    "apply": "placer.applying",
    "device_map": "placer.pipeline.device_maps",
    "evaluate": "placer.api",
    "export": "placer.applying",
    "extract": "placer.api",
    "load_policy": "placer.policies:load",
    "optimize": "placer.api",
    "register_placer": "placer.search.registry",
    "train": "placer.api",
}
__all__ = [
    "Backend",
    "Candidate",
    "Cluster",
    "Constraints",
    "Device",
    "Evaluation",
    "ExportError",
    "ExtractionError",
    "Graph",
    "Kind",
    "Link",
    "Measured",
    "Optimizer",
    "Placement",
    "PlacementError",
    "ReplicatedResult",
    "Replication",
    "Result",
    "SearchConfig",
    "Simulated",
    "Simulator",
    "StepResult",
    "WorkerError",
    "Workload",
    "__version__",
    "apply",
    "device_map",
    "evaluate",
    "export",
    "extract",
    "load_policy",
    "measured",
    "optimize",
    "register_placer",
    "train",
]

check_packages()
register_environments()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'placer' has no attribute {name!r}")
    from importlib import import_module

    module, _, attribute = _HOMES[name].partition(":")
    return getattr(import_module(module), attribute or name)


def __dir__() -> list[str]:
    return sorted(__all__)
