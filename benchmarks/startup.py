"""Startup time: --help, and the first evaluation of a graph file with and without a warm cache.

    python -m benchmarks.startup [--warm]

CPU seconds (user and system) of separate processes, the minimum of several. "First evaluation" is
the moment when `placer optimize graph.json` knows the cost of its first placement of that graph.
The last part compiles everything into an empty cache and prints for every compiled function how
often it was compiled (once for every combination of argument types) and how long that took, alone
and with its callees. ``--warm`` skips the last part.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from envs.cluster import cluster_to_toml
from graphs.files import save_graph
from graphs.synthetic import layered
from placer.bench.speed import cluster_of

OPS, DEVICES = 1000, 4
REPEATS = 5
SHOWN = 25
"""Number of functions in the table of compile times."""

UNTIL_FIRST_EVALUATION = """
import os, sys, time

from placer.cli.main import main
from placer.search.judge import Judge

costs = Judge.costs

def first_costs(self, devices, priority):
    found = costs(self, devices, priority)
    if self.problem.op_count == {ops}:
        seconds = time.process_time()
        print("first evaluation", seconds, "torch" in sys.modules, flush=True)
        os._exit(0)
    return found

Judge.costs = first_costs
main(sys.argv[1:])
"""
WITH_EVENTS = """
import json, time
from numba.core import event

class Compiling(event.Listener):
    def __init__(self):
        self.open, self.done = [], []

    def on_start(self, happening):
        self.open.append([time.process_time(), 0.0])

    def on_end(self, happening):
        began, inner_s = self.open.pop()
        total_s = time.process_time() - began
        if self.open:
            self.open[-1][1] += total_s
        function = happening.data["dispatcher"].py_func
        name = f"{function.__module__}.{function.__qualname__}"
        self.done.append((name, total_s - inner_s, total_s))

listener = Compiling()
event.register("numba:compile", listener)
try:
    from placer.search import compiling

    compiling._started = lambda: None  # all in this process
    compiling.load_compiled_code()
finally:
    print(json.dumps(listener.done))
"""


class Took(NamedTuple):
    """Times and output of a process."""

    wall_s: float
    cpu_s: float
    printed: str


def took(command: Sequence[str], cache: Path | None = None) -> Took:
    environment = dict(os.environ)
    if cache is not None:
        environment["NUMBA_CACHE_DIR"] = str(cache)
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    wall_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Took(wall_s, cpu_s, done.stdout)


def optimize(folder: Path) -> list[str]:
    """Return a command that ends with the first evaluation of a graph file."""
    graph, cluster = folder / "graph.json", folder / "cluster.toml"
    save_graph(layered(np.random.default_rng(0), ops=OPS, width=8), graph)
    cluster.write_text(cluster_to_toml(cluster_of(DEVICES)))
    code = UNTIL_FIRST_EVALUATION.format(ops=OPS)
    asked = ["optimize", str(graph), "--cluster", str(cluster), "--budget", "100e", "--quiet"]
    return [sys.executable, "-c", code, *asked, "--out", str(folder / "placement.json")]


def least(command: Sequence[str]) -> Took:
    return min((took(command) for _ in range(REPEATS)), key=lambda one: one.cpu_s)


def measure_warm(command: Sequence[str]) -> None:
    took(command)  # compiles what is not in the cache
    first = least(command)
    reached, with_torch = first.printed.split()[-2:]
    print(f"CPU seconds, the least of {REPEATS}")
    help_s = least([sys.executable, "-m", "placer.cli.main", "--help"]).cpu_s
    print(f"  placer --help            {help_s:6.2f}")
    print(f"  placer optimize of a graph file, {OPS:,} ops on {DEVICES} devices:")
    loaded = "with" if with_torch == "True" else "without"
    print(f"  to its first evaluation  {float(reached):6.2f}  {loaded} torch")


def measure_cold(command: Sequence[str], folder: Path) -> None:
    first = took(command, folder / "first")
    print("Nothing in the cache of compiled code")
    print(f"  to the first evaluation  {first.wall_s:6.1f} s, {first.cpu_s:.1f} s of CPU time")
    by_function = took([sys.executable, "-c", WITH_EVENTS], folder / "by function")
    print_functions(json.loads(by_function.printed))


def print_functions(done: list[Any]) -> None:
    """Print the functions that take longest to compile; ``done``: [name, own s, total s]."""
    own: dict[str, list[float]] = defaultdict(list)
    total: dict[str, float] = defaultdict(float)
    for name, own_s, total_s in done:
        own[name].append(own_s)
        total[name] += total_s
    print("  in one process    own s   with callees   times  function")
    for name in sorted(own, key=lambda name: -sum(own[name]))[:SHOWN]:
        print(f"  {sum(own[name]):21.2f} {total[name]:14.2f} {len(own[name]):7}  {name}")
    print(f"  {sum(map(sum, own.values())):21.2f} {'':14} {len(done):7}  all")


def main(*, warm: bool = False) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = optimize(folder)
        measure_warm(command)
        if not warm:
            measure_cold(command, folder)


if __name__ == "__main__":
    main(warm="--warm" in sys.argv[1:])
