"""The unplaced step, a baseline of measured placements: one process runs it on all cores."""

from __future__ import annotations

import time
from typing import Final

from envs.cluster import Cluster, Device
from envs.discover import core_set, cores_of, kind_of
from envs.executor.lists import single_list
from envs.executor.pool import StepRun, WorkerPool
from envs.executor.state import load_example
from envs.executor.worker_error import WorkerError
from graphs.extract import Extraction

SETTLE_S: Final = 0.02
"""OpenMP threads spin for a few milliseconds after their work, on cores that the next run needs."""


class UnplacedStep:
    """A step without placement, run by torch's threads on the cores of all devices."""

    def __init__(self, extraction: Extraction, cluster: Cluster, *, step_timeout_s: float) -> None:
        """Start its worker; errors, now or later, are stored in ``failure``."""
        self.runs: list[StepRun] = []
        self.failure = ""
        self._pool: WorkerPool | None = None
        cores = [core for name in cluster.names for core in cores_of(name)]
        device = Device(
            name=core_set(cores),
            kind=kind_of(len(cores)),
            memory_bytes=sum(device.memory_bytes for device in cluster.devices),
        )
        program = extraction.program
        try:
            self._pool = WorkerPool(
                program,
                [device],
                step_timeout_s=step_timeout_s,
                op_names=tuple(extraction.graph),
            )
            load_example(self._pool.arena, extraction.step)
            self._number = self._pool.load([single_list(program)])
        except (WorkerError, OSError) as error:
            self._fail(error)
        except BaseException:
            self.close()
            raise

    def run(self, *, keep: bool) -> None:
        """Run the step once, unless it failed before; the run counts if ``keep`` is set."""
        if self._pool is None or self.failure:
            return
        try:
            run = self._pool.run(self._number)
        except WorkerError as error:
            self._fail(error)
            return
        time.sleep(SETTLE_S)
        if keep:
            self.runs.append(run)

    def close(self) -> None:
        """End the worker."""
        if self._pool is not None:
            self._pool.close()

    def _fail(self, error: Exception) -> None:
        self.failure = str(error)
        self.close()
