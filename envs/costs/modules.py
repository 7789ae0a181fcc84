"""Costs of a graph of modules: every module call is timed during a step, forward and backward.

There is no program that workers could run, so torch runs the step in a thread of this process that
is pinned to the cores of a device, or on a torch device. A forward op costs the time between its
hooks, a backward op that of its autograd nodes.
"""

from __future__ import annotations

import datetime
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from envs.costs.cached_costs import OpCosts, first_of_kinds
from envs.costs.roofline import SOURCE, roofline_costs
from envs.executors.hooks.hooked_module import HookedModule
from envs.executors.hooks.mixed_devices import sent
from envs.executors.torch.watchdog import timed_within_bounds
from envs.hardware import torch_devices
from envs.hardware.cluster import Cluster, Device
from envs.hardware.discover import cores_of
from envs.hardware.torch_devices import (
    forked_rng,
    synchronize,
    torch_device,
    unless_out_of_memory,
)
from graphs.extract import Extraction, ExtractionError, Workload
from graphs.extract.autocast import autocast
from graphs.extract.eager import run_step, runnable
from graphs.extract.model_state import in_step_mode
from graphs.extract.module_calls import ModuleCall, Unit, Units

WARM_UP: Final = 2
MODULE_BY_MODULE: Final = ", module by module"
Result = TypeVar("Result")


def torch_module_costs(
    extraction: Extraction,
    cluster: Cluster,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, OpCosts]:
    """Return the costs of the ops of a graph of modules on torch devices, {device kind: costs}.

    The whole step runs on one device of each kind, in all its free memory: limits are for placed
    steps. If it does not fit, the roofline of the measured rates of the device is used. The launch
    overhead, which every op of a problem gets added, is subtracted.
    """
    first_of = first_of_kinds(cluster.devices)
    source = f"measured {datetime.date.today().isoformat()}{MODULE_BY_MODULE}"
    costs: dict[str, OpCosts] = {}
    for done, (kind, device) in enumerate(sorted(first_of.items()), 1):
        where = torch_device(device.name)
        with timed_within_bounds("the modules of a step", where):
            launched_s = unless_out_of_memory(partial(profile_modules_on, where, extraction), where)
        if launched_s is None:
            modelled_s = roofline_costs(extraction.graph, [device])[kind]
            costs[kind] = OpCosts.of_one_source(modelled_s, SOURCE)
        else:
            cost_s = np.maximum(launched_s - device.launch_s, 0.0)
            costs[kind] = OpCosts.of_one_source(cost_s, source)
        torch_devices.release(where)
        if progress is not None:
            progress(done, len(first_of))
    return costs


def profile_modules(
    extraction: Extraction,
    devices: Sequence[Device],
    *,
    repeats: int = 5,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, NDArray[np.float64]]:
    """Return the seconds of every op of a graph of modules, {device kind: (N,)}.

    The cost of an op is its median CPU time over ``repeats`` runs; on a set of several cores its
    wall time, since a thread's clock does not include other threads. ExtractionError: the model is
    on the meta device, or fails although it ran before.
    """
    step = extraction.step
    if any(tensor.is_meta for tensor in step.named_state().values()):
        raise ExtractionError(
            f"{type(step.model).__name__} is on the meta device, so that its modules cannot be "
            "timed; build it with memory, or extract it without costs"
        )
    first_of = first_of_kinds(devices)
    costs_s = {}
    for done, (kind, device) in enumerate(sorted(first_of.items()), start=1):
        cores = cores_of(device.name)
        now = time.thread_time if len(cores) == 1 else time.perf_counter
        costs_s[kind] = _pinned(cores, partial(_profile, extraction, repeats, now, runnable))
        if progress is not None:
            progress(done, len(first_of))
    return costs_s


def profile_modules_on(
    device: torch.device, extraction: Extraction, *, repeats: int = 5
) -> NDArray[np.float64]:
    """Return the seconds of every op of a graph of modules on a torch device, launches included."""

    def now() -> float:
        synchronize(device)
        return time.perf_counter()

    with forked_rng([device]):
        return _profile(extraction, repeats, now, partial(_on, device, extraction))


@contextmanager
def _on(device: torch.device, extraction: Extraction, step: Workload) -> Iterator[Workload]:
    with runnable(step) as copy:
        there = replace(
            copy, inputs=sent(copy.inputs, device), keywords=sent(copy.keywords, device)
        )
        hooked = HookedModule(replace(extraction, step=there), {"": device})
        with hooked, autocast(step.dtype, [device.type]):
            yield there


def _profile(
    extraction: Extraction,
    repeats: int,
    now: Callable[[], float],
    prepared: Callable[[Workload], AbstractContextManager[Workload]],
) -> NDArray[np.float64]:
    """Return the median seconds of every op, (N,); the step is prepared anew for every run."""
    step = extraction.step
    runs = []
    with in_step_mode(step):
        for _ in range(WARM_UP + repeats):
            with prepared(step) as copy:
                clock = _Clock(copy, now)
                clock.run(copy)
            runs.append(
                [
                    (clock.forward_s if forward_op is None else clock.backward_s)[unit]
                    for unit, forward_op in zip(
                        extraction.units, extraction.forward_of, strict=True
                    )
                ]
            )
    median_s: NDArray[np.float64] = np.median(np.array(runs[WARM_UP:]), axis=0)
    return median_s


class _Clock(Units):
    def __init__(self, step: Workload, now: Callable[[], float]) -> None:
        super().__init__(step)
        self.forward_s: defaultdict[Unit, float] = defaultdict(float)
        self.backward_s: defaultdict[Unit, float] = defaultdict(float)
        self._now = now
        self._began = threading.local()

    def run(self, step: Workload) -> None:
        """Run the step: forward, and backward if it is a training step."""
        with self.followed():
            self._began.at = self._now()
            outputs = run_step(step)
            self._charge(self.unit)
            self.claim(outputs, self.unit)
        if step.training:
            assert isinstance(outputs, torch.Tensor)
            for node, unit in self.unit_of.items():
                node.register_prehook(self._begin)
                node.register_hook(partial(self._undone, unit))
            trained = [t for t in step.named_state().values() if t.requires_grad]
            torch.autograd.grad(outputs, trained, allow_unused=True)

    def entered(self, call: ModuleCall, inputs: Any) -> None:
        """Charge the time since the last hook to the caller."""
        self._charge(self._unit(self.caller))
        super().entered(call, inputs)
        self._begin()

    def left(self, call: ModuleCall, outputs: Any) -> None:
        """Charge the time since the last hook to the call."""
        self._charge(self._unit(call))
        super().left(call, outputs)
        self._begin()

    def _begin(self, *_: object) -> None:
        self._began.at = self._now()

    def _charge(self, unit: Unit) -> None:
        if hasattr(self._began, "at"):  # not yet set in a thread that the model itself has started
            self.forward_s[unit] += self._now() - self._began.at

    def _undone(self, unit: Unit, *_: object) -> None:
        self.backward_s[unit] += self._now() - self._began.at


def _pinned(cores: tuple[int, ...], work: Callable[[], Result]) -> Result:
    """Run ``work`` in a new thread on these cores, with as many torch threads."""

    def run() -> Result:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))
        return work()

    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="placer-modules") as pool:
            return pool.submit(run).result()
    finally:
        torch.set_num_threads(threads)
