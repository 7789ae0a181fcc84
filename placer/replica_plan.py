"""What replicating a placement gives: every split of the devices, the best, how it scales."""

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
    """What is asked for.

    ``per-replica``: every replica runs the step as it is given. ``global``: they share its batch,
    and ``accumulate`` passes share that of a replica. ``samples`` are those of the step as it is
    given; None is the first dimension of a model's inputs, and 1 for a graph.
    """

    replicas: int | None = None  # None: as many as are best
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
        """What is asked for by a number of replicas or "auto".

        Raises:
            ValueError: it is neither.
        """
        if isinstance(given, Replication):
            return given
        if isinstance(given, str) and given != AUTO:
            raise ValueError(f"replicas are {given!r}: give their number, or {AUTO!r}")
        return cls(replicas=None if isinstance(given, str) else given)

    def parts(self, replicas: int) -> int:
        """By what the batch of the step is divided for one pass of one replica."""
        return replicas * self.accumulate if self.batch == "global" else 1

    def why_not(self, parts: int) -> str:
        """Why the batch cannot be cut into so many parts, "" if it can or nobody knows it."""
        if self.samples is None or self.samples % parts == 0:
            return ""
        if self.samples < parts:
            told = f"{parts} passes would have less than one of the {self.samples} samples each"
        else:
            told = f"The {self.samples} samples are not {parts} equal parts"
        passes = f"{self.accumulate} pass{'es' if self.accumulate > 1 else ''}"
        return f"{told} ({parts // self.accumulate} replicas x {passes})."

    def largest_part(self, replicas: int) -> Fraction:
        """By what the batch is divided for the pass that has the most samples of it."""
        parts = self.parts(replicas)
        if self.samples is None:
            return Fraction(parts)
        return Fraction(self.samples, -(-self.samples // parts))

    def step_samples(self, replicas: int) -> int:
        """Samples of one update of the parameters."""
        times = replicas * self.accumulate if self.batch == "per-replica" else 1
        return (self.samples or 1) * times


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Split:
    """So many replicas on groups of so many devices each; without a plan it says why."""

    groups: tuple[tuple[str, ...], ...]
    samples: int  # of one update
    found: Optimization | None = None
    alone: ReplicaStep | None = None
    step: ReplicatedStep | None = None
    one_samples_per_s: float = np.nan  # of a single replica, with the whole batch if it is shared
    is_baseline: bool = False  # to compare with, not asked for
    why: str = ""

    @property
    def replicas(self) -> int:
        """How many there are."""
        return len(self.groups)

    @property
    def devices_each(self) -> int:
        """Of one replica."""
        return len(self.groups[0])

    @property
    def devices(self) -> int:
        """Of all replicas."""
        return self.replicas * self.devices_each

    @property
    def step_s(self) -> float:
        """Of all replicas with their reductions; inf without a plan."""
        return np.inf if self.step is None else self.step.step_s

    @property
    def samples_per_s(self) -> float:
        """0 without a plan."""
        return self.samples / self.step_s if self.step_s else np.inf

    @property
    def efficiency(self) -> float:
        """Throughput over that of as many times one replica; nan without a plan."""
        return share_of_ideal(self.samples_per_s, self.replicas * self.one_samples_per_s)

    @property
    def name(self) -> str:
        """As people write it.

        >>> Split(groups=(("a", "b"), ("c", "d")), samples=1).name
        '2 x 2'
        """
        return f"{self.replicas} x {self.devices_each}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """The chosen placement on more or fewer replicas, which share the batch if the plan says so."""

    replicas: int
    devices: int
    samples_per_s: float
    efficiency: float
    exposed_s: float
    hidden_s: float
    beyond: bool  # the cluster has fewer devices
    fits: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplicaPlan:
    """All splits, the best of those that were asked for first; at least that one has a plan."""

    problem: Problem  # of the whole cluster, with the batch as it is given
    wanted: Replication
    splits: tuple[Split, ...]
    curve: tuple[CurvePoint, ...]
    searched: int
    left_out: int  # searches that were not made, since the user stopped it
    search_s: float
    notes: tuple[str, ...] = ()
    extraction: Extraction | None = None
    cost_source: Mapping[str, str] = field(default_factory=dict)

    @property
    def best(self) -> Split:
        """Of what was asked for the most samples per second; of equal ones the fewest devices."""
        return self.splits[0]

    @property
    def replicas(self) -> Replicas:
        """As the placement's file records them."""
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
        """Ranks at each level of the network of the slot that has the largest bucket."""
        index = self.problem.cluster.index
        groups = [[index(name) for name in group] for group in self.best.groups]
        slot = step.buckets.slot[step.buckets.size_bytes.argmax()]
        return tuple(level.ranks for level in slot_networks(self.problem, groups)[slot].levels)

    @property
    def found(self) -> Optimization:
        """The placement of one replica, which knows of the others."""
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
        """Of every number of devices each the best split and the one with the most replicas."""
        kept = []
        for size in sorted({split.devices_each for split in self.splits}):
            own = [split for split in self.splits if split.devices_each == size]
            most = max(own, key=lambda split: split.replicas)
            kept += [own[0]] if own[0] is most else [own[0], most]
        return tuple(kept)

    def pure(self, *, replicas: bool) -> Split | None:
        """One device for each replica and as many as there are, or one replica on all devices."""
        every = self.problem.device_count
        able = [s for s in self.splits if (s.devices_each if replicas else s.replicas) == 1]
        if not replicas:
            able = [s for s in able if s.devices_each == every]
        return max(able, key=lambda split: split.devices, default=None)

    @property
    def verdict(self) -> str:
        """What is best, and why it beats pure data parallelism and pure placement."""
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
        """What devices gain together; none was simulated with all of a batch that is shared."""
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
        """What a reader of the numbers should know, each a sentence."""
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
    """A throughput over what it would be at best; 1 where steps take no time."""
    return 1.0 if np.isinf(ideal) else samples_per_s / ideal


def _replicas(split: Split) -> str:
    each = "1 device" if split.devices_each == 1 else f"{split.devices_each} devices"
    if split.replicas == 1:
        return f"One replica on {each}"
    return f"{split.replicas} replicas of {each} each"
