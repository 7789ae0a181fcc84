"""Registry of the sync methods; reading the list imports none of them."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Final, cast

from placer.parallel.options import WARMUP_STEPS

if TYPE_CHECKING:
    from collections.abc import Callable

    from placer.parallel.sync import Setup, Sync

DEFAULT: Final = "allreduce"
_BLOCKS: Final = ("period", "warmup_steps", "block_momentum", "block_rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """Registry entry of a sync method."""

    name: str
    summary: str
    home: str  # "module:function" that makes a Sync from a Setup
    options: tuple[str, ...] = ()  # names of the SyncOptions that it takes
    warmup_steps: int = 0  # default number of plain steps before it begins


def _own(name: str, summary: str, home: str, *options: str, warmup_steps: int = 0) -> Method:
    return Method(
        name=name,
        summary=summary,
        home=f"placer.parallel.{home}",
        options=options,
        warmup_steps=warmup_steps,
    )


METHODS: Final = (
    _own(DEFAULT, "mean of gradients every step, in full precision", "methods:allreduce"),
    _own(
        "hierarchical",
        "the same level by level: inside nodes, then across",
        "methods:hierarchical",
        "levels",
    ),
    _own("fp16", "gradients are sent in fp16: half of the bytes", "methods:fp16"),
    _own("bf16", "gradients are sent in bf16: half of the bytes", "methods:bf16"),
    _own(
        "powersgd",
        "gradients are sent as products of thin matrices, with error feedback",
        "methods:powersgd",
        "approximation_rank",
        "warmup_steps",
        warmup_steps=WARMUP_STEPS,
    ),
    _own(
        "onebit",
        "a bit per gradient, with error feedback at both ends",
        "methods:onebit",
        "warmup_steps",
        warmup_steps=WARMUP_STEPS,
    ),
    _own(
        "ma",
        "model averaging: the mean of the models after every block of steps",
        "methods:averaging",
        "period",
        "warmup_steps",
    ),
    _own("bmuf", "averaging with Nesterov momentum of block updates", "methods:bmuf", *_BLOCKS),
    _own(
        "bmuf-classic",
        "averaging with classical momentum of block updates",
        "methods:bmuf_classic",
        *_BLOCKS,
    ),
    _own("slowmo", "SlowMo: slow momentum 0.5 on averaging", "methods:slowmo", *_BLOCKS),
    _own("diloco", "DiLoCo: block rate 0.7, Nesterov momentum 0.9", "methods:diloco", *_BLOCKS),
    _own(
        "asgd",
        "asynchronous SGD: a parameter server applies gradients as they come",
        "async_sgd:AsyncSgd",
    ),
)


def method_named(name: str) -> Method:
    """Return the method with this name.

    Raises:
        ValueError: there is no such method; the message lists the known ones.
    """
    known = {method.name: method for method in METHODS}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"there is no sync {name!r}: there are {', '.join(known)}{hint}")
    return known[name]


def check_options(name: str, given: tuple[str, ...]) -> None:
    """Check that a method takes all options that are set.

    Raises:
        ValueError: it does not take one of them, or there is no such method.
    """
    method = method_named(name)
    for option in given:
        if option not in method.options:
            takers = [other.name for other in METHODS if option in other.options]
            raise ValueError(f"sync {name!r} takes no {option}; {', '.join(takers)} do")


def sync_named(name: str, setup: Setup) -> Sync:
    """Create the sync method with this name for the replicas of all ranks.

    Raises:
        ValueError: there is no such method, it does not take an option that is set, or the replicas
            do not match.
    """
    check_options(name, setup.options.given)
    module, _, function = method_named(name).home.partition(":")
    make = cast("Callable[[Setup], Sync]", getattr(import_module(module), function))
    return make(setup)
