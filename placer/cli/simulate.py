"""``placer simulate``: simulates a placement of a graph on a cluster."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from placer.cli.arguments import add_in_flight, count
from placer.cli.failures import BAD_USAGE, JOB_FAILED, fail, why_not_outputs, why_not_written


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("simulate", help="simulate a placement of a graph file")
    parser.add_argument("graph", type=Path, help="graph.json")
    parser.add_argument("--cluster", type=Path, required=True, metavar="FILE")
    parser.add_argument("--placement", type=Path, required=True, metavar="FILE")
    parser.add_argument(
        "--micro-batches",
        type=count,
        metavar="M",
        help="take the graph as that of one micro-batch of M (default: as the placement says)",
    )
    add_in_flight(parser, "as the placement says, or one for each device")
    parser.add_argument(
        "--timeline", type=Path, metavar="FILE", help="write the step as Chrome trace"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Simulate the placement and print the prediction; return 1 if it is infeasible."""
    inputs = {"graph": args.graph, "--cluster": args.cluster, "--placement": args.placement}
    if (why := why_not_outputs({"--timeline": args.timeline}, inputs)) is not None:
        return fail(BAD_USAGE, why)
    from envs.hardware.cluster import load_cluster
    from envs.placement import Placement
    from envs.problem import Problem
    from envs.simulator import INFEASIBLE_NS, Simulated
    from envs.simulator.critical_path import critical_path, critical_path_to_list
    from envs.simulator.max_load import max_load_ns
    from graphs.graph import GraphArrays
    from graphs.graph_file import load_graph
    from placer.milliseconds import milliseconds
    from placer.report.timeline import write_timeline

    try:
        cluster = load_cluster(args.cluster)
        graph = GraphArrays.from_graph(load_graph(args.graph))
        problem = Problem.of(graph, cluster)
        placement = Placement.load(args.placement, cluster.names).aligned(graph, cluster)
        if args.micro_batches is not None:
            placement = replace(placement, micro_batches=args.micro_batches)
        if args.in_flight is not None:
            if placement.micro_batches == 1:
                raise ValueError("--in-flight is of several micro-batches: give --micro-batches")
            placement = replace(placement, in_flight=args.in_flight)
        backend = Simulated(problem)
        [result] = backend.evaluate([placement])
        path = []
        if args.json and result.feasible:
            whole, schedule = backend.run(placement)
            path = critical_path_to_list(whole, critical_path(whole, schedule))
    except (ValueError, OSError) as error:
        return fail(BAD_USAGE, error)
    load_ns = int(max_load_ns(problem, placement.arrays()[0])[0])
    step_s = result.step_s if result.feasible else None
    if args.json:
        answer = {
            "step_s": step_s,
            "micro_batches": placement.micro_batches,
            "in_flight": placement.in_flight,
            "period_s": result.period_s,
            "why_no_period": result.why_no_period,
            "max_load_s": load_ns / 1e9 if load_ns < INFEASIBLE_NS else None,
            "feasible": result.feasible,
            "why": result.why,
            "peak_memory_bytes": dict(result.peak_memory_bytes),
            "parts": dict(result.parts),
            "critical_path": path,
        }
        print(json.dumps(answer))
    elif result.feasible:
        print(f"step: {milliseconds(result.step_s)} ms")
        if result.period_s is not None:
            print(
                f"{placement.micro_batches} micro-batches, "
                f"{milliseconds(result.period_s)} ms for each further one"
            )
        elif result.why_no_period:
            print(f"time of a further micro-batch: unknown, {result.why_no_period}")
        if load_ns < INFEASIBLE_NS:
            print(f"largest load: {milliseconds(load_ns / 1e9)} ms")
    else:
        print(f"not feasible: {result.why}")
    if args.timeline is not None:
        try:
            write_timeline(problem, placement, args.timeline)
        except OSError as error:
            return fail(JOB_FAILED, why_not_written(args.timeline, error))
        except ValueError as error:
            return fail(JOB_FAILED, f"{args.timeline} is not written: {error}")
    return 0 if result.feasible else 1
