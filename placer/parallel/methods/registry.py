"""The methods that keep replicas in sync, and their options; listing them imports none of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, TypeAlias

from envs.replication import BUCKET_BYTES
from graphs.names import suggestion

DEFAULT: Final = "allreduce"
WARMUP_STEPS: Final = 200
"""Default number of plain steps before gradients are sent as bits or low-rank matrices."""
Family: TypeAlias = Literal["reduction", "average", "server"]
_BLOCKS: Final = ("period", "warmup_steps", "block_momentum", "block_rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A method that keeps replicas in sync.

    Attributes:
        name: its name in commands.
        sends: what ranks send, in words.
        family: "reduction": gradients in every step; "average": models after every block of steps;
            "server": gradients to a parameter server, as they come.
        home: "module:name" of its reduction, block update or :class:`Sync`.
        options: names of the options in :class:`SyncConfig` that it takes.
        warmup_steps: default number of plain steps before it begins.
    """

    name: str
    sends: str
    family: Family
    home: str
    options: tuple[str, ...] = ()
    warmup_steps: int = 0


def _reduction(name: str, sends: str, home: str, *options: str, warmup_steps: int = 0) -> Method:
    return Method(
        name=name,
        sends=sends,
        family="reduction",
        home=home,
        options=options,
        warmup_steps=warmup_steps,
    )


def _average(name: str, sends: str, home: str, *options: str) -> Method:
    home = f"block_averager:{home}"
    return Method(name=name, sends=sends, family="average", home=home, options=options)


METHODS: Final = (
    _reduction(DEFAULT, "mean of gradients every step, in full precision", "reductions:AllReduce"),
    _reduction(
        "hierarchical",
        "the same level by level: inside nodes, then across",
        "hierarchical:Hierarchical",
        "levels",
    ),
    _reduction("fp16", "gradients are sent in fp16: half of the bytes", "reductions:Float16"),
    _reduction("bf16", "gradients are sent in bf16: half of the bytes", "reductions:BFloat16"),
    _reduction(
        "powersgd",
        "gradients are sent as products of thin matrices, with error feedback",
        "powersgd:PowerSgd",
        "approximation_rank",
        "warmup_steps",
        warmup_steps=WARMUP_STEPS,
    ),
    _reduction(
        "onebit",
        "a bit per gradient, with error feedback at both ends",
        "onebit:OneBit",
        "warmup_steps",
        warmup_steps=WARMUP_STEPS,
    ),
    _average(
        "ma",
        "model averaging: the mean of the models after every block of steps",
        "AVERAGING",
        "period",
        "warmup_steps",
    ),
    _average("bmuf", "averaging with Nesterov momentum of block updates", "BMUF", *_BLOCKS),
    _average(
        "bmuf-classic",
        "averaging with classical momentum of block updates",
        "BMUF_CLASSIC",
        *_BLOCKS,
    ),
    _average("slowmo", "SlowMo: slow momentum 0.5 on averaging", "SLOWMO", *_BLOCKS),
    _average("diloco", "DiLoCo: block rate 0.7, Nesterov momentum 0.9", "DILOCO", *_BLOCKS),
    Method(
        name="asgd",
        sends="asynchronous SGD: a parameter server applies gradients as they come",
        family="server",
        home="async_sgd:AsyncSgd",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncConfig:
    """Settings that keep the replicas of a run in sync; None means the default of the method.

    Attributes:
        method: name of the method, one of ``METHODS``.
        accumulate: backward passes per step, whose gradients are averaged.
        bucket_bytes: maximum bytes of gradients that are reduced together.
        warmup_steps: plain synchronous steps before the method begins.
        period: steps per block.
        block_momentum: momentum of block updates.
        block_rate: factor of block updates.
        levels: ranks at each level of the network, innermost first.
        approximation_rank: rank of the PowerSGD matrices.
    """

    method: str = DEFAULT
    accumulate: int = 1
    bucket_bytes: int = BUCKET_BYTES
    warmup_steps: int | None = None
    period: int | None = None
    block_momentum: float | None = None
    block_rate: float | None = None
    levels: tuple[int, ...] | None = None
    approximation_rank: int | None = None

    def __post_init__(self) -> None:
        least = {"warmup_steps": 0}
        for name in ("accumulate", "bucket_bytes", *least, "period", "approximation_rank"):
            value = getattr(self, name)
            if value is not None and value < least.get(name, 1):
                raise ValueError(f"{name} is {value}, below {least.get(name, 1)}")
        if self.block_momentum is not None and not 0 <= self.block_momentum < 1:
            raise ValueError(f"block_momentum is {self.block_momentum}, not within 0 .. 1")
        if self.block_rate is not None and not (0 < self.block_rate < math.inf):
            raise ValueError(f"block_rate is {self.block_rate}, not a number above 0")
        if self.levels is not None and not (self.levels and min(self.levels) >= 1):
            raise ValueError(f"levels are {self.levels}, not numbers of ranks")
        taken = method_named(self.method).options
        if ignored := next((name for name in self.options if name not in taken), None):
            takers = ", ".join(other.name for other in METHODS if ignored in other.options)
            raise ValueError(f"sync {self.method!r} takes no {ignored}; {takers} do")

    @property
    def options(self) -> dict[str, Any]:
        """Return {name: value} of the options of the method that are set."""
        return {name: value for name in OPTIONS if (value := getattr(self, name)) is not None}


_OF_ALL: Final = ("method", "accumulate", "bucket_bytes")
OPTIONS: Final = tuple(own.name for own in fields(SyncConfig) if own.name not in _OF_ALL)
"""Options that only some of the methods take."""


def method_named(name: str) -> Method:
    """Return the method with this name.

    Raises:
        ValueError: there is no such method; the message lists the known ones.
    """
    known = {method.name: method for method in METHODS}
    if name not in known:
        hint = suggestion(name, known, cutoff=0.4)
        raise ValueError(f"there is no sync {name!r}: there are {', '.join(known)}{hint}")
    return known[name]
