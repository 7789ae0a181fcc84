"""Scenarios on two fake CUDA devices that check that timing begins and ends on idle devices.

As in :mod:`tests.helpers.overlapping` each takes the seed of the order in which streams run. The
clock of the module that measures fails when somebody looks at it while a device works.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from envs.costs import modules, torch_speeds
from envs.costs.torch_speeds import burst, launched
from envs.hardware import torch_devices
from envs.placement import Placement
from envs.replication import Replication
from graphs.extract import Extraction, Workload, extract
from graphs.extract.placeable import call_graph
from graphs.graph import GraphArrays
from placer.cli import run
from placer.parallel import trials
from tests.fake_cuda import fake_cuda
from tests.fake_cuda.cuda_module import TimedEvent
from tests.fake_cuda.machine import Machine
from tests.helpers.clusters import linked
from tests.helpers.extracted_steps import copied, extracted
from tests.helpers.replicas import mlp
from tests.helpers.runs import placed, rank, written

GPUS: Final = torch.device("cuda", 0), torch.device("cuda", 1)
SIZE: Final = 64


@contextmanager
def idle_clock(
    machine: Machine, module: ModuleType, *, working: Callable[[int], bool] = lambda look: False
) -> Iterator[Callable[[], int]]:
    """Let a module look at its clock only while no device works; yield what counts the looks.

    At looks for which ``working`` is true, by their number, devices may work.
    """
    looks = 0

    def perf_counter() -> float:
        nonlocal looks
        idle = all(stream.is_idle for stream in machine.queues.streams)
        assert idle or working(looks), "a device works"
        looks += 1
        return float(looks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "time", SimpleNamespace(perf_counter=perf_counter))
        yield lambda: looks


def worked_before(devices: Sequence[torch.device] = GPUS) -> None:
    """Give devices something to do, on two streams each."""
    for device in devices:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it so
        for used in (torch.cuda.current_stream(device), stream):
            with torch.cuda.stream(used):
                torch.ones(SIZE, device=device).mul_(2)


class IdleStart(TimedEvent):
    """Every other event is the start of what is timed, for which its device is idle or sleeps."""

    def __init__(self, machine: Machine, *, is_start: bool) -> None:
        super().__init__(machine)
        self.is_start = is_start

    def record(self, stream: Any = None) -> None:
        if self.is_start:
            device = (stream or self._current()).device
            streams = [s for s in self._machine.queues.streams if s.device == device]
            assert all(s.is_asleep or s.is_idle for s in streams), "the device works"
        super().record(stream)


@contextmanager
def idle_starts(seed: int) -> Iterator[Machine]:
    """Yield a machine on which what events time begins on idle devices."""
    starts = itertools.cycle((True, False))
    with fake_cuda(2, seed=seed) as machine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Event", lambda **_: IdleStart(machine, is_start=next(starts)))
        yield machine


# --- costs


def bursts_on_two_devices(seed: int) -> None:
    with fake_cuda(2, seed=seed) as machine, idle_clock(machine, torch_speeds) as looks:
        made = [torch.ones(SIZE, device=device) for device in GPUS]
        worked_before()
        burst(lambda: [tensor * 2 for tensor in made], GPUS, 3)
        assert looks() == 2


def bursts_by_events(seed: int) -> None:
    with idle_starts(seed) as machine:
        made = torch.ones(SIZE, device=GPUS[1])
        worked_before()
        burst(lambda: made * 2, GPUS[1:], 3)
        assert machine.default[1].is_idle


def launches_are_ahead(seed: int) -> None:
    with idle_starts(seed) as machine:
        made = torch.ones(SIZE, device=GPUS[1])
        for asleep_s, waits in ((0.0, False), (1e-3, False), (1e-3, True)):
            worked_before()
            work = (made * 2).sum().item if waits else partial(torch.neg, made)
            _, is_ahead = launched(work, GPUS[1], 3, asleep_s)
            assert is_ahead == (asleep_s > 0 and not waits)
            assert machine.default[1].is_idle


def modules_one_by_one(seed: int) -> None:
    """Of every module the end is that of its work, not of its launch."""
    extraction = extracted("conv_net", "modules")
    with fake_cuda(seed=seed) as machine, idle_clock(machine, modules) as looks:
        worked_before(GPUS[:1])
        modules.profile_modules_on(GPUS[0], extraction, repeats=1)
        assert looks() > 0


def a_failure_comes_late(seed: int) -> None:
    """Check that a failure is waited for: it is known when the work is over, not at its launch."""
    with fake_cuda(2, seed=seed) as machine:
        lost = partial(machine.queues.lose, GPUS[1], "unspecified launch failure")
        machine.queues.issue(machine.default[1], lost)
        assert torch_devices.kernel_failure(GPUS[1]).endswith("unspecified launch failure")


# --- steps of runs


@cache
def trained_mlp() -> Extraction:
    return extract(Workload.of(mlp(), (torch.randn(4, 16), torch.randn(4, 8)), F.mse_loss))


def trials_of_replicas(seed: int) -> None:
    extraction = copied(trained_mlp())
    graph = GraphArrays.from_graph(call_graph(extraction).graph)
    devices = np.arange(len(graph)) % 2
    devices[graph.group >= 0] = 0
    cluster = linked()
    names = tuple(map(str, GPUS))
    placement = replace(
        Placement.of(graph, cluster, devices, np.zeros(len(graph))),
        device_names=names,
        replicas=Replication(groups=(names,)),
    )
    trial = trials.Trial(make=lambda: extraction, placement=placement)
    with alone(), fake_cuda(2, seed=seed) as machine:
        # the second of three looks is where the backward pass has been launched, and the first step
        # does not count
        with idle_clock(machine, trials, working=lambda look: look % 3 == 1 or not look) as looks:
            trials._trainer(trial)(2)
        assert looks() == 3 * (2 + 3)


@contextmanager
def alone() -> Iterator[None]:
    """Be the only rank of a group."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch hides it
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def inference_from_the_command_line(seed: int) -> None:
    with TemporaryDirectory() as folder, fake_cuda(2, seed=seed) as machine:
        target = f"{written(Path(folder))}:build"
        placement = placed(target, Path(folder) / "placement.json", *map(str, GPUS), training=False)
        with idle_clock(machine, run) as looks:
            code, _, err = rank(
                [target, "--placement", str(placement), "--steps", "2", "--inference"]
            )
        assert code == 0, err
        assert looks() == 2 * 2


COSTS: Final[dict[str, Callable[[int], None]]] = {
    work.__name__: work
    for work in (bursts_on_two_devices, bursts_by_events, launches_are_ahead, modules_one_by_one)
}
HARDWARE: Final[dict[str, Callable[[int], None]]] = {"a_failure_comes_late": a_failure_comes_late}
STEPS: Final[dict[str, Callable[[int], None]]] = {
    work.__name__: work for work in (trials_of_replicas, inference_from_the_command_line)
}
