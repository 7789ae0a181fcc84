"""Data-parallel replicas as they are requested, planned, written to a placement file and run.

Importing it loads no numerical library, so that a command line can list the choices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from envs.collectives import (
    ALGORITHMS,
    HIERARCHICAL,
    PAYLOADS,
    AllReduce,
    Level,
    MeasuredAllReduce,
    all_reduce,
    cheapest_all_reduce,
    ranks_of,
)
from envs.hardware.core_sets import check_core_sets
from graphs.strict_json import array, boolean, fields, number, one_of, text, whole, within

if TYPE_CHECKING:
    from envs.hardware.cluster import Cluster

Batch: TypeAlias = Literal["per-replica", "global"]
BATCHES: Final[tuple[Batch, ...]] = ("per-replica", "global")
"""Every replica processes a whole batch per step, or the replicas share one."""
AUTO: Final = "auto"
"""As a number of replicas: the best; as a reduction: the fastest algorithm for each bucket."""
BUCKET_BYTES: Final = 25 << 20
"""Default bucket size of torch's DistributedDataParallel."""
MOST_ACCUMULATED: Final = 10**6
_IN_FILE: Final[Mapping[str, tuple[str, Callable[[object, str], Any]]]] = {
    "algorithm": ("reduction", text),
    "payload": ("payload", text),
    "bucket_bytes": ("bucket_bytes", whole),
    "every": ("average_every", whole),
    "coding_bytes_per_s": ("coding_bytes_per_s", number),
}
"""{key of a reduction in a file: (field, its parser)}."""
_KEYS: Final = frozenset(
    {"groups", "batch", "accumulate", "reduction", "algorithms", "levels", "unplaced"}
)


