"""A step that is sent to nodes of a Ray cluster, which run its placements on their own devices."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from envs.backend import measurements
from envs.executors.cores.errors import WorkerError
from envs.hardware.cluster import Cluster
from envs.hardware.discover import device_kind, physical_cores
from envs.measurement import Measurement
from envs.placement import Placement
from envs.problem import Problem
from envs.runtime import extraction_for, runtime_for
from placer.sources.target import target_modules

if TYPE_CHECKING:
    from envs.measured import Measured
    from graphs.extract import Workload


class OtherDevicesError(ValueError):
    """The devices of a node are of other kinds than those that they should stand for."""


class Runs(NamedTuple):
    """Arguments of :meth:`envs.runtime.Runtime.backend`, which runs placements."""

    predicted_s: tuple[float, ...] = ()
    rounds: int | None = None
    seconds: float = math.inf


class Loaded(Protocol):
    """A step that a process of a node is ready to run."""

    def measure(self, placements: Sequence[Placement], runs: Runs) -> list[Measurement]:
        """Run placements in the same rounds."""
        ...

    def close(self) -> None:
        """Release the devices."""
        ...


class Loadable(Protocol):
    """A step that is sent to nodes and loaded there."""

    def loaded(self, names: Sequence[str]) -> Loaded:
        """Return the step on devices of this process, which have these names."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStep:
    """A step with the problem of placing it, whose costs decide the order of ops on every node.

    ``cluster`` has the devices with all memory that they may use, that of the problem without what
    is held there before a step.
    """

    workload: bytes
    problem: Problem
    cluster: Cluster
    extractor: str
    overlap: bool = False

    @classmethod
    def of(
        cls,
        workload: Workload,
        problem: Problem,
        cluster: Cluster,
        *,
        extractor: str = "auto",
        overlap: bool = False,
    ) -> NodeStep:
        """Encode a step.

        Raises:
            ValueError: the model, its loss or its inputs cannot be pickled.
        """
        return cls(
            workload=_pickled(workload),
            problem=problem,
            cluster=cluster,
            extractor=extractor,
            overlap=overlap,
        )

    def loaded(self, names: Sequence[str]) -> StepOnDevices:
        """Extract the step again, for devices of this process.

        Raises:
            OtherDevicesError: the devices are of other kinds.
            ValueError: the step has other ops here.
        """
        return StepOnDevices(self, names)


class StepOnDevices:
    """A step on devices of this process; its workers run until other ``Runs`` need new ones."""

    def __init__(self, step: NodeStep, names: Sequence[str]) -> None:
        import torch

        if "cpu" in names:
            torch.set_num_threads(len(physical_cores()))  # Ray would have one for each processor
        for name, device in zip(names, step.cluster.devices, strict=True):
            if (kind := device_kind(name)) != device.kind:
                raise OtherDevicesError(f"its {name} is {kind}, not {device.kind}")
        self._home = step.cluster
        self._home_names = dict(zip(names, step.cluster.names, strict=True))
        own = _renamed(step.cluster, names)
        workload = torch.load(io.BytesIO(step.workload), weights_only=False)
        extraction = extraction_for(workload, names, step.extractor)
        self._runtime = runtime_for(extraction, own, overlap=step.overlap)
        if tuple(self._runtime.graph) != step.problem.graph.ids:
            raise ValueError("the model that it loads has other ops")
        self._problem = _renamed_problem(step.problem, names)
        self._joined = self._runtime.joined(own)
        self._runs: Runs | None = None
        self._backend: Measured | None = None

    def measure(self, placements: Sequence[Placement], runs: Runs) -> list[Measurement]:
        """Run placements, of the devices that these stand for, in the same rounds.

        Peaks of memory are those of the devices that these stand for, too.
        """
        if self._backend is None or runs != self._runs:
            self.close()
            self._backend = self._runtime.backend(
                self._problem, runs.predicted_s, rounds=runs.rounds, seconds=runs.seconds
            )
            self._runs = runs
        found = measurements(self._backend.evaluate(list(map(self._own, placements))))
        if self._backend.interrupted:
            raise WorkerError("the measurement was interrupted")
        return [
            replace(
                each,
                peak_memory_bytes=self._at_home(each.peak_memory_bytes),
                reserved_memory_bytes=self._at_home(each.reserved_memory_bytes),
            )
            for each in found
        ]

    def close(self) -> None:
        """End the workers."""
        if self._backend is not None:
            self._backend.close()
            self._backend = None

    def _at_home(self, sizes: Mapping[str, int]) -> dict[str, int]:
        return {self._home_names.get(name, name): size for name, size in sizes.items()}

    def _own(self, placement: Placement) -> Placement:
        """Return a placement on the devices of this process, or on all of them together."""
        own = self._problem.cluster
        if placement.device_names != self._home.names:
            assert self._joined is not None
            own = self._joined
        return replace(placement, cluster=own.name, device_names=own.names)


def _renamed(cluster: Cluster, names: Sequence[str]) -> Cluster:
    """Return a cluster whose devices have other names."""
    own = dict(zip(cluster.names, names, strict=True))
    return replace(
        cluster,
        name="this-machine:" + ",".join(names),
        devices=tuple(replace(each, name=own[each.name]) for each in cluster.devices),
        links=tuple(
            replace(each, between=tuple(map(own.__getitem__, each.between)))
            for each in cluster.links
        ),
        hosts=tuple(
            replace(each, devices=tuple(map(own.__getitem__, each.devices)))
            for each in cluster.hosts
        ),
    )


def _renamed_problem(problem: Problem, names: Sequence[str]) -> Problem:
    """Return a problem, with the same costs, whose devices have other names."""
    own = dict(zip(problem.cluster.names, names, strict=True))
    allowed = tuple(
        None if each is None else tuple(own[name] for name in each if name in own)
        for each in problem.graph.allowed
    )
    return replace(
        problem,
        graph=replace(problem.graph, allowed=allowed),
        cluster=_renamed(problem.cluster, names),
    )


def _pickled(workload: Workload) -> bytes:
    """Return a workload with the classes of its target, whose file nodes need not have."""
    import torch

    cloudpickle: Any = import_module("ray.cloudpickle")
    buffer, modules = io.BytesIO(), target_modules()
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        torch.save(workload, buffer, pickle_module=cloudpickle)
    except (TypeError, ValueError, AttributeError, RuntimeError, pickle.PicklingError) as error:
        raise ValueError(
            f"{type(workload.model).__name__} cannot be sent to the nodes of a Ray cluster, since "
            f"Python cannot pickle it: {error}"
        ) from error
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)
    return buffer.getvalue()
