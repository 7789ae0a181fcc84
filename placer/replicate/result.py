"""Plans for data-parallel replicas: splits of the devices, the best one, and its scaling curve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from envs.collectives import HIERARCHICAL, MeasuredAllReduce
from envs.measurement import Measurement
from envs.problem import Problem
from envs.replicas.reductions import ReplicatedStep
from envs.replicas.step import ReplicaStep
from envs.replicas.topology import SlotNetwork, slot_networks
from envs.replication import AUTO, Replication
from placer.parallel.plan import OPTIMIZERS
from placer.replicate.fitting import Factors
from placer.result import Result, extraction_to_dict

if TYPE_CHECKING:
    from graphs.extract import Extraction


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Split:
    """Replicas on groups of devices of equal size; without a placement ``why`` gives the reason.

    Predictions are the simulated step times the ``factors`` that were fitted to earlier trials.
    """

    groups: tuple[tuple[str, ...], ...]
    samples: int  # per parameter update
    result: Result | None = None
    alone: ReplicaStep | None = None
    step: ReplicatedStep | None = None
    simulated_one_per_s: float = np.nan  # samples of one; placed: with the whole global batch
    is_baseline: bool = False  # for comparison, not requested
    why: str = ""
    joined: int = 0  # devices that are one device of an unplaced replica; 0: it is placed
    factors: Factors = field(default_factory=Factors)
    measurement: Measurement | None = None  # steps of a trial
    training: str = ""  # how it is trained, beyond its shape; see ``training_of``

    @property
    def replicas(self) -> int:
        """Return the number of replicas."""
        return len(self.groups)

    @property
    def devices_each(self) -> int:
        """Return the number of devices per replica."""
        return self.joined or len(self.groups[0])

    @property
    def devices(self) -> int:
        """Return the number of devices of all replicas."""
        return self.replicas * self.devices_each

    @property
    def step_s(self) -> float:
        """Return the predicted step time with reductions; inf without a placement."""
        if self.step is None:
            return np.inf
        return self.factors.step_s(self.step.step_s, self.step.alone_s)

    @property
    def exposed_s(self) -> float:
        """Return the predicted communication that makes the step longer; 0 without a placement."""
        return 0.0 if self.step is None else self.factors.communication * self.step.exposed_s

    @property
    def was_run(self) -> bool:
        """Return whether it was run without failure."""
        return self.measurement is not None and self.measurement.ok

    @property
    def measured_s(self) -> float | None:
        """Return the median of the measured steps, None if it was not run."""
        runs = self.measurement
        return runs.median_s if runs is not None and runs.ok else None

    @property
    def measured_samples_per_s(self) -> float | None:
        """Return the measured throughput, None if it was not run."""
        return None if self.measured_s is None else self.samples / self.measured_s

    @property
    def kind(self) -> str:
        """Return what plans have in common that share their factors.

        >>> Split(groups=(("core:0-1",),), samples=1, joined=2).kind
        'unplaced 1 x 2'
        """
        how = "unplaced" if self.joined else "placed"
        shape = f"{how} {self.replicas} x {self.devices_each}"
        return f"{shape}, {self.training}" if self.training else shape

    @property
    def samples_per_s(self) -> float:
        """Return the predicted throughput; 0 without a placement."""
        return self.samples / self.step_s if self.step_s else np.inf

    @property
    def one_samples_per_s(self) -> float:
        """Return the predicted throughput of a single replica; nan without a placement."""
        return self.simulated_one_per_s / self.factors.compute

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
        return f"{self.replicas} x {self.devices_each}{' unplaced' if self.joined else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """The placement with the best prediction, with another number of replicas, as simulated.

    Fitted factors do not count here. Replicas share a global batch.
    """

    replicas: int
    devices: int
    samples_per_s: float
    efficiency: float
    exposed_s: float
    hidden_s: float
    beyond_cluster: bool  # more devices than the cluster has
    fits: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplicaPlan:
    """All splits, the best requested one first; at least that one has a placement.

    The best is the fastest of those that were run, or else the one with the fastest prediction.
    Unplaced splits are always run, as they have no other purpose.
    """

    problem: Problem  # of the whole cluster and batch
    requested: Replication
    splits: tuple[Split, ...]
    curve: tuple[CurvePoint, ...]
    searched: int
    left_out: int  # searches skipped because the user stopped
    search_s: float
    extraction: Extraction | None = None  # with the whole batch
    cost_source: Mapping[str, str] = field(default_factory=dict)
    collectives: MeasuredAllReduce | None = None  # if measured; else those of the links
    uncalibrated: str = ""  # why they could not be measured, if that was tried
    untried: str = ""  # why no split was run although all devices are here, if there is a reason
    is_busy: bool = False  # whether other processes used the cores when splits were run

    @property
    def best(self) -> Split:
        """Return the requested split with most samples per second; on ties, fewest devices."""
        return self.splits[0]

    @property
    def is_of_part(self) -> bool:
        """Return whether the best placement is of the graph for a part of the batch."""
        assert self.best.result is not None, "the best split has a placement"
        return self.best.result.placement.graph != self.problem.graph.hash

    @property
    def candidates(self) -> tuple[Split, ...]:
        """Return the splits that were requested, without those for comparison."""
        return tuple(split for split in self.splits if not split.is_baseline)

    @property
    def optimizer(self) -> str:
        """Return the kind of optimizer with which ranks update."""
        own = None if self.extraction is None else self.extraction.step.optimizer
        return OPTIMIZERS[0] if own is None else own.kind

    @property
    def was_run(self) -> bool:
        """Return whether any split was run."""
        return any(split.was_run for split in self.splits)

    @property
    def replicas(self) -> Replication:
        """Return the replicas as a placement file records them."""
        return self.replication_of(self.best)

    def replication_of(self, split: Split) -> Replication:
        """Return the replicas of a split as a placement file records them."""
        step = split.step
        assert step is not None
        sent: Counter[str] = Counter()
        for size, reduction in step.reductions:
            sent[reduction.algorithm] += size
        algorithms = tuple(name for name, _ in sent.most_common())
        levels: tuple[int, ...] = ()
        if HIERARCHICAL in algorithms:
            slot = step.buckets.slot[step.buckets.size_bytes.argmax()]
            levels = tuple(level.ranks for level in self._networks(split)[slot].levels)
        return replace(
            self.requested,
            replicas=None,
            samples=None,
            groups=split.groups,
            algorithms=algorithms if self.requested.reduction == AUTO else (),
            levels=levels,
            unplaced=split.joined > 0,
        )

    @property
    def reduces_as_measured(self) -> bool:
        """Return whether reductions of the best split are predicted by times of the backend."""
        networks = self.networks
        return (
            self.collectives is not None
            and len(networks) > 0
            and all(
                self.requested.measured_s(0.0, network.levels, self.collectives) is not None
                for network in networks
            )
        )

    @property
    def networks(self) -> tuple[SlotNetwork, ...]:
        """Return the networks of the best split by the links; () if a link is missing."""
        try:
            return self._networks(self.best)
        except ValueError:
            return ()

    def _networks(self, split: Split) -> tuple[SlotNetwork, ...]:
        index = self.problem.cluster.index
        groups = [[index(name) for name in group] for group in split.groups]
        return slot_networks(self.problem, groups)

    @property
    def result(self) -> ReplicatedResult:
        """Return the result for one replica, with the replicated step in its prediction."""
        one, step = self.best.result, self.best.step
        assert one is not None, "the best split has a placement"
        assert step is not None, "as before"
        predicted = {
            **(one.placement.predicted or {}),
            "replicated_step_s": self.best.step_s,
            "exposed_communication_s": self.best.exposed_s,
            "hidden_communication_s": step.hidden_s,
        }
        placement = replace(
            one.placement, predicted=predicted, measured=self._measured(), replicas=self.replicas
        )
        one = replace(
            one,
            placement=placement,
            search_s=self.search_s,
            cost_source=self.cost_source,
        )
        return ReplicatedResult(
            **{part.name: getattr(one, part.name) for part in fields(Result)}, replication=self
        )

    def _measured(self) -> dict[str, Any] | None:
        """Return what a placement file records of the trials; None if the best was not run."""
        runs = self.best.measurement
        if runs is None or not runs.ok:
            return None
        trials = {
            split.name: {
                "step_s": split.measured_s,
                "predicted_s": split.step_s,
                "samples": split.samples,
            }
            for split in self.splits
            if split.was_run
        }
        return {
            "step_s": runs.median_s,
            "clock": "wall",
            "wall_median_s": runs.median_s,
            "wall_min_s": runs.min_s,
            "spread": runs.spread,
            "rounds": len(runs.wall_s),
            "samples": self.best.samples,
            **({"busy": True} if self.is_busy else {}),
            "trials": trials,
        }

    @property
    def shown(self) -> tuple[Split, ...]:
        """Return, for each number of devices, the best split and the one with most replicas.

        All that were run are also among them.
        """
        shown = []
        placed = [split for split in self.splits if not split.joined]
        for size in sorted({split.devices_each for split in placed}):
            of_size = [split for split in placed if split.devices_each == size]
            most = max(of_size, key=lambda split: split.replicas)
            shown += [s for s in of_size if s in (of_size[0], most) or s.measurement is not None]
        return (*shown, *(split for split in self.splits if split.joined))

    def pure(self, *, replicas: bool) -> Split | None:
        """Return the split for pure data parallelism (one device each) or pure placement.

        Pure placement is one replica on all devices. None if that split was not planned.
        """
        placed = [split for split in self.splits if not split.joined]
        if replicas:
            pure = [split for split in placed if split.devices_each == 1]
        else:
            shape = 1, self.problem.device_count
            pure = [s for s in placed if (s.replicas, s.devices_each) == shape]
        return max(pure, key=lambda split: split.devices, default=None)


def training_of(requested: Replication, extraction: Extraction | None) -> str:
    """Return what of the optimizer and of the reductions is not the default, "" for all."""
    optimizer = None if extraction is None else extraction.step.optimizer
    words = {
        requested.payload: requested.payload != "fp32",
        requested.reduction: requested.reduction not in (AUTO, "ring"),
        optimizer.kind if optimizer is not None else "": optimizer is not None,
    }
    return ", ".join(word for word, is_other in words.items() if is_other)


def share_of_ideal(samples_per_s: float, ideal: float) -> float:
    """Return a throughput over the ideal one; 1 if steps take no time."""
    return 1.0 if np.isinf(ideal) else samples_per_s / ideal


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class ReplicatedResult(Result):
    """The result for one replica, with the plan that holds all alternatives."""

    replication: ReplicaPlan

    def __str__(self) -> str:
        """Return the verdict on the plan."""
        return self.verdict

    @property
    def verdict(self) -> str:
        """Return sentences on the best split and how it compares to the others."""
        return str(import_module("placer.replicate.messages").verdict_of(self.replication))

    @property
    def remarks(self) -> list[str]:
        """Return remarks that qualify the numbers of the plan."""
        messages = import_module("placer.replicate.messages")
        return list(messages.remarks_of(self.replication))

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data for JSON; units are in the names, None is unknown."""
        report = import_module("placer.report.replicas")  # by name: reports are a layer above
        return {
            **report.plan_to_dict(self.replication),
            "seed": self.placement.made_by.seed,
            "stopped": self.replication.left_out > 0,
            **extraction_to_dict(self.replication.extraction),
        }
