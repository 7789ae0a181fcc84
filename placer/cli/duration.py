"""How long an optimization takes: roughly, before it begins, and by its parts at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from placer.search.budget import Budget

PREPARING_S: Final = 20.0
"""Calibrating two cores takes 14 s, the ops of a small model 3 s; all of it is kept afterwards."""
RUNNING_S: Final = 15.0
"""Eight candidates and 1.5 s for each, see :func:`placer.rigs.rounds_for`, and workers to start."""


def duration(seconds: float) -> str:
    """Seconds, minutes from a minute and a half on, hours from as many minutes.

    >>> duration(20.0), duration(600.0), duration(86400.0)
    ('20 s', '10 min', '24 h')
    """
    if seconds < 90:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 5400 else f"{seconds / 3600:.4g} h"


def foretold(budget: Budget, *, is_model: bool, is_run: bool) -> str:
    """A sentence on how long it will take; of a graph file there is but the search."""
    known = budget.seconds or 0.0
    if not is_model:
        told = (
            f"about {duration(known)}, the search" if known else f"as long as the search, {budget}"
        )
        return f"This takes {told}."
    before = f"extracting and measuring up to {duration(PREPARING_S)}, less of what is known"
    after = f"running the best {duration(RUNNING_S)}, more where a step takes longer than 0.2 s"
    rest = [before, after] if is_run else [before]
    total = duration(known + PREPARING_S + (RUNNING_S if is_run else 0.0))
    told = (
        f"{total} in all: search {duration(known)}; "
        if known
        else f"{total} and the search, {budget}: "
    )
    return f"This takes about {told}{'; '.join(rest)}."


def taken(total_s: float, *, search_s: float, measuring_s: float = 0.0) -> str:
    """How long it took, and what for."""
    parts = {
        "search": search_s,
        "running the best": measuring_s,
        "the rest": max(total_s - search_s - measuring_s, 0.0),
    }
    told = [f"{what} {duration(part_s)}" for what, part_s in parts.items() if part_s]
    return f"took {duration(total_s)}: {', '.join(told)}"
