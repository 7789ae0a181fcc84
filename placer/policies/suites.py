"""Suites: named sets of graphs on clusters for the evaluation of policies.

They are in ``suites.toml`` beside the shipped policies::

    format = "placer-suites/1"

    [[suite]]
    name = "many-devices"
    about = "16 to 64 devices"
    families = ["layered", "moe"]     # of graphs/synthetic.py, or "reference"
    graphs = 42
    max_ops = 800
    seed = 4000000                    # of the graphs

    [suite.clusters]                  # see placer/policies/pool.py: Clusters
    devices = [16, 32, 64]
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, Literal

from graphs.strict_json import load_toml
from placer.policies.network import shipped
from placer.policies.pool import Clusters, Exercise, draw_pool, families
from placer.policies.records import Within, check_ranges, record
from placer.policies.training.config import Graphs, Ops, check_graphs

FORMAT: Final = "placer-suites/1"
SEED: Final = 4_000_000
"""Default seed; no graph for training, selection or testing is drawn from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A fixed set of graphs of some families on clusters."""

    name: str
    about: str = ""
    families: tuple[str, ...] = field(default_factory=families)
    graphs: Graphs = 56
    max_ops: Ops = 800
    seed: Annotated[int, Within(0, 2**63 - 1)] = SEED
    clusters: Clusters = field(default_factory=Clusters)

    def __post_init__(self) -> None:
        check_ranges(self)
        check_graphs(self.families, self.graphs, self.max_ops)

    def drawn(self) -> list[Exercise]:
        """Return the graphs as exercises."""
        return draw_pool(self.seed, self.graphs, self.max_ops, self.families, self.clusters)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Suites:
    format: Literal["placer-suites/1"]
    suite: tuple[Suite, ...] = ()


def load_suites(path: Path | None = None) -> Mapping[str, Suite]:
    """Return the suites of a file by name, by default the shipped ones.

    Raises:
        ValueError: the file is invalid, or two suites have one name; the message has the path of
            the key.
        OSError: it cannot be read.
    """
    return load_toml(path or shipped() / "suites.toml", _by_name)


def _by_name(content: object) -> Mapping[str, Suite]:
    found = record(_Suites, content).suite
    suites = {suite.name: suite for suite in found}
    if len(suites) < len(found):
        raise ValueError("two suites have one name")
    return suites


def suite_named(name: str, suites: Mapping[str, Suite]) -> Suite:
    """Return the suite with this name.

    Raises:
        ValueError: there is no such suite; the message lists all.
    """
    if name in suites:
        return suites[name]
    near = difflib.get_close_matches(name, suites, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"there is no suite {name!r}: there are {', '.join(suites)}{hint}")
