"""All that ``placer bench`` finds: plain data for a file, tables for people."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any, Final

from envs.cluster import Cluster
from graphs.whole_file import write_whole
from placer.bench.environment import environment, machine_name, plain
from placer.bench.instances import judged
from placer.bench.quality import (
    REFERENCE,
    bound_gaps,
    every_placer,
    gap_table,
    placer_table,
    planted_gaps,
)
from placer.bench.speed import SIZES, evaluations_per_s, speed_table
from placer.bench.steps import MODELS, measured_steps, step_table
from placer.bench.table import Table
from placer.placers.portfolio import Portfolio
from placer.policies import load
from placer.report.progress import Progress
from placer.search.budget import Budget
from placer.search.compiling import load_compiled_code

BEGIN: Final = "<!-- placer bench: begin -->"
END: Final = "<!-- placer bench: end -->"


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured; simulated searches are on one core, one after the other."""

    seeds: int
    search: Budget  # for optima and bounds
    equal: tuple[Budget, ...]  # at which placers are compared
    planted: int  # problems
    problems: tuple[str, ...]  # on which placers are compared
    models: tuple[str, ...]  # that really run
    real_budget: str  # of the search for each of them


FULL: Final = Effort(
    seeds=5,
    search=Budget(seconds=2.0),
    equal=(Budget(evaluations=1000), Budget(seconds=1.0)),
    planted=8,
    problems=(*REFERENCE, "inception 4u", "nmt 8", "moe 4u", "layered 8"),
    models=tuple(MODELS),
    real_budget="20s",
)
QUICK: Final = Effort(
    seeds=1,
    search=Budget(seconds=1.0),
    equal=(Budget(evaluations=300), Budget(seconds=0.2)),
    planted=4,
    problems=REFERENCE,
    models=tuple(MODELS)[:1],
    real_budget="3s",
)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Figures by part, as JSON knows them, and a table of each."""

    figures: dict[str, Any]
    tables: tuple[Table, ...]

    def save(self, path: Path) -> Path:
        """Write the figures; into a folder as ``DATE-MACHINE.json``. Returns the file."""
        if path.is_dir():
            path /= f"{date.today().isoformat()}-{machine_name()}.json"
        write_whole(path, json.dumps(plain(self.figures), indent=1) + "\n")
        return path

    def markdown(self) -> str:
        """All tables, and what they were measured on."""
        seen = self.figures["environment"]
        machine = f"{seen['processor']}, {seen['cores']} cores, torch {seen['torch']}"
        tables = [table.markdown() for table in self.tables]
        return "\n".join([f"Measured on {machine}, by `placer bench`.\n", *tables])


def gather(effort: Effort, cluster: Cluster, progress: Progress) -> Evidence:
    """Measure everything.

    Raises:
        PlacementError: every candidate of a model failed when it was run.
    """
    load_compiled_code()
    policy = load("generalist")
    figures: dict[str, Any] = {"environment": environment(), "effort": _told(effort)}
    progress.stage("Simulator")
    rates = {size[:2]: evaluations_per_s(*size) for size in SIZES}
    tables = [speed_table(rates)]
    figures["simulator"] = {f"{ops} ops, {count} devices": r for (ops, count), r in rates.items()}

    progress.stage("Known optima")
    own, seeds = Portfolio(policy), effort.seeds
    gaps = planted_gaps(own, effort.search, seeds, effort.planted)
    note = f"the portfolio above optima known by construction, {_of(effort.search, seeds)}"
    tables.append(gap_table("Known optima", note, gaps))
    figures["planted"] = gaps

    progress.stage("Lower bounds")
    problems = judged()
    reference = [item for item in problems if item.family in REFERENCE]
    gaps = bound_gaps(own, reference, effort.search, seeds)
    note = f"the portfolio above what no placement beats, {_of(effort.search, seeds)}"
    tables.append(gap_table("Lower bounds", note, gaps))
    figures["bounds"] = gaps

    progress.stage("Placers")
    compared = [item for item in problems if item.family in effort.problems]
    found = {str(budget): every_placer(compared, policy, budget, seeds) for budget in effort.equal}
    tables.append(placer_table(found, len(compared)))
    figures["placers"] = {
        budget: {scores.name: scores.to_dict() for scores in of_budget}
        for budget, of_budget in found.items()
    }

    progress.stage("Training steps")
    steps = measured_steps(effort.models, cluster, effort.real_budget, progress)
    tables.append(step_table(steps, ", ".join(cluster.names)))
    figures["steps"] = [asdict(each) for each in steps]
    return Evidence(figures, tuple(tables))


def put_into(path: Path, markdown: str) -> None:
    """Write tables between the marks of a Markdown file, or as a file of their own.

    Raises:
        ValueError: the file is there, but has no marks.
    """
    before, after = around_tables(path)
    write_whole(path, f"{before}{BEGIN}\n{markdown}{END}{after}")


def around_tables(path: Path) -> tuple[str, str]:
    """What a Markdown file has before and after its tables.

    Raises:
        ValueError: the file is there, but has no marks.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else f"{BEGIN}\n{END}\n"
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} has no lines {BEGIN} and {END} for the tables to go between")
    return before, after


def _of(budget: Budget, seeds: int) -> str:
    return f"{budget} of one core each" + (f", median and range of {seeds} seeds" * (seeds > 1))


def _told(effort: Effort) -> dict[str, Any]:
    return {
        "seeds": effort.seeds,
        "search": str(effort.search),
        "equal": [str(budget) for budget in effort.equal],
        "real_budget": effort.real_budget,
    }