class ReplicationError(ValueError):
    """The devices or the batch do not suit the number of replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replication:
    """Data-parallel replicas of a placement, and how they are kept in sync.

    Attributes:
        replicas: their number; None lets the plan choose it.
        batch: "per-replica": every replica runs the step with its whole batch; "global": the
            replicas share it, and the passes of a replica share its part.
        accumulate: passes whose gradients are added up before a reduction and an update.
        samples: batch size of the given step; None is the first dimension of a model's inputs, and
            1 for a graph.
        reduction: algorithm of the all-reduce, or "auto".
        payload: how a gradient in fp32 is sent, see ``PAYLOADS``.
        bucket_bytes: maximum bytes of gradients that are reduced together.
        average_every: above 1, replicas do not reduce gradients but average parameters every so
            many steps (model averaging, BMUF); this does not overlap with the steps.
        coding_bytes_per_s: rate at which a rank encodes and decodes gradients (or parameters); None
            takes no time at all. Coding 1-bit payloads can take longer than sending them.
        groups: of a plan: the device names of each replica. The placement is for the first group;
            the k-th device of every group corresponds to the k-th of the first.
        algorithms: of a plan: those that "auto" chose, the one with most bytes first.
        levels: of a plan that reduces level by level: ranks at each level of the network, innermost
            first.
        unplaced: of a plan: every replica is the model as it is on its one device, of cores with a
            thread of torch on each.

    In a placement file::

        "replicas": {"groups": [["g0", "g1"], ["g2", "g3"]], "batch": "per-replica",
                     "accumulate": 1, "reduction": {"algorithm": "auto", "payload": "fp32",
                     "bucket_bytes": 26214400, "every": 1}, "algorithms": ["ring"]}
    """

    replicas: int | None = None
    batch: Batch = "per-replica"
    accumulate: int = 1
    samples: int | None = None
    reduction: str = AUTO
    payload: str = "fp32"
    bucket_bytes: int = BUCKET_BYTES
    average_every: int = 1
    coding_bytes_per_s: float | None = None
    groups: tuple[tuple[str, ...], ...] = ()
    algorithms: tuple[str, ...] = ()
    levels: tuple[int, ...] = ()
    unplaced: bool = False

    def __post_init__(self) -> None:
        for name, count in (("replicas", self.replicas), ("samples", self.samples)):
            if count is not None and count < 1:
                raise ValueError(f"{name} is {count}, below 1")
        within(self.accumulate, 1, MOST_ACCUMULATED, "accumulate")
        one_of(self.batch, BATCHES, "batch")
        algorithms = [*self.algorithms, *{self.reduction} - {AUTO}]
        if unknown := sorted(set(algorithms) - set(ALGORITHMS)):
            one_of(unknown[0], (AUTO, *ALGORITHMS), "reduction")
        one_of(self.payload, PAYLOADS, "payload")
        within(self.average_every, 1, 10**9, "average_every")
        within(self.bucket_bytes, 1, 1 << 60, "bucket_bytes")
        if self.coding_bytes_per_s is not None:
            within(self.coding_bytes_per_s, 1e-3, 1e18, "coding_bytes_per_s")
        if self.average_every > 1 and self.payload != "fp32":
            raise ValueError(
                f"parameters that are averaged every {self.average_every} steps are sent in full "
                f"precision, not as {self.payload}: leave the payload out, or the averaging"
            )
        if self.groups or self.levels:
            self._check_groups()
        if self.unplaced and len(self.groups[0] if self.groups else ()) != 1:
            raise ValueError("unplaced replicas are on one device each")

    def _check_groups(self) -> None:
        if not all(self.groups) or len({len(group) for group in self.groups}) != 1:
            raise ValueError("replicas are on one or more groups of equally many devices")
        if self.replicas not in (None, len(self.groups)):
            raise ValueError(f"{self.replicas} replicas are on {len(self.groups)} groups")
        counts = Counter(name for group in self.groups for name in group)
        if repeated := sorted(name for name in counts if counts[name] > 1):
            raise ValueError(f"replicas share {', '.join(repeated)}; each needs devices of its own")
        check_core_sets(counts)
        if self.levels and math.prod(self.levels) != len(self.groups):
            shape = "x".join(map(str, self.levels))
            raise ValueError(f"levels {shape} do not multiply to the {len(self.groups)} replicas")

    @classmethod
    def of(cls, replicas: int | str | Replication) -> Replication:
        """Convert a number of replicas or "auto".

        Raises:
            ValueError: the argument is neither.
        """
        if isinstance(replicas, Replication):
            return replicas
        if isinstance(replicas, str) and replicas != AUTO:
            raise ValueError(f"replicas are {replicas!r}: give their number, or {AUTO!r}")
        return cls(replicas=None if isinstance(replicas, str) else replicas)

    def parts(self, replicas: int) -> int:
        """Return into how many parts the step's batch is divided for one pass of one replica."""
        return replicas * self.accumulate if self.batch == "global" else 1

    def uneven_parts(self, parts: int) -> str:
        """Return why the batch cannot be divided so, "" if it can or its size is unknown."""
        if self.samples is None or self.samples % parts == 0:
            return ""
        split = f"{parts // self.accumulate} replicas x accumulate {self.accumulate}"
        return f"{self.samples} samples cannot be cut into {parts} equal parts ({split})."

    def check_on(self, cluster: Cluster) -> None:
        """Check that the requested replicas have devices, and equal parts of a known batch."""
        if self.replicas is None:
            return
        if self.replicas > len(cluster):
            raise ReplicationError(
                f"{self.replicas} replicas need a device each, but {cluster.name!r} has "
                f"{len(cluster)}"
            )
        if why := self.uneven_parts(self.parts(self.replicas)):
            raise ReplicationError(why)

    def largest_part(self, replicas: int) -> Fraction:
        """Return the batch size over the samples of the largest part."""
        parts = self.parts(replicas)
        if self.samples is None:
            return Fraction(parts)
        return Fraction(self.samples, -(-self.samples // parts))

    def step_samples(self, replicas: int) -> int:
        """Return the number of samples per parameter update."""
        times = replicas * self.accumulate if self.batch == "per-replica" else 1
        return (self.samples or 1) * times

    def measured_s(
        self, sent_bytes: float, levels: Sequence[Level], measured: MeasuredAllReduce | None
    ) -> float | None:
        """Return the measured seconds of an all-reduce, None if this reduction was not measured."""
        if measured is None or self.reduction not in (AUTO, "ring", HIERARCHICAL):
            return None
        if self.reduction == HIERARCHICAL:
            return measured.hierarchical_s(sent_bytes, levels)
        return measured.seconds(sent_bytes, math.prod(ranks_of(levels)))

    def all_reduce(
        self,
        size_bytes: int,
        levels: Sequence[Level],
        measured: MeasuredAllReduce | None = None,
    ) -> AllReduce:
        """Return the all-reduce of a bucket over a network, given as levels, innermost first.

        Rings and hierarchical all-reduces take the times of the backend that runs them where these
        were ``measured``, and backends choose rings.
        """
        sent_bytes = size_bytes * PAYLOADS[self.payload]
        if (measured_s := self.measured_s(sent_bytes, levels, measured)) is not None:
            name = "ring" if self.reduction == AUTO else self.reduction
            reduction = AllReduce(algorithm=name, seconds=measured_s)
        elif self.reduction == AUTO:
            reduction = cheapest_all_reduce(sent_bytes, levels)
        else:
            reduction = all_reduce(self.reduction, sent_bytes, levels)
        if self.coding_bytes_per_s is None:
            return reduction
        coding_s = size_bytes / self.coding_bytes_per_s
        return replace(reduction, seconds=reduction.seconds + coding_s)

    def to_dict(self) -> dict[str, Any]:
        """Return the ``replicas`` part of a placement file."""
        reduction = {key: getattr(self, name) for key, (name, _) in _IN_FILE.items()}
        chosen = {
            "algorithms": list(self.algorithms),
            "levels": list(self.levels),
            "unplaced": self.unplaced,
        }
        return {
            "groups": [list(group) for group in self.groups],
            "batch": self.batch,
            "accumulate": self.accumulate,
            "reduction": {key: value for key, value in reduction.items() if value is not None},
            **{key: value for key, value in chosen.items() if value},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str) -> Replication:
        """Build replicas from their part of a placement file.

        Raises:
            ValueError: unknown or missing keys, or values of a wrong type or out of range.
        """
        top = fields(data, where, _KEYS, required=("groups",))
        reduction = fields(
            top.get("reduction", {}), f"{where}.reduction", frozenset(_IN_FILE), required=()
        )
        groups = _each(top, "groups", where, array)
        if not groups:
            raise ValueError("replicas are on one or more groups of equally many devices")
        batch = text(top.get("batch", "per-replica"), f"{where}.batch")
        return cls(
            groups=tuple(
                tuple(text(name, f"{where}.groups[{i}]") for name in group)
                for i, group in enumerate(groups)
            ),
            batch=batch,  # type: ignore[arg-type]  # checked in __post_init__
            accumulate=whole(top.get("accumulate", 1), f"{where}.accumulate"),
            algorithms=_each(top, "algorithms", where, text),
            levels=_each(top, "levels", where, whole),
            unplaced=boolean(top.get("unplaced", False), f"{where}.unplaced"),
            **{
                _IN_FILE[key][0]: _IN_FILE[key][1](value, f"{where}.reduction.{key}")
                for key, value in reduction.items()
            },
        )


def _each(
    top: Mapping[str, object], key: str, where: str, parse: Callable[[object, str], Any]
) -> tuple[Any, ...]:
    values = array(top.get(key, []), f"{where}.{key}")
    return tuple(parse(value, f"{where}.{key}[{i}]") for i, value in enumerate(values))
