"""The replicas of a placement, as recorded in its file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, TypeAlias

from envs.collectives import ALGORITHMS
from envs.reduction import Reduction
from graphs.strict_json import array, fields, number, text, whole, within

Batch: TypeAlias = Literal["per-replica", "global"]
BATCHES: Final[tuple[Batch, ...]] = ("per-replica", "global")
"""Every replica processes a whole batch per step, or the replicas share one."""
MOST_ACCUMULATED: Final = 10**6
_KEYS: Final = frozenset({"groups", "batch", "accumulate", "reduction", "algorithms", "levels"})
_READ: Final[Mapping[str, Callable[[object, str], Any]]] = {
    "algorithm": text,
    "payload": text,
    "bucket_bytes": whole,
    "every": whole,
    "coding_bytes_per_s": number,
}
"""Parsers of the keys of a reduction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """Groups of device names, one per replica, and how the replicas are kept in sync.

    The placement is for the first group; the k-th device of every group corresponds to the k-th of
    the first. Gradients of ``accumulate`` passes are added up before a reduction.

    ``algorithms`` are those that ``auto`` chose, the one with most bytes first. ``levels`` are the
    ranks at each level of the network, innermost first, if the plan reduces level by level. In a
    file::

        "replicas": {"groups": [["g0", "g1"], ["g2", "g3"]], "batch": "per-replica",
                     "accumulate": 1, "reduction": {"algorithm": "auto", "payload": "fp32",
                     "bucket_bytes": 26214400, "every": 1}, "algorithms": ["ring"]}
    """

    groups: tuple[tuple[str, ...], ...]
    batch: Batch = "per-replica"
    accumulate: int = 1
    reduction: Reduction = field(default_factory=Reduction)
    algorithms: tuple[str, ...] = ()
    levels: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.groups or len({len(group) for group in self.groups}) != 1:
            raise ValueError("replicas are on one or more groups of equally many devices")
        counts = Counter(name for group in self.groups for name in group)
        if twice := sorted(name for name in counts if counts[name] > 1):
            raise ValueError(f"replicas share {', '.join(twice)}; each has devices of its own")
        if self.batch not in BATCHES:
            raise ValueError(f"batch is {self.batch!r}, not one of {', '.join(BATCHES)}")
        within(self.accumulate, 1, MOST_ACCUMULATED, "accumulate")
        if unknown := sorted(set(self.algorithms) - set(ALGORITHMS)):
            known = ", ".join(ALGORITHMS)
            raise ValueError(f"there is no reduction {unknown[0]!r}: there are {known}")
        if self.levels and math.prod(self.levels) != len(self.groups):
            told = "x".join(map(str, self.levels))
            raise ValueError(f"levels {told} are not of the {len(self.groups)} replicas there are")

    def __len__(self) -> int:
        return len(self.groups)

    def to_dict(self) -> dict[str, Any]:
        """Return the ``replicas`` part of a placement file."""
        found = {
            "groups": [list(group) for group in self.groups],
            "batch": self.batch,
            "accumulate": self.accumulate,
            "reduction": {k: v for k, v in asdict(self.reduction).items() if v is not None},
        }
        chosen = {"algorithms": list(self.algorithms), "levels": list(self.levels)}
        return found | {key: value for key, value in chosen.items() if value}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str) -> Replicas:
        """Build replicas from their part of a placement file.

        Raises:
            ValueError: unknown or missing keys, or values of a wrong type or out of range.
        """
        top = fields(data, where, _KEYS, required=("groups",))
        given = fields(
            top.get("reduction", {}), f"{where}.reduction", frozenset(_READ), required=()
        )
        for key, value in given.items():
            given[key] = _READ[key](value, f"{where}.reduction.{key}")
        groups = tuple(
            tuple(text(name, f"{where}.groups[{i}]") for name in array(group, f"{where}.groups"))
            for i, group in enumerate(array(top["groups"], f"{where}.groups"))
        )
        batch = text(top.get("batch", "per-replica"), f"{where}.batch")
        return cls(
            groups=groups,
            batch=batch,  # type: ignore[arg-type]  # checked in __post_init__
            accumulate=whole(top.get("accumulate", 1), f"{where}.accumulate"),
            reduction=Reduction(**given),
            algorithms=tuple(_each(top, "algorithms", where, text)),
            levels=tuple(_each(top, "levels", where, whole)),
        )


def _each(
    top: Mapping[str, object], key: str, where: str, read: Callable[[object, str], Any]
) -> list[Any]:
    values = array(top.get(key, []), f"{where}.{key}")
    return [read(value, f"{where}.{key}[{i}]") for i, value in enumerate(values)]
