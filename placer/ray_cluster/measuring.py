"""Measuring on a Ray cluster: a process for each free set of devices, on the nodes that have them.

Placements are sent in groups, and each group runs in the same rounds on one set of devices: only
these runs are compared. A group whose node dies runs again, from the start, on another one. So the
groups, and what is compared, do not depend on the nodes.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from envs.backend import ProgressCallback
from envs.hardware.cluster import Cluster
from envs.hardware.errors import DeviceWarning
from envs.measurement import Measurement
from envs.placement import Placement
from placer.ray_cluster.connection import (
    LostError,
    NodeProcess,
    RayCluster,
    Shared,
    check_task_deaths,
)
from placer.ray_cluster.device_sets import DeviceSet, sets_of_all, this_machine
from placer.ray_cluster.node_step import Loadable, Loaded, OtherDevicesError, Runs

LOAD_S: Final = 180.0
"""Time in which a node must load the step."""
LATE_S: Final = 60.0
"""Time that nodes have to load it after the first one has; if none has, those in reserve try."""
FEWEST_SETS: Final = 2
"""Sets of devices that load the model even for one group: if it fails, another one runs it."""
CLOSE_S: Final = 5.0
"""Time in which processes of nodes may end their workers."""


class MeasuringNodes:
    """Sets of devices of a Ray cluster, each with a process that measures. A context manager."""

    def __init__(self, cluster: RayCluster, devices: Cluster) -> None:
        """Find the nodes with as many devices of the same kinds as ``devices``, of this machine.

        A DeviceWarning tells which nodes do not have them.

        Raises:
            ValueError: no node has them.
            ClusterError: a node does not answer.
        """
        self._cluster = cluster
        self._sets, lacking = sets_of_all(cluster.ask(this_machine), devices.names)
        for reason in lacking:
            _warn(f"{reason}; it measures nothing")
        self._wanted = 0
        self._shared: Shared | None = None
        self._processes: dict[DeviceSet, NodeProcess] = {}  # that have loaded the step, in turn

    def __enter__(self) -> MeasuringNodes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def names(self) -> list[str]:
        """Return the nodes with the devices, without those that were lost."""
        return list(dict.fromkeys(each.node.name for each in self._sets))

    @property
    def at_once(self) -> int:
        """Return how many groups can run at once."""
        count, used = 0, set[str]()
        for own in self._sets:
            if used.isdisjoint(own.resources):
                count, used = count + 1, used | own.resources
        return count

    def load(
        self,
        step: Loadable,
        groups: int = 1,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Send a step to as many sets of devices as there are groups to measure, at least two.

        The others are in reserve: they load it if one of these cannot or is late, and when all are
        lost. A DeviceWarning tells which are left out: others use them, or their kind is another.

        Raises:
            ValueError: a node cannot load the step.
            ConnectionError: no node is left.
        """
        self._wanted = max(groups, FEWEST_SETS)
        self._shared = self._cluster.share(step, _loaded)
        self._load(report)

    def _load(self, report: Callable[[str], None] = lambda _: None) -> None:
        reserve = [own for own in self._sets if own not in self._processes]
        loading: dict[Any, tuple[DeviceSet, NodeProcess]] = {}
        lost: list[tuple[DeviceSet, str]] = []
        assert self._shared is not None  # loaded before
        late = time.monotonic() + LATE_S
        end = late - LATE_S + LOAD_S
        try:
            while (now := time.monotonic()) < end:
                on_time = self._processes or now < late
                wanted = self._wanted if on_time else len(self._sets)
                while reserve and len(self._processes) + len(loading) < wanted:
                    own = reserve.pop(0)
                    try:
                        process, ready = self._cluster.start(
                            own.node, self._shared, own.names, cpus=own.cpus, gpus=own.gpus
                        )
                    except LostError as error:
                        lost.append((own, str(error)))
                    else:
                        loading[ready] = own, process
                if not loading:
                    break
                report(f"loading the model on {len(loading)} more device sets")
                for ready in self._cluster.done([*loading]):
                    own, process = loading.pop(ready)
                    self._processes[own] = process
                    if reason := self._load_failure(own, ready):
                        self._lose(own)
                        lost.append((own, reason))
                    else:
                        end = min(end, time.monotonic() + LATE_S)
            for own, _ in loading.values():
                reason = "has not loaded the model in time: do others use its devices?"
                lost.append((own, f"node {own.node.name} of the Ray cluster {reason}"))
        finally:
            for _, process in loading.values():
                process.kill()
        for own, reason in lost:
            self._lose(own)
            self._leave_out(own, reason)
        self._check_left()

    def _load_failure(self, own: DeviceSet, ready: Any) -> str:
        """Return why a set of devices has not loaded the step, or ""."""
        node = f"node {own.node.name} of the Ray cluster"
        try:
            self._cluster.result(ready)
        except LostError as error:
            return f"a process on {node} died while it loaded the model: {error}"
        except OtherDevicesError as error:
            return f"{node} cannot: {error}"
        except Exception as error:
            raise ValueError(f"{node} cannot measure: {error}") from error
        return ""

    def measure(
        self,
        groups: Sequence[Sequence[Placement]],
        runs: Runs,
        progress: ProgressCallback | None = None,
    ) -> list[list[Measurement]]:
        """Return the measurements of groups of placements, each with its node.

        A group in which everything fails runs once more elsewhere; if it does not fail there, the
        devices where it did are left out. ``progress`` is called with (groups done, all groups).

        Raises:
            ConnectionError: all nodes were lost.
            OSError: processes that ran a group died too often.
        """
        state = _Groups(groups)
        while state.waiting or state.running:
            if not self._processes:
                self._load()
            self._begin(state, runs)
            if progress is not None:
                progress(state.done, len(groups))
            for answer in self._cluster.done([*state.running]):
                self._end(state, answer)
        return state.found

    def close(self) -> None:
        """End all processes and their workers."""
        ending, end = [], time.monotonic() + CLOSE_S
        with suppress(ConnectionError):
            for process in self._processes.values():
                with suppress(LostError):
                    ending.append(process.call(_close))
            while ending and (left_s := end - time.monotonic()) > 0:
                done = self._cluster.done(ending, timeout_s=left_s)
                ending = [each for each in ending if each not in done]
        for process in self._processes.values():
            process.kill()
        self._processes.clear()

    def _begin(self, state: _Groups, runs: Runs) -> None:
        """Let groups that wait run on free devices."""
        for number in list(state.waiting):
            running = [own for _, own in state.running.values()]
            if (own := self._free(running, state.failed_on.get(number))) is not None:
                state.waiting.remove(number)
                try:
                    answer = self._processes[own].call(_measured, list(state.groups[number]), runs)
                except LostError as error:
                    self._run_elsewhere(state, number, own, error)
                else:
                    state.running[answer] = number, own

    def _end(self, state: _Groups, answer: Any) -> None:
        """Keep the measurements of a group, or let it wait again."""
        number, own = state.running.pop(answer)
        try:
            measured = self._cluster.result(answer)
        except LostError as error:
            self._run_elsewhere(state, number, own, error)
            return
        except Exception as error:  # noqa: BLE001 - as when a node has no room for workers
            self._lose(own)
            self._leave_out(
                own, f"node {own.node.name} of the Ray cluster cannot run steps: {error}"
            )
            state.waiting.appendleft(number)
            return
        state.found[number] = [replace(each, node=own.node.name) for each in measured]
        fails = bool(measured) and all(each.failure for each in measured)
        if fails and number not in state.failed_on:
            state.failed_on[number] = own
            state.waiting.append(number)
        elif not fails and (failed := state.failed_on.get(number, own)) != own:
            self._leave_out_broken(failed)

    def _run_elsewhere(self, state: _Groups, number: int, own: DeviceSet, error: LostError) -> None:
        """Let a group wait again whose devices were lost."""
        self._lose(own)
        state.deaths[number] += 1
        check_task_deaths(state.deaths[number], error)
        state.waiting.appendleft(number)

    def _free(self, running: Sequence[DeviceSet], failed: DeviceSet | None) -> DeviceSet | None:
        """Return a set of devices that does not run, of those that take turns.

        The one where a group failed is only taken if there is no other.
        """
        used = frozenset[str]().union(*(each.resources for each in running))
        for own in self._processes:
            if not own.resources & used and (own != failed or len(self._processes) == 1):
                self._processes[own] = self._processes.pop(own)  # last in turn
                return own
        return None

    def _leave_out_broken(self, own: DeviceSet) -> None:
        if own in self._processes:
            self._lose(own)
            names = ", ".join(own.names)
            self._leave_out(
                own, f"node {own.node.name} of the Ray cluster fails to run a step on {names}"
            )

    def _lose(self, own: DeviceSet) -> None:
        if own in self._sets:
            self._sets.remove(own)
        if (process := self._processes.pop(own, None)) is not None:
            process.kill()

    def _leave_out(self, own: DeviceSet, reason: str) -> None:
        """Warn that a set of devices is lost, and whether others of its node measure."""
        others = any(each.node == own.node for each in self._processes)
        _warn(f"{reason}; {'other devices of it measure' if others else 'it measures nothing'}")

    def _check_left(self) -> None:
        if not self._processes:
            raise ConnectionError("no node of the Ray cluster is left to measure")


class _Groups:
    """Groups of placements, by number: those that wait, those that run, and what was measured."""

    def __init__(self, groups: Sequence[Sequence[Placement]]) -> None:
        self.groups = groups
        self.found: list[list[Measurement]] = [[] for _ in groups]
        self.waiting = deque(range(len(groups)))
        self.running: dict[Any, tuple[int, DeviceSet]] = {}  # by the answer to come
        self.deaths = [0] * len(groups)
        self.failed_on: dict[int, DeviceSet] = {}

    @property
    def done(self) -> int:
        """Return the number of groups that neither wait nor run."""
        return len(self.groups) - len(self.waiting) - len(self.running)


def _warn(text: str) -> None:
    warnings.warn(text, DeviceWarning, stacklevel=3)


def _loaded(step: Loadable, names: Sequence[str]) -> Loaded:
    return step.loaded(names)


def _measured(step: Loaded, placements: Sequence[Placement], runs: Runs) -> list[Measurement]:
    return step.measure(placements, runs)


def _close(step: Loaded) -> None:
    step.close()
