"""The methods that keep replicas in sync, and their options; listing them imports none of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, TypeAlias

from envs.replication import BUCKET_BYTES
from graphs.strict_json import check_whole
from graphs.text import suggestion

DEFAULT: Final = "allreduce"
WARMUP_STEPS: Final = 200
"""Default number of plain steps before gradients are sent as bits or low-rank matrices."""
Family: TypeAlias = Literal["reduction", "average", "server"]
"""Ranks send gradients in every step, models after every block of steps, or gradients as they come
to a parameter server."""
_BLOCKS: Final = ("period", "warmup_steps", "block_momentum", "block_rate")


@dataclass(frozen=True, slots=True)
class Method:
    """A method that keeps replicas in sync.

    Attributes:
        name: its name in commands.
        family: how ranks communicate.
        home: "module:name" of its reduction or :class:`Sync`, or the name of its block update.
        sends: what ranks send, in words.
        options: names of the options in :class:`SyncConfig` that it takes.
        warmup_steps: default number of plain steps before it begins.
    """

    name: str
    family: Family
    home: str
    sends: str
    options: tuple[str, ...] = ()
    warmup_steps: int = 0


METHODS: Final = (
    Method(DEFAULT, "reduction", "reductions:AllReduce", "mean of gradients, in full precision"),
    Method(
        "hierarchical",
        "reduction",
        "reductions:Hierarchical",
        "the same level by level: inside nodes, then across",
        ("levels",),
    ),
    Method("fp16", "reduction", "reductions:Float16", "gradients in fp16: half of the bytes"),
    Method("bf16", "reduction", "reductions:BFloat16", "gradients in bf16: half of the bytes"),
    Method(
        "powersgd",
        "reduction",
        "reductions:PowerSgd",
        "gradients as products of thin matrices, with error feedback",
        ("approximation_rank", "warmup_steps"),
        WARMUP_STEPS,
    ),
    Method(
        "onebit",
        "reduction",
        "onebit:OneBit",
        "a bit per gradient, with error feedback at both ends",
        ("warmup_steps",),
        WARMUP_STEPS,
    ),
    Method("ma", "average", "AVERAGING", "mean of the models after every block", _BLOCKS[:2]),
    Method("bmuf", "average", "BMUF", "mean, with Nesterov momentum of block updates", _BLOCKS),
    Method("bmuf-classic", "average", "BMUF_CLASSIC", "mean, with classical momentum", _BLOCKS),
    Method("slowmo", "average", "SLOWMO", "SlowMo: mean, with slow momentum 0.5", _BLOCKS),
    Method("diloco", "average", "DILOCO", "DiLoCo: block rate 0.7, Nesterov momentum", _BLOCKS),
    Method("asgd", "server", "async_sgd:AsyncSgd", "gradients to a server, as they come"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncConfig:
    """Settings that keep the replicas of a run in sync; None means the default of the method.

    Attributes:
        method: name of the method, one of ``METHODS``.
        accumulate: backward passes per step, whose gradients are added up.
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
        for name in ("accumulate", "bucket_bytes", "warmup_steps", "period", "approximation_rank"):
            value, least = getattr(self, name), 0 if name == "warmup_steps" else 1
            if value is None:
                continue
            check_whole(value, name)
            if value < least:
                raise ValueError(f"{name} is {value}, below {least}")
        if self.block_momentum is not None and not 0 <= self.block_momentum < 1:
            raise ValueError(f"block_momentum is {self.block_momentum}, not within 0 .. 1")
        if self.block_rate is not None and not (0 < self.block_rate < math.inf):
            raise ValueError(f"block_rate is {self.block_rate}, not a number above 0")
        if self.levels is not None and not (self.levels and min(self.levels) >= 1):
            raise ValueError(f"levels are {self.levels}, not numbers of ranks")
        accepted = method_named(self.method).options
        if ignored := next((name for name in self.options if name not in accepted), None):
            takers = ", ".join(other.name for other in METHODS if ignored in other.options)
            raise ValueError(f"sync {self.method!r} takes no {ignored}; {takers} do")

    @property
    def options(self) -> dict[str, Any]:
        """Return {name: value} of the options of the method that are set."""
        return {name: value for name in OPTIONS if (value := getattr(self, name)) is not None}


_OF_ALL: Final = ("method", "accumulate", "bucket_bytes")
OPTIONS: Final = tuple(field.name for field in fields(SyncConfig) if field.name not in _OF_ALL)
"""Options that only some of the methods take."""


def method_named(name: str) -> Method:
    """Return the method with this name; an unknown one is a ValueError that lists all."""
    known = {method.name: method for method in METHODS}
    if name not in known:
        hint = suggestion(name, known, cutoff=0.4)
        raise ValueError(f"there is no sync {name!r}: there are {', '.join(known)}{hint}")
    return known[name]
