"""Names of cores and core sets: ``core:0``, ``core:0-3`` or, with gaps, ``core:0+2-3``.

On another host its name comes first: ``n1:core:0-3``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import Final

_NAME: Final = re.compile(r"(?:(?P<host>.*):)?core:(?P<cores>.*)", re.DOTALL)
_RUN: Final = re.compile(r"([0-9]+)(?:-([0-9]+))?")
HIGHEST_CORE: Final = 1 << 16
"""More than any machine has; a name with a higher number is a mistake."""


def is_core_set(name: str) -> bool:
    """Return whether a device is named as a core or a core set of any host.

    >>> is_core_set("core:0"), is_core_set("n1:core:0-3"), is_core_set("n1:cpu")
    (True, True, False)
    """
    return _NAME.fullmatch(name) is not None


def has_several_cores(name: str) -> bool:
    """Return whether a core set has several cores.

    >>> has_several_cores("core:0"), has_several_cores("core:0-3"), has_several_cores("n1:core:0+2")
    (False, True, True)
    """
    return len(cores_named(name)) > 1


def core_runs(name: str) -> list[tuple[int, int]]:
    """Return the first and the last core of each run of cores in a name, in order.

    >>> core_runs("n1:core:4+0-2")
    [(0, 2), (4, 4)]

    Raises:
        ValueError: the name is no core set, a run is empty, or a core is in it twice.
    """
    named = _NAME.fullmatch(name)
    parts = [_RUN.fullmatch(part) for part in named["cores"].split("+")] if named else [None]
    runs = []
    for part in parts:
        if part is None:
            raise ValueError(
                f"there is no device {name!r}; write core:N or a core set core:N-M or core:N+M"
            )
        low, high = int(part[1]), int(part[2] or part[1])
        if low > high:
            raise ValueError(f"device {name} is empty: write the lower core first")
        if high > HIGHEST_CORE:
            raise ValueError(
                f"device {name} names core {high}: no machine has that many, write a lower number"
            )
        runs.append((low, high))
    runs.sort()
    if any(high >= low for (_, high), (low, _) in pairwise(runs)):
        raise ValueError(f"device {name} names a core twice: write each core once")
    return runs


def cores_named(name: str) -> set[int]:
    """Return the cores of a core set.

    >>> cores_named("core:0+2-3")
    {0, 2, 3}

    Raises:
        ValueError: as :func:`core_runs`.
    """
    return {core for low, high in core_runs(name) for core in range(low, high + 1)}


def check_core_sets(names: Iterable[str]) -> None:
    """Raise ValueError for a bad name of a core set, or two of one host that share a core."""
    runs: defaultdict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for name in names:
        if "core:" in name and (named := _NAME.fullmatch(name)):
            runs[named["host"] or ""] += [(low, high, name) for low, high in core_runs(name)]
    for of_host in runs.values():
        of_host.sort()
        for (_, end, one), (core, _, other) in pairwise(of_host):
            if end >= core:
                raise ValueError(
                    f"devices {one} and {other} overlap in core {core}: a core belongs to one "
                    "device only, so leave one of them out or write sets without common cores"
                )
