"""Every wait, event and record of a stream is there for a reason: without it a test fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import pytest

from tests.helpers.late_reductions import LATE
from tests.helpers.overlapping import SCENARIOS
from tests.helpers.removed_waits import KEPT, Site, hits, killer, sites
from tests.helpers.sent_between_workers import TRANSPORT
from tests.helpers.timed_idle import COSTS, HARDWARE, STEPS

SEEDS: Final = range(6)
FEW_SEEDS: Final = range(2)  # all as late as possible, or as early
Scenarios = Mapping[str, Callable[[int], None]]
OWN_SCENARIOS: Final[Scenarios] = {**COSTS, **HARDWARE, **STEPS, **LATE, **TRANSPORT}
"""Those that are no test elsewhere."""


def beginning(scenarios: Scenarios, *words: str) -> Scenarios:
    """Return scenarios, those whose name begins with one of these words first."""
    return dict(sorted(scenarios.items(), key=lambda item: not item[0].startswith(words)))


BY_FOLDER: Final[Mapping[str, Scenarios]] = {
    "envs/costs/": COSTS,
    "envs/executors/device_workers/": TRANSPORT,
    "envs/executors/torch/forward_source.py": beginning(SCENARIOS, "input", "w", "placed"),
    "envs/executors/torch/": SCENARIOS,
    "envs/hardware/": HARDWARE,
    "envs/torch_runtime/": beginning(SCENARIOS, "measured"),
    "placer/cli/": STEPS,
    "placer/parallel/trials.py": STEPS,
    "placer/parallel/buckets.py": SCENARIOS,
    "placer/parallel/": LATE,
}
"""Scenarios that may notice a removal, by folder; the first that a path begins with counts."""


@pytest.mark.slow
@pytest.mark.parametrize("site", sites(), ids=str)
def test_without_it_something_goes_wrong(site: Site) -> None:
    found = next(each for path, each in BY_FOLDER.items() if site.path.startswith(path))
    selection = [
        (name, work, seed)
        for seed in SEEDS
        for name, work in found.items()
        if name not in OWN_SCENARIOS or seed in FEW_SEEDS
    ]
    assert killer(site, selection), f"nothing fails without {site}"


@pytest.mark.slow_repeats
@pytest.mark.parametrize("name", OWN_SCENARIOS)
def test_with_all_waits_all_goes_well(name: str) -> None:
    for seed in FEW_SEEDS:
        OWN_SCENARIOS[name](seed)


def test_whatever_has_to_do_with_waits_is_removed_or_kept_for_a_reason() -> None:
    """Lines are found by their text, sites in the syntax tree."""
    removed = {(site.path, site.line) for site in sites()}
    other = [
        f"{path}:{number}: {line.strip()}"
        for path, number, line in hits()
        if (path, number) not in removed and not any(kept.covers(path, line) for kept in KEPT)
    ]
    assert not other, "neither removed nor kept for a reason"


def test_no_reason_is_left_over() -> None:
    lines = hits()
    for kept in KEPT:
        assert any(kept.covers(path, line) for path, _, line in lines), kept
