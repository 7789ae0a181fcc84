"""Parse device names, also of multi-host clusters: ``core:0-3``, ``n1:g0``, ``n1:cuda:0``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

_OWN: Final = re.compile(r"(?:(?P<host>.+):)?(?P<local>cpu|[a-z]\w*:[\d+-]+)")
_NUMBERED: Final = re.compile(r"(?:(?P<host>.+):)?[^:]*?(?P<number>\d+)")


def split_name(name: str) -> tuple[str, str]:
    """Split a device name into its host ("" if none) and its local torch device name.

    A device with only a number is a CUDA device; a name without a number is kept.

    >>> split_name("n1:g3"), split_name("n1:core:0-3"), split_name("cuda:2")
    (('n1', 'cuda:3'), ('n1', 'core:0-3'), ('', 'cuda:2'))
    """
    if own := _OWN.fullmatch(name):
        return own["host"] or "", own["local"]
    if numbered := _NUMBERED.fullmatch(name):
        return numbered["host"] or "", f"cuda:{int(numbered['number'])}"
    host, _, local = name.rpartition(":")
    return host, local


def hosts_of(names: Iterable[str]) -> tuple[str, ...]:
    """Return the hosts of the devices, in order, without repeats."""
    return tuple(dict.fromkeys(split_name(name)[0] for name in names))
