"""How long an optimization takes: roughly, before it begins, and by its parts at its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from placer.search.budget import Budget

PREPARING_S: Final = 20.0
"""Calibrating two cores takes 14 s, the ops of a small model 3 s; all of it is kept afterwards."""
RUNNING_S: Final = 15.0
"""Eight candidates and 1.5 s for each, see :func:`placer.rigs.rounds_for`, and workers to start."""
SMALLEST: Final = 0.02
"""Of all the time; stages that took less are not told one by one."""


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
        f"{total} in all on a quiet machine: search {duration(known)}; "
        if known
        else f"{total} on a quiet machine and the search, {budget}: "
    )
    return f"This takes about {told}{'; '.join(rest)}."


def taken(total_s: float, stages_s: Mapping[str, float]) -> str:
    """How long it took, and what for: {title of a stage: seconds}, the short ones together."""
    long_s = {what: part_s for what, part_s in stages_s.items() if part_s >= SMALLEST * total_s}
    parts = [f"{_named(what)} {duration(part_s)}" for what, part_s in long_s.items()]
    rest_s = max(total_s - sum(long_s.values()), 0.0)
    return f"took {duration(total_s)}: {', '.join([*parts, f'the rest {duration(rest_s)}'])}"


def _named(stage: str) -> str:
    """A title inside a sentence, without what it says in brackets."""
    title = stage.partition(" (")[0]
    return title[:1].lower() + title[1:]
