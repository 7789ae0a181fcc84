"""Device maps for users of transformers and accelerate: :func:`device_map`."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from envs.costs.roofline import cluster_of
from envs.hardware.cluster import Cluster, Link
from envs.hardware.discover import is_core, is_here
from envs.hardware.units import milliseconds, parse_bytes
from envs.problem import Problem
from envs.runtime import calibrated, is_of_torch
from graphs.graph import GraphArrays, attributes_of
from graphs.selection import keep_together
from placer.choose import PlacementError
from placer.costed_step import costed_step
from placer.exports.compared_maps import (
    ACCELERATE,
    MADE_BY_BYTES,
    SINGLE,
    MapPredictor,
    MapStep,
    accelerate_maps,
)
from placer.exports.dry_run import HOST
from placer.exports.format import SMALLEST_CHANGE
from placer.exports.module_tree import check_has_weights, is_inside, whole_modules
from placer.job import Job, SearchConfig
from placer.pipeline.optimization import optimize_problem
from placer.progress import Progress, progress_for
from placer.sources.names import PREFIX
from placer.sources.target import Target

if TYPE_CHECKING:
    from torch import nn

    from graphs.extract import Workload

BUDGET: Final = "5s"
HOSTS: Final = ("cpu", "host")
"""Kinds of described devices that are the CPU beside GPUs."""


class PlannedMap(dict[str, int | str]):
    """A device map, a dict of modules and parameters, with its predicted step.

    Attributes:
        predicted_step_s: predicted step with this map.
        others: the maps that it was compared with under the same memory limits, {name: map with
            predicted step}: every single device, and those that accelerate makes itself.
        unchecked: what is not known about whether this map runs, "" if all is.
    """

    def __init__(self, chosen: MapStep, others: Mapping[str, MapStep], unchecked: str = "") -> None:
        super().__init__(chosen.content)
        self.predicted_step_s = chosen.step_s
        self.others = dict(others)
        self.unchecked = unchecked if len(set(chosen.content.values())) > 1 else ""

    @property
    def accelerate_predicted_step_s(self) -> float | None:
        """Return the predicted step of accelerate's ``infer_auto_device_map``.

        It is inf if that map cannot run, None without accelerate or if it makes none.
        """
        own = self.others.get(ACCELERATE)
        return None if own is None else own.step_s

    @property
    def single_device_predicted_step_s(self) -> float:
        """Return the predicted step of the best single device, inf if the model fits on none."""
        return min(each.step_s for name, each in self.others.items() if name.startswith(SINGLE))

    @property
    def summary(self) -> str:
        """Return predicted steps, and what was not checked, as a sentence.

        ``others`` says why a step is impossible.
        """
        steps_s = {
            "this map": self.predicted_step_s,
            **{name: own.step_s for name, own in self.others.items() if name in MADE_BY_BYTES},
            "best single device": self.single_device_predicted_step_s,
        }
        texts = [
            f"{name} {milliseconds(step_s)} ms" if math.isfinite(step_s) else f"{name} impossible"
            for name, step_s in steps_s.items()
        ]
        return "predicted step: " + "; ".join([*texts, *filter(None, [self.unchecked])])


def device_map(
    model: nn.Module | Workload | str,
    inputs: Any = None,
    *,
    training: bool = False,
    devices: str | Path | Cluster = "auto",
    memory: Mapping[str | int, int | str] | None = None,
    budget: str = BUDGET,
    progress: bool = True,
) -> PlannedMap:
    """Return the device map with the shortest predicted step, for transformers and accelerate.

    ::

        device_map = placer.device_map("llama-2-7b", devices="8xh100.toml", memory={0: "10GiB"})
        model = AutoModelForCausalLM.from_pretrained(name, device_map=device_map)
        device_map.predicted_step_s, device_map.accelerate_predicted_step_s

    Modules that transformers does not divide (``_no_split_modules``) stay whole. The map is
    compared with every single device and with the maps that accelerate makes by bytes alone, and is
    never slower than these by prediction. Beside GPUs, accelerate computes nothing on the CPU: it
    offloads weights there and sends them in every step. A map that does so is returned only if it
    is accelerate's own and nothing else fits.

    Args:
        model: a model; a name as after ``hf:`` in targets, such as ``"gpt2"`` or
            ``"gpt2?batch=8&sequence=256"``, for which nothing is downloaded; or a workload.
        inputs: of a model: example inputs, as for :func:`placer.optimize`. A model of transformers
            needs none: as with a name, they are made up.
        training: plan for training steps; a model of transformers then gets labels. A model with a
            loss function is given as a workload.
        devices: ``"auto"``, all GPUs of this machine; names; or a cluster (file). Devices whose
            names torch does not know stand for GPUs 0, 1, ... in the order of the cluster, those of
            kind "cpu" or "host" for the CPU.
        memory: {device: bytes, or a size such as ``"10GiB"``} that may be used; GPUs also by
            number, as in ``max_memory`` of accelerate.
        budget: search budget, as for :func:`placer.optimize`.
        progress: show progress on stderr.

    Raises:
        ExtractionError: no extractor takes the model.
        ValueError: an argument is invalid, the model has no parameters or buffers, or there is no
            GPU and no other devices are given.
        OSError: a file cannot be read.
        PlacementError: the model fits on these devices with no device map.
    """
    source = _source(model, inputs, training=training)
    search = SearchConfig(budget=budget, measure=False)
    whole = _cluster(devices, memory or {})
    written = written_names(whole)
    with progress_for(sys.stderr if progress else None) as shown:
        return plan_map(source, whole, written, search, shown)


def plan_map(
    source: Target | Workload,
    cluster: Cluster,
    written: Mapping[str, str],
    search: SearchConfig,
    progress: Progress,
) -> PlannedMap:
    """Return the best device map of a model; ``written`` is {device: its name in maps}."""
    on_host = [name for name in cluster.names if written[name] == HOST]
    used = [d for d, name in enumerate(cluster.names) if name not in on_host]
    part = cluster.part(used) if used else cluster
    job = Job.of(source, part, search=search).loaded(progress)
    step = costed_step(job, progress)
    extraction = step.extraction
    assert extraction is not None
    model = extraction.step.model
    check_has_weights(model)
    paths = [attributes_of(step.graph, op)["module"] for op in step.graph]
    kept = [
        module for module in whole_modules(model) if any(is_inside(path, module) for path in paths)
    ]
    graph = keep_together(step.graph, kept) if kept else step.graph
    problem = Problem.of(GraphArrays.from_graph(graph), step.cluster)
    names = {name: written[name] for name in part.names}
    memory = {written[device.name]: device.memory_bytes for device in cluster.devices}
    own = accelerate_maps(model, memory)
    offloads = any(HOST in content.values() for content in own.values())
    links = _host_links(cluster, written) if offloads and used else {}
    maps = MapPredictor(extraction, problem, names, links)
    others = maps.singles() | {name: maps.step(content) for name, content in own.items()}
    nearest: list[MapStep] = []
    try:
        result = optimize_problem(problem, job.search, progress)
        progress.stage("Comparing device maps")
        nearest = [maps.nearest(candidate.placement) for candidate in result.candidates]
    except PlacementError:
        # What does not fit can still be offloaded.
        if not any(math.isfinite(each.step_s) for each in others.values()):
            raise
    return PlannedMap(_chosen(list(others.values()), nearest), others, maps.unchecked)


def _chosen(others: Sequence[MapStep], nearest: Sequence[MapStep]) -> MapStep:
    """Return the fastest map, one of a search only if it is noticeably faster than all others."""
    simplest = min(others, key=lambda each: each.step_s)
    fastest = min(nearest, key=lambda each: each.step_s, default=simplest)
    is_faster = fastest.step_s < simplest.step_s * (1 - SMALLEST_CHANGE)
    chosen = fastest if is_faster else simplest
    if not math.isfinite(chosen.step_s):
        raise PlacementError(f"No device map fits: {nearest[0].why}.")
    return chosen


def _host_links(cluster: Cluster, written: Mapping[str, str]) -> dict[str, Link]:
    """Return the links from the CPU to other devices, {device as written: link}."""
    host = next(name for name in cluster.names if written[name] == HOST)
    if not cluster.links and all(map(is_here, cluster.names)):
        cluster = calibrated(cluster)
    links = {written[name]: cluster.link_between(host, name) for name in cluster.names}
    return {name: link for name, link in links.items() if link is not None}


def written_names(cluster: Cluster) -> dict[str, str]:
    """Return {device: its name in device maps}.

    Names of torch stay. Others are the CPU, if of a kind that is called so, or GPUs, in order.
    """
    written = {name: name for name in cluster.names if is_of_torch(name)}
    numbers = (name for n in range(2 * len(cluster)) if (name := f"cuda:{n}") not in written)
    for device in cluster.devices:
        if device.name not in written:
            written[device.name] = HOST if device.kind in HOSTS else next(numbers)
    return written


def _source(model: nn.Module | Workload | str, inputs: Any, *, training: bool) -> Target | Workload:
    from graphs.extract import Workload

    if isinstance(model, str):
        if inputs is not None:
            raise ValueError(
                "inputs are for a model: a name says what to make up, as in gpt2?batch=8"
            )
        name = model if model.startswith(PREFIX) else f"{PREFIX}{model}"
        return Target(name=name, training=training)
    if isinstance(model, Workload):
        model.check_complete(inputs=inputs)
        return model
    if inputs is None:
        from placer.sources.huggingface import made_up

        return made_up(model, training=training)
    return Workload.of(model, inputs, training=training)


def _cluster(devices: str | Path | Cluster, memory: Mapping[str | int, int | str]) -> Cluster:
    """Return the devices with their memory limits."""
    cluster = cluster_of(devices)
    if devices == "auto" and is_core(cluster.names[0]):
        raise ValueError(
            "there is no GPU here to map to: describe the devices in a cluster file and give its "
            "name, or name cores that stand for GPUs, as in core:0,core:1"
        )
    own = {name: name for name in cluster.names}
    own |= {as_map: name for name, as_map in written_names(cluster).items()}
    limits: dict[str, int] = {}
    for key, size in memory.items():
        name = own.get(f"cuda:{key}" if isinstance(key, int) else key)
        if name is None:
            raise ValueError(
                f"memory of {key} is limited, but the devices are {', '.join(cluster.names)}"
            )
        limits[name] = parse_bytes(size) if isinstance(size, str) else size
    if not limits:
        return cluster
    if isinstance(devices, str) and not devices.endswith(".toml"):
        return cluster_of(",".join(cluster.names), limits)
    limited = tuple(
        replace(device, memory_bytes=limits.get(device.name, device.memory_bytes))
        for device in cluster.devices
    )
    return replace(cluster, devices=limited)
