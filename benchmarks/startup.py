"""Startup time: --help, and the first evaluation of a graph file with and without a warm cache.

    python -m benchmarks startup

CPU seconds (user and system) of separate processes, the minimum of several. "First evaluation" is
the moment when `placer optimize graph.json` knows the cost of its first placement of that graph.
``cold`` starts with an empty cache of compiled code.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from benchmarks.record import Effort, Part
from benchmarks.simulator import cluster_of
from benchmarks.tables import Table
from envs.hardware.cluster import cluster_to_toml
from graphs.graph_file import save_graph
from graphs.synthetic.shapes import layered

OPS: Final = 1000
DEVICES: Final = 4
UNTIL_FIRST_EVALUATION: Final = """
import os, sys, time

from placer.cli.main import main
from placer.search.evaluator import Evaluator

costs = Evaluator.costs

def first_costs(self, devices, priority):
    found = costs(self, devices, priority)
    if self.problem.op_count == {ops}:
        seconds = time.process_time()
        print("first evaluation", seconds, "torch" in sys.modules, flush=True)
        os._exit(0)
    return found

Evaluator.costs = first_costs
main(sys.argv[1:])
"""


class Took(NamedTuple):
    """Times and output of a process."""

    wall_s: float
    cpu_s: float
    printed: str


def parts(effort: Effort) -> dict[str, Part]:
    """Return the parts."""
    repeats = effort.pick(quick=2, normal=5, full=5)
    found: dict[str, Part] = {"warm": lambda found: warm(found, repeats)}
    return found if effort.level == "quick" else found | {"cold": cold}


def warm(found: dict[str, Any], repeats: int) -> Table:
    """Time processes whose compiled code is in the cache."""
    with first_evaluation() as (command, _):
        took(command)  # compiles what is not in the cache
        first = least(command, repeats)
    help_s = least([sys.executable, "-m", "placer.cli.main", "--help"], repeats).cpu_s
    reached, with_torch = first.printed.split()[-2:]
    found.update(help_s=help_s, first_evaluation_s=float(reached), with_torch=with_torch == "True")
    return table([("placer --help", help_s), ("first evaluation of a graph file", float(reached))])


def cold(found: dict[str, Any]) -> Table:
    """Time a process that compiles everything."""
    with first_evaluation() as (command, folder):
        first = took(command, folder / "cache")
    found.update(wall_s=first.wall_s, cpu_s=first.cpu_s)
    return table([("the same, nothing in the cache of compiled code", first.cpu_s)])


def table(rows: Sequence[tuple[str, float]]) -> Table:
    """Return a row for each process."""
    note = f"CPU seconds; the graph has {OPS:,} ops on {DEVICES} devices"
    cells = tuple((name, f"{cpu_s:.2f}") for name, cpu_s in rows)
    return Table("Startup", note, ("process", "CPU seconds"), cells)


@contextmanager
def first_evaluation() -> Iterator[tuple[list[str], Path]]:
    """Yield a command that ends with the first evaluation of a graph file, and its folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        graph, cluster = folder / "graph.json", folder / "cluster.toml"
        save_graph(layered(np.random.default_rng(0), ops=OPS, width=8), graph)
        cluster.write_text(cluster_to_toml(cluster_of(DEVICES)))
        code = UNTIL_FIRST_EVALUATION.format(ops=OPS)
        asked = ["optimize", str(graph), "--cluster", str(cluster), "--budget", "100e", "--quiet"]
        yield [sys.executable, "-c", code, *asked, "--out", str(folder / "placement.json")], folder


def took(command: Sequence[str], cache: Path | None = None) -> Took:
    """Run a process, with its own cache of compiled code if one is given."""
    environment = dict(os.environ)
    if cache is not None:
        environment["NUMBA_CACHE_DIR"] = str(cache)
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    wall_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Took(wall_s, cpu_s, done.stdout)


def least(command: Sequence[str], repeats: int) -> Took:
    """Run a process several times and return the one with the least CPU time."""
    return min((took(command) for _ in range(repeats)), key=lambda one: one.cpu_s)
