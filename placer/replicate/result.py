"""Plans for data-parallel replicas: splits of the devices, the best one, and its scaling curve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Final

import numpy as np

from envs.collectives import HIERARCHICAL
from envs.placement import Placement
from envs.problem import Problem
from envs.reduction import CHEAPEST, Reduction
from envs.replica_set import Batch, Replicas
from envs.replicas import ReplicaStep, ReplicatedStep, slot_networks
from placer.milliseconds import milliseconds
from placer.outcome import Optimization, extraction_remarks
from placer.parallel.launching import why_not_run

if TYPE_CHECKING:
    from graphs.extract import Extraction

AUTO: Final = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replication:
    """Options of data-parallel replicas.

    ``per-replica``: every replica runs the step with its whole batch. ``global``: replicas share
    the batch, and the ``accumulate`` passes of a replica share its part. ``samples`` is the batch
    size of the given step; None is the first dimension of a model's inputs, and 1 for a graph.
    """

    replicas: int | None = None  # None: choose the best number
    batch: Batch = "per-replica"
    accumulate: int = 1
    reduction: Reduction = field(default_factory=Reduction)
    samples: int | None = None

    def __post_init__(self) -> None:
        for name in ("replicas", "accumulate", "samples"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ValueError(f"{name} is {count}, below 1")
        reduction = self.reduction
        if reduction.every > 1 and reduction.payload != "fp32":
            raise ValueError(
                f"parameters that are averaged every {reduction.every} steps are sent in full "
                f"precision, not as {reduction.payload}: leave the payload out, or the averaging"
            )

    @classmethod
    def of(cls, given: int | str | Replication) -> Replication:
        """Convert a number of replicas or "auto".

        Raises:
            ValueError: the argument is neither.
        """
        if isinstance(given, Replication):
            return given
        if isinstance(given, str) and given != AUTO:
            raise ValueError(f"replicas are {given!r}: give their number, or {AUTO!r}")
        return cls(replicas=None if isinstance(given, str) else given)

    def parts(self, replicas: int) -> int:
        """Return into how many parts the step's batch is divided for one pass of one replica."""
        return replicas * self.accumulate if self.batch == "global" else 1

    def why_not(self, parts: int) -> str:
        """Return why the batch cannot be divided so, "" if it can or its size is unknown."""
        if self.samples is None or self.samples % parts == 0:
            return ""
        if self.samples < parts:
            told = f"{parts} passes would have less than one of the {self.samples} samples each"
        else:
            told = f"The {self.samples} samples are not {parts} equal parts"
        passes = f"{self.accumulate} pass{'es' if self.accumulate > 1 else ''}"
        return f"{told} ({parts // self.accumulate} replicas x {passes})."

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Split:
    """Replicas on groups of devices of equal size; without a placement ``why`` gives the reason."""

    groups: tuple[tuple[str, ...], ...]
    samples: int  # per parameter update
    found: Optimization | None = None
    alone: ReplicaStep | None = None
    step: ReplicatedStep | None = None
    one_samples_per_s: float = np.nan  # of one replica, with the whole global batch
    is_baseline: bool = False  # for comparison, not requested
    why: str = ""

    @property
    def replicas(self) -> int:
        """Return the number of replicas."""
        return len(self.groups)

    @property
    def devices_each(self) -> int:
        """Return the number of devices per replica."""
        return len(self.groups[0])

    @property
    def devices(self) -> int:
        """Return the number of devices of all replicas."""
        return self.replicas * self.devices_each

    @property
    def step_s(self) -> float:
        """Return the step time with reductions; inf without a placement."""
        return np.inf if self.step is None else self.step.step_s

    @property
    def samples_per_s(self) -> float:
        """Return the throughput; 0 without a placement."""
        return self.samples / self.step_s if self.step_s else np.inf

    @property
    def efficiency(self) -> float:
        """Return the throughput over ``replicas`` times that of one; nan without a placement."""
        return share_of_ideal(self.samples_per_s, self.replicas * self.one_samples_per_s)

    @property
    def name(self) -> str:
        """Return replicas x devices of each.

        >>> Split(groups=(("a", "b"), ("c", "d")), samples=1).name
        '2 x 2'
        """
        return f"{self.replicas} x {self.devices_each}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """The chosen placement with another number of replicas; they share a global batch."""

    replicas: int
    devices: int
    samples_per_s: float
    efficiency: float
    exposed_s: float
    hidden_s: float
    beyond: bool  # more devices than the cluster has
    fits: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplicaPlan:
    """All splits, the best requested one first; at least that one has a placement."""

    problem: Problem  # of the whole cluster and batch
    wanted: Replication
    splits: tuple[Split, ...]
    curve: tuple[CurvePoint, ...]
    searched: int
    left_out: int  # searches skipped because the user stopped
    search_s: float
    notes: tuple[str, ...] = ()
    extraction: Extraction | None = None
    cost_source: Mapping[str, str] = field(default_factory=dict)

    @property
    def best(self) -> Split:
        """Return the requested split with most samples per second; on ties, fewest devices."""
        return self.splits[0]

    @property
    def replicas(self) -> Replicas:
        """Return the replicas as a placement file records them."""
        step, reduction = self.best.step, self.wanted.reduction
        assert step is not None
        sent: Counter[str] = Counter()
        for size, how in step.reductions:
            sent[how.algorithm] += size
        algorithms = tuple(name for name, _ in sent.most_common())
        return Replicas(
            groups=self.best.groups,
            batch=self.wanted.batch,
            accumulate=self.wanted.accumulate,
            reduction=reduction,
            algorithms=algorithms if reduction.algorithm == CHEAPEST else (),
            levels=self._levels(step) if HIERARCHICAL in algorithms else (),
        )

    def _levels(self, step: ReplicatedStep) -> tuple[int, ...]:
        index = self.problem.cluster.index
        groups = [[index(name) for name in group] for group in self.best.groups]
        slot = step.buckets.slot[step.buckets.size_bytes.argmax()]
        return tuple(level.ranks for level in slot_networks(self.problem, groups)[slot].levels)

    @property
    def found(self) -> Optimization:
        """Return the result for one replica, with the replicated step in its prediction."""
        best = self.best
        assert best.found is not None and best.step is not None  # noqa: PT018  # the first has both
        predicted = {
            **(best.found.placement.predicted or {}),
            "replicated_step_s": best.step.step_s,
            "exposed_communication_s": best.step.exposed_s,
            "hidden_communication_s": best.step.hidden_s,
        }
        placement: Placement = replace(
            best.found.placement,
            predicted=predicted,
            replicas=self.replicas,
        )
        return replace(
            best.found,
            placement=placement,
            search_s=self.search_s,
            extraction=self.extraction,
            cost_source=self.cost_source,
            replication=self,
        )

    @property
    def shown(self) -> tuple[Split, ...]:
        """Return, for each number of devices, the best split and the one with most replicas."""
        kept = []
        for size in sorted({split.devices_each for split in self.splits}):
            own = [split for split in self.splits if split.devices_each == size]
            most = max(own, key=lambda split: split.replicas)
            kept += [own[0]] if own[0] is most else [own[0], most]
        return tuple(kept)

    def pure(self, *, replicas: bool) -> Split | None:
        """Return the split for pure data parallelism (one device each) or pure placement.

        Pure placement is one replica on all devices. None if that split was not planned.
        """
        every = self.problem.device_count
        able = [s for s in self.splits if (s.devices_each if replicas else s.replicas) == 1]
        if not replicas:
            able = [s for s in able if s.devices_each == every]
        return max(able, key=lambda split: split.devices, default=None)

    @property
    def verdict(self) -> str:
        """Return the best split and how it compares to pure data parallelism and pure placement."""
        best, step = self.best, self.best.step
        assert step is not None
        text = (
            f"{_replicas(best)}: {best.samples_per_s:.4g} samples/s{self._gain(best)}, a step of "
        )
        text += f"{milliseconds(step.step_s)} ms"
        if self.wanted.accumulate > 1:
            text += f" in {self.wanted.accumulate} passes"
        if best.replicas > 1:
            text += (
                f", {milliseconds(step.exposed_s)} ms of it communication that is not hidden "
                f"({milliseconds(step.hidden_s)} ms are)"
            )
        others = (
            ("pure data parallelism", self.pure(replicas=True)),
            ("pure placement", self.pure(replicas=False)),
        )
        compared = [
            f"It is {name}." if other is best else self._against(name, other)
            for name, other in others
            if other is not None and best.devices > 1
        ]
        return " ".join([f"{text}.", *compared])

    def _gain(self, split: Split) -> str:
        single, is_shared = self.pure(replicas=True), self.wanted.batch == "global"
        if single is None or single.step is None or split.devices == 1 or is_shared:
            return ""
        return f", {split.samples_per_s / single.one_samples_per_s:.3g}x one device"

    def _against(self, name: str, other: Split) -> str:
        if other.step is None:
            return f"{name.capitalize()} ({other.name}) is not possible: {other.why.rstrip('.')}."
        ratio = self.best.samples_per_s / other.samples_per_s
        why = f"steps of {milliseconds(other.step.step_s)} ms for {other.samples} samples"
        why += self._gain(other)
        if other.replicas > 1:
            why += (
                f", of which {milliseconds(other.step.exposed_s)} ms are communication that "
                "nothing hides"
            )
        return f"That is {ratio:.2f}x {name} ({other.name}: {why})."

    @property
    def remarks(self) -> list[str]:
        """Return remarks that qualify the numbers, one sentence each."""
        found = ["Nothing was run: steps are the simulator's.", *self.notes]
        beyond = [point for point in self.curve if point.beyond]
        if beyond:
            found.append(
                f"Beyond {self.problem.device_count} devices the outermost level of the cluster's "
                "network is taken to have more ranks."
            )
        if large := [point.replicas for point in self.curve if not point.fits]:
            found.append(
                f"The batch does not fit on {max(large)} replicas or fewer: their steps are those "
                "of devices with more memory."
            )
        if why := why_not_run(self.replicas):
            found.append(why)
        if self.left_out:
            found.append(f"Stopped early: {self.left_out} searches were not made.")
        if self.extraction is not None:
            found += extraction_remarks(self.extraction)
        return found


def share_of_ideal(samples_per_s: float, ideal: float) -> float:
    """Return a throughput over the ideal one; 1 if steps take no time."""
    return 1.0 if np.isinf(ideal) else samples_per_s / ideal


def _replicas(split: Split) -> str:
    each = "1 device" if split.devices_each == 1 else f"{split.devices_each} devices"
    if split.replicas == 1:
        return f"One replica on {each}"
    return f"{split.replicas} replicas of {each} each"
