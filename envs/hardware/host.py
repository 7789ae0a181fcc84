"""Hosts: which devices share the thread that issues their ops, and which ops occupy it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from envs.hardware.core_sets import is_core_set
from graphs.text import suggestion

STAGING_BYTES: Final = 64 << 20
"""Page-locked memory through which what the CPU made is sent to the GPUs of its thread."""
STAGING_PARTS: Final = 4
"""Least number of pieces that fill it, so that one is written while others are sent."""
SMALL_BYTES: Final = 1 << 20
"""Size up to which the thread that sends a tensor writes it itself instead of another thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One thread that issues the ops of the devices it names, one after the other.

    With ``overlap``, copies from these devices run beside their ops; otherwise in line with them.
    With ``autograd``, the backward pass is issued by PyTorch's autograd: in reverse of the forward
    pass.
    """

    devices: tuple[str, ...]
    overlap: bool = False
    autograd: bool = False

    def __post_init__(self) -> None:
        if not self.devices:
            raise ValueError("a host names no devices; list those that its thread issues ops for")

    def among(self, names: set[str]) -> Host | None:
        """Return the host of those of its devices that are named, None if there are none."""
        kept = tuple(name for name in self.devices if name in names)
        return replace(self, devices=kept) if kept else None


def check_hosts(cluster: str, hosts: Sequence[Host], names: Sequence[str]) -> None:
    """Raise ValueError for a host with unknown devices, or devices of another host."""
    named = Counter(name for host in hosts for name in host.devices)
    for name, count in named.items():
        if name not in names:
            raise ValueError(
                f"cluster {cluster!r}: a host names device {name!r}; "
                f"there are {', '.join(names)}{suggestion(name, names)}"
            )
        if count > 1:
            raise ValueError(
                f"cluster {cluster!r}: hosts name device {name!r} {count} times; "
                "one thread issues its ops, so name it once"
            )


def check_names_no_core(cluster: str, hosts: Sequence[Host]) -> None:
    """Raise ValueError for a host that names a core: only a graph of modules has one for cores."""
    for name in (name for host in hosts for name in host.devices):
        if is_core_set(name):
            raise ValueError(
                f"cluster {cluster!r}: a host names {name!r}, but a core has a worker process of "
                "its own that issues its ops; leave cores out of [[host]]"
            )


def is_synchronous(name: str, kind: str) -> bool:
    """Return whether an op occupies the thread that issues it: a core, or named or of kind "cpu".

    Kinds count up to ``:`` or ``*``.

    >>> is_synchronous("n1:cpu", "cpu*16"), is_synchronous("cuda:0", "cuda:NVIDIA H200")
    (True, False)
    >>> is_synchronous("n1:core:0", "core")
    True
    """
    return is_core_set(name) or "cpu" in (name, re.split("[:*]", kind)[0])
