"""``placer simulate``: the simulated step of a placement of a graph on a cluster."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from placer.cli.failures import BAD_USAGE, fail, why_not_writable


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("simulate", help="simulate a placement of a graph file")
    parser.add_argument("graph", type=Path, help="graph.json")
    parser.add_argument("--cluster", type=Path, required=True, metavar="FILE")
    parser.add_argument("--placement", type=Path, required=True, metavar="FILE")
    parser.add_argument(
        "--timeline", type=Path, metavar="FILE", help="write the step as Chrome trace"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Simulate and print step time, feasibility and memory; 1 if it is not feasible."""
    if args.timeline is not None and (why := why_not_writable(args.timeline)) is not None:
        return fail(BAD_USAGE, why)
    from envs.cluster import load_cluster
    from envs.placement import Placement
    from envs.problem import Problem
    from envs.simulator import Simulated, Simulator
    from envs.simulator.timeline import chrome_trace
    from graphs.files import load_graph
    from graphs.graph import GraphArrays

    try:
        cluster = load_cluster(args.cluster)
        graph = GraphArrays.from_graph(load_graph(args.graph))
        problem = Problem.of(graph, cluster)
        placement = Placement.load(args.placement, cluster.names).aligned(graph, cluster)
        [result] = Simulated(problem).evaluate([placement])
        if args.timeline is not None:
            schedule = Simulator(problem).run(*placement.arrays())
            args.timeline.write_text(json.dumps(chrome_trace(problem, schedule)))
    except (ValueError, OSError) as error:
        return fail(BAD_USAGE, error)
    step_s = result.step_s if result.feasible else None
    if args.json:
        answer = {
            "step_s": step_s,
            "feasible": result.feasible,
            "why": result.why,
            "peak_memory_bytes": dict(result.peak_memory_bytes),
            "parts": dict(result.parts),
        }
        print(json.dumps(answer))
    elif result.feasible:
        print(f"step: {result.step_s * 1e3:.6g} ms")
    else:
        print(f"not feasible: {result.why}")
    return 0 if result.feasible else 1
