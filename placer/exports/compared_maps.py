"""Steps of device maps, predicted as accelerate would run them; the maps of accelerate itself."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Final

import numpy as np
from torch import nn

from envs.hardware.cluster import Link
from envs.placement import Placement
from envs.problem import Problem, each_in_nanoseconds
from graphs.extract import Extraction
from placer.exports.device_map import as_written, device_map
from placer.exports.dry_run import HOST, main_device_of, run_of, unchecked
from placer.exports.format import StepPredictor
from placer.exports.module_tree import around, canonical_paths, whole_modules
from placer.exports.placed_modules import PlacedModules

ACCELERATE: Final = "accelerate"
BALANCED: Final = "accelerate, balanced"
SINGLE: Final = "single "
"""Names of maps: of ``infer_auto_device_map``, of ``device_map="auto"``, of one device."""
MADE_BY_BYTES: Final = (ACCELERATE, BALANCED)


@dataclass(frozen=True, slots=True, kw_only=True)
class MapStep:
    """A device map and its predicted step, inf if it cannot run: ``why`` then gives the reason."""

    content: Mapping[str, int | str]
    step_s: float
    why: str = ""


class MapPredictor:
    """Predicts the steps of device maps of one model on the devices of one problem."""

    def __init__(
        self,
        extraction: Extraction,
        problem: Problem,
        written: Mapping[str, str],
        host_links: Mapping[str, Link] | None = None,
    ) -> None:
        """Take the costs of a step's ops; ``written`` is {device of the problem: its name in maps}.

        ``host_links`` are the links to devices, as written, from the memory of the CPU beside them.
        """
        self._extraction = extraction
        self._host_links = dict(host_links or {})
        self._problem = problem
        self._written = dict(written)
        self._on_first = {
            written[name]: Placement.of(
                problem.graph,
                problem.cluster,
                np.full(problem.op_count, d),
                np.zeros(problem.op_count),
            )
            for d, name in enumerate(problem.cluster.names)
        }
        first = self._on_first[written[problem.cluster.names[0]]]
        self._placed = PlacedModules.of(extraction, first, renamed=self._written)
        self._path_of = canonical_paths(self._placed.model)
        self._predictors: dict[str, StepPredictor] = {}

    @property
    def unchecked(self) -> str:
        """Return what is not known about whether maps of several devices run, "" if all is."""
        return unchecked(self._placed)

    def singles(self) -> dict[str, MapStep]:
        """Return the maps of one device each, by name."""
        names = self._written.values()
        return {f"{SINGLE}{name}": self.step({"": as_written(name)}) for name in names}

    def nearest(self, placement: Placement) -> MapStep:
        """Return the map that runs and is closest to a placement."""
        placed = PlacedModules.of(
            self._extraction,
            placement,
            renamed=self._written,
            predict_step=self._predictor(next(iter(self._on_first))).step,
            known_forward=self._placed.forward,
        )
        return self.step(device_map(placed).content)

    def step(self, content: Mapping[str, int | str]) -> MapStep:
        """Return the map with its predicted step; the main device is the first accelerator.

        Entries of the main device come first: some versions of accelerate take the first entry's.
        """
        devices = {
            self._path_of.get(path, path): f"cuda:{device}" if isinstance(device, int) else device
            for path, device in content.items()
        }
        used = set(devices.values())
        main = main_device_of(used)
        first = sorted(content.items(), key=lambda entry: entry[1] != as_written(main))
        ordered = dict(first)
        if why := self._refusal(used - self._on_first.keys(), main):
            return MapStep(content=ordered, step_s=math.inf, why=why)
        run = run_of(self._placed, devices, main)
        if run.conflict is not None and len(used) > 1:
            path = run.conflict.module
            code = f"{type(self._placed.model.get_submodule(path)).__name__}.forward"
            why = f"{run.conflict.op} in {code}{path and f' of {path}'} reads from several devices"
            return MapStep(content=ordered, step_s=math.inf, why=why)
        predictor = self._predictor(main)
        if HOST in used and main != HOST:
            predictor = self._offloading(devices, main)
        predicted = predictor.step(run.devices)
        return MapStep(content=ordered, step_s=predicted.step_s, why=predicted.why)

    def _refusal(self, elsewhere: set[str], main: str) -> str:
        """Return why a map with modules on devices beside those of the problem cannot run."""
        if unknown := sorted(elsewhere - {HOST}):
            return f"it offloads modules to {unknown[0]}"
        if elsewhere and self._placed.step.training:
            return "it offloads modules to the CPU, which accelerate gives no gradients"
        if elsewhere and main not in self._host_links:
            return f"it offloads modules to the CPU, which has no link to {main}"
        return ""

    def _offloading(self, devices: Mapping[str, str], main: str) -> StepPredictor:
        """Return a predictor in which weights on the CPU are sent to the main device when read.

        accelerate sends the parameters of a module before each of its calls, and drops them after
        it; the calls wait. Here the op that reads a parameter first takes that longer.
        """
        problem, link = self._problem, self._host_links[main]
        graph = problem.graph
        modules = (self._path_of.get(module, module) for module in graph.modules)
        homes = (around(module, devices) for module in modules)
        offloaded = np.array([home is not None and devices[home] == HOST for home in homes])
        sent = np.where(offloaded, graph.parameter_bytes, 0)
        latency_s = np.where(sent > 0, link.latency_s, 0.0)
        sending_ns = each_in_nanoseconds(latency_s + sent / link.bandwidth_bytes_per_s)
        longer = replace(
            problem,
            cost_ns=problem.cost_ns + sending_ns[:, np.newaxis],
            graph=replace(
                graph,
                parameter_bytes=graph.parameter_bytes - sent,
                workspace_bytes=graph.workspace_bytes + sent,
            ),
        )
        return StepPredictor(longer, self._on_first[main], self._extraction, self._written)

    def _predictor(self, main: str) -> StepPredictor:
        """Return a predictor that has what a map does not place on the main device."""
        if main not in self._predictors:
            self._predictors[main] = StepPredictor(
                self._problem, self._on_first[main], self._extraction, self._written
            )
        return self._predictors[main]


def accelerate_maps(model: nn.Module, memory: Mapping[str, int]) -> dict[str, dict[str, int | str]]:
    """Return the maps that accelerate makes by bytes alone, {name: map}.

    These are that of ``infer_auto_device_map`` and the balanced one of ``device_map="auto"``; none
    without accelerate, on devices that it does not name in maps, or where it fails, as for a module
    with two names. ``memory`` is {device as written: bytes}.
    """
    limits = {as_written(name): size for name, size in memory.items()}
    if any(isinstance(name, str) and name != HOST for name in limits):
        return {}
    try:
        utils: Any = import_module("accelerate.utils")
    except ModuleNotFoundError:
        return {}
    modules = dict(model.named_modules())
    classes = sorted({type(modules[path]).__name__ for path in whole_modules(model)})
    maps: dict[str, dict[str, int | str]] = {}
    has_several = sum(isinstance(name, int) for name in limits) > 1
    with _quiet():
        for name in MADE_BY_BYTES if has_several else (ACCELERATE,):
            with suppress(Exception):  # accelerate's own failures
                sizes = dict(limits)
                if name == BALANCED:
                    sizes = utils.get_balanced_memory(model, sizes, no_split_module_classes=classes)
                maps[name] = dict(
                    utils.infer_auto_device_map(model, sizes, no_split_module_classes=classes)
                )
    return maps


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings of accelerate, such as that the GPUs of a plan are not here."""
    logger = logging.getLogger("accelerate.utils.modeling")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
