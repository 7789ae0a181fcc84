"""Checks whether this machine is fit for measuring: versions, noise and what to fix."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from envs.hardware.cache_folder import cache_folder, is_writable, processor, unwritable
from envs.hardware.cluster import Cluster
from envs.hardware.discover import available_memory_bytes, cores_in_use, physical_cores
from envs.hardware.noise import Noise, governors, noise_of, quota_cores
from envs.measurement import CONTENDED, contention_warning
from placer.messages.remarks import CPU_CLOCK, NOISY
from placer.startup import VERSION

PACKAGES: Final = ("torch", "numba", "numpy", "networkx", "gymnasium", "stable-baselines3")
LEAST_FREE_BYTES: Final = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkup:
    """The state of a machine for measuring; ``advice`` is derived from the other fields."""

    versions: Mapping[str, str]
    processor: str
    cluster: Cluster  # devices and links, with their speeds
    noise: tuple[Noise, ...]  # one per core that the devices use
    load: float  # 1-minute load average
    cores: int  # physical cores that this process may use
    quota_cores: float | None
    governors: frozenset[str]
    free_bytes: int
    cache: str
    cache_writable: bool

    @property
    def loud(self) -> list[Noise]:
        """Return the cores that other processes use."""
        return [noise for noise in self.noise if noise.contention > CONTENDED]

    @property
    def uneven(self) -> list[Noise]:
        """Return the other cores on which the time of equal work varies too much."""
        return [n for n in self.noise if n.spread > NOISY and n.contention <= CONTENDED]

    @property
    def is_throttled(self) -> bool:
        """Return whether the container's CPU quota is below its number of cores."""
        return self.quota_cores is not None and self.quota_cores < self.cores

    @property
    def is_good(self) -> bool:
        """Return whether measurements will be steady."""
        return not (self.loud or self.uneven or self.is_throttled)

    @property
    def verdict(self) -> str:
        """Return one sentence: fit for measuring or not, why, the thresholds and what to do."""
        if self.is_good:
            return (
                f"Good to measure: on every core wall / CPU time is at most {CONTENDED} and the "
                f"spread at most {NOISY:.0%}."
            )
        reasons = []
        if self.loud:
            worst = max(self.loud, key=lambda noise: noise.contention)
            reasons.append(
                f"others use {_cores(self.loud)} (wall / CPU time up to {worst.contention:.2f}, "
                f"more than {CONTENDED})"
            )
        if self.uneven:
            widest = max(self.uneven, key=lambda noise: noise.spread)
            reasons.append(
                f"equal work scatters on {_cores(self.uneven)} (spread up to {widest.spread:.0%}, "
                f"more than {NOISY:.0%})"
            )
        if self.is_throttled:
            reasons.append("the container is throttled")
        remedy = "stop other programs" if self.loud or self.uneven else "raise its limit"
        reason = " and ".join(reasons)
        return f"Measurements will be noisy, because {reason}: {remedy}, then try again."

    @property
    def advice(self) -> list[str]:
        """Return further advice that a user can act on, one or two sentences each."""
        advice = [doubt] if (doubt := contention_warning(self.cluster)) else []
        if self.loud:
            remark = (
                f"The load is {self.load:.1f} on {self.cores} core{'s'[: self.cores > 1]}: as long "
                f"as others use them, steps are compared by {CPU_CLOCK}."
            )
            quiet = [n for n in self.noise if n not in self.loud and n not in self.uneven]
            if len(quiet) > 1:  # placing needs at least two
                remark += f" Quieter are {_cores(quiet)}: name them with --devices."
            advice.append(remark)
        if self.uneven:
            advice.append(f"As work scatters on {_cores(self.uneven)}, small gains count as ties.")
        if self.is_throttled:
            advice.append(
                f"The container may use {self.quota_cores:g} cores' worth of time on {self.cores} "
                "cores: with the limit as it is, place on fewer cores."
            )
        if self.governors - {"performance"}:
            advice.append(
                f"Frequencies are set by {', '.join(sorted(self.governors))}: cpupower "
                "frequency-set -g performance keeps them steady."
            )
        if self.free_bytes < LEAST_FREE_BYTES:
            advice.append(
                f"Only {self.free_bytes / 1e9:.2g} GB of memory are free: workers need some for "
                "themselves."
            )
        if not self.cache_writable:
            advice.append(unwritable(self.cache))
        return advice


def _cores(noise: Sequence[Noise]) -> str:
    cores = ", ".join(str(one.core) for one in noise)
    return f"core{'s'[: len(noise) > 1]} {cores}"


def check_machine(cluster: Cluster) -> Checkup:
    """Inspect this machine and time a short load on every core that the cluster's devices use."""
    cores = cores_in_use(cluster.names)
    load, _, _ = os.getloadavg()  # before the timing below loads the cores
    return Checkup(
        versions=_versions(),
        processor=processor(),
        cluster=cluster,
        noise=tuple(noise_of(core) for core in cores),
        load=load,
        cores=len(physical_cores()),
        quota_cores=quota_cores(),
        governors=frozenset(governors(cores)),
        free_bytes=available_memory_bytes(),
        cache=str(cache_folder()),
        cache_writable=is_writable(cache_folder()),
    )


def _versions() -> dict[str, str]:
    versions = {"placer": VERSION, "python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in PACKAGES}
    return versions | {"cuda": torch.version.cuda or "none"}
