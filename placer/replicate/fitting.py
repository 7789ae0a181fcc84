"""Factors between predicted and measured steps of replicas, fitted to trials and kept in the cache.

A predicted step is ``compute * step alone + communication * exposed communication``. For a step
that was tried before the factors are those of its last trial; for another one they are the medians
over the steps that were tried with as many replicas of as many cores, placed or unplaced; without
any they are 1.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from envs.hardware.cache_folder import cache_folder, host, processor
from graphs.files import write_whole
from graphs.strict_json import array, fields, load_checked, number, table, text

FORMAT: Final = "placer-replica-factors/1"
PREFIX: Final = "replicas-"
MOST_STEPS: Final = 50
"""Number of steps of which the factors of one kind of plan are kept."""
LARGEST: Final = 100.0
"""Larger factors tell of parts too short to learn from."""


@dataclass(frozen=True, slots=True)
class Factors:
    """Factors of the parts of a predicted step.

    ``alone_s`` is the simulated step of one replica that they were fitted to, 0 for medians.
    """

    compute: float = 1.0
    communication: float = 1.0
    alone_s: float = 0.0

    def step_s(self, simulated_s: float, alone_s: float) -> float:
        """Return the predicted step from the simulated one, of which a replica alone has a part.

        >>> round(Factors(1.5, 2.0).step_s(0.12, 0.1), 6)
        0.19
        """
        exposed_s = simulated_s - alone_s
        return simulated_s + (self.compute - 1) * alone_s + (self.communication - 1) * exposed_s

    @property
    def tells(self) -> bool:
        """Return whether they may tell something about other steps."""
        return 0.0 < self.compute < LARGEST and 0.0 <= self.communication < LARGEST

    @classmethod
    def fitted(cls, step_s: float, pass_s: float, simulated_s: float, alone_s: float) -> Factors:
        """Return the factors with which a prediction is the measured step.

        Its pass is the compute and the rest the communication. A plan without any has it all in the
        compute.

        >>> Factors.fitted(0.05, 0.04, 0.025, 0.02).compute
        2.0
        """
        exposed_s = simulated_s - alone_s
        if exposed_s <= 0.0:
            return cls(compute=step_s / alone_s, alone_s=alone_s)
        return cls(pass_s / alone_s, (step_s - pass_s) / exposed_s, alone_s)

    def for_same(self, alone_s: float) -> Factors:
        """Return the factors for the same placement of the same step, simulated with other costs.

        Op costs that were measured again do not change what was measured in a trial.

        >>> Factors(2.0, 1.0, alone_s=0.5).for_same(0.25).compute
        4.0
        """
        if not (self.alone_s and alone_s):
            return self
        return Factors(self.compute * self.alone_s / alone_s, self.communication, alone_s)


@dataclass(frozen=True, slots=True)
class FittedFactors:
    """Factors by kind of plan and hash of the step's graph, the last tried one last."""

    by_kind: Mapping[str, Mapping[str, Factors]] = field(default_factory=dict)

    def of(self, kind: str, graph: str) -> Factors:
        """Return the factors of a kind of plan for a step."""
        tried = self.by_kind.get(kind, {})
        if not tried:
            return Factors()
        return tried.get(graph) or Factors(
            statistics.median(each.compute for each in tried.values()),
            statistics.median(each.communication for each in tried.values()),
        )

    def with_trial(self, kind: str, graph: str, factors: Factors) -> FittedFactors:
        """Return these factors and those of another trial that tells; the oldest make room."""
        if not factors.tells:
            return self
        tried = {key: each for key, each in self.by_kind.get(kind, {}).items() if key != graph}
        kept = dict(list(tried.items())[1 - MOST_STEPS :])
        return FittedFactors({**self.by_kind, kind: kept | {graph: factors}})

    def save(self, path: Path) -> None:
        """Write the file; a cache that cannot be written is not an error."""
        content = {
            kind: {
                graph: [each.compute, each.communication, each.alone_s]
                for graph, each in tried.items()
            }
            for kind, tried in self.by_kind.items()
        }
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(path, json.dumps({"format": FORMAT, "factors": content}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> FittedFactors:
        """Read the file; empty if it is missing or no such file."""
        with contextlib.suppress(OSError, ValueError):
            return load_checked(path, cls._from_dict)
        return cls()

    @classmethod
    def _from_dict(cls, data: object) -> FittedFactors:
        keys = frozenset({"format", "factors"})
        top = fields(data, "", keys, required=keys)
        if text(top["format"], "format") != FORMAT:
            raise ValueError(f"format is {top['format']!r}, not {FORMAT!r}")
        return cls(
            {
                kind: {graph: _factors(entry) for graph, entry in table(tried, "factors").items()}
                for kind, tried in table(top["factors"], "factors").items()
            }
        )


def factors_path(devices: Sequence[str]) -> Path:
    """Return the cache file for these devices of this machine."""
    import torch

    from envs.hardware.torch_devices import gpu_identities

    own = [host(), processor(), torch.__version__, *devices, *gpu_identities(devices)]
    key = "\n".join(own)
    return cache_folder() / f"{PREFIX}{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _factors(entry: object) -> Factors:
    compute, communication, alone_s = (number(each, "factors") for each in array(entry, "factors"))
    factors = Factors(compute, communication, alone_s)
    if not factors.tells or alone_s < 0.0:
        raise ValueError(f"factors {compute} and {communication} are out of range")
    return factors
