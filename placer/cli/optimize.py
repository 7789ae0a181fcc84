"""``placer optimize``: the main job."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placer.cli.arguments import (
    add_devices,
    add_extractor,
    add_in_flight,
    add_step,
    count,
    extraction_to_dict,
    pin,
    pins_of,
    seed,
    why_no_step,
)
from placer.cli.failures import BAD_USAGE, JOB_FAILED, fail, why_not_outputs, why_not_written
from placer.cli.replicas import add_replicas, check_replicas, plan_of, print_planned
from placer.cli.report import add_report, why_no_report
from placer.cli.tradeoff import add_pareto, check_pareto, print_weighed
from placer.placers.registry import DEFAULT

if TYPE_CHECKING:
    from envs.cluster import Cluster
    from graphs.extract import Step
    from placer.outcome import Optimization
    from placer.pipeline import Options
    from placer.policies import Policy
    from placer.replica_plan import ReplicaPlan
    from placer.report.progress import Progress
    from placer.tradeoff import Tradeoff

EPILOG = """\
targets:
  path/to/model.py:function   called without arguments, returns (model, inputs) or
                              (model, inputs, loss); with a loss the last input is the target:
                              loss(model(*inputs[:-1]), inputs[-1])
  hf:NAME                     a model of transformers, random weights, no download, as in
                              hf:bert-base-uncased or 'hf:gpt2?batch=2&sequence=64&n_layer=4'
  model.pt2                   a program that torch.export.save wrote (needs --inference)
  model.onnx                  a file of ONNX (needs --inference), with the sizes it leaves open,
                              as in 'model.onnx?batch=2&sequence=64'
  graph.json                  a graph with known costs (needs --cluster); nothing is run

examples:
  placer optimize examples/inception.py:build --devices core:0,core:1 --budget 60s
  placer optimize model.py:build --devices cuda:0,cpu --memory cuda:0=8GiB
  placer optimize model.py:build --inference --out placement.json --timeline timeline.json
  placer optimize graph.json --cluster priced.toml --pareto
  placer optimize 'hf:gpt2-xl?batch=8' --devices examples/8xh100.toml --data-parallel auto
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "optimize",
        help="find the fastest placement of a model and write it",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", help="path/to/model.py:function, hf:NAME or graph.json")
    add_devices(parser, "auto")
    parser.add_argument(
        "--cluster",
        type=Path,
        metavar="FILE",
        help="devices and links from a file (TOML, also as --devices FILE.toml); those not here "
        "are simulated by their rates",
    )
    parser.add_argument("--inference", action="store_true", help="place inference, not training")
    add_step(parser)
    parser.add_argument(
        "--budget",
        default="20s",
        help="of the search: seconds (60s, 2m) or evaluations (4000e), the default is 20s",
    )
    parser.add_argument(
        "--seed", type=seed, default=0, metavar="N", help="of the search, the default is 0"
    )
    parser.add_argument(
        "--objective",
        choices=["latency", "throughput", "max-load"],
        default="latency",
        help="what to make small: the time of one step (default); of a graph file also the time of "
        "each further micro-batch, or the largest load of a device in a pipeline",
    )
    parser.add_argument(
        "--micro-batches",
        type=count,
        default=1,
        metavar="M",
        help="a graph file is that of one micro-batch of M that make a step (default: 1)",
    )
    add_in_flight(parser, "one for each device")
    parser.add_argument(
        "--policy",
        metavar="NAME",
        help="trained policy that proposes placements, or none (default: generalist, where the "
        "placer asks one)",
    )
    parser.add_argument(
        "--placer",
        default=DEFAULT,
        metavar="NAME",
        help=f"who searches, see placer placers (default: {DEFAULT}); heuristics always take part",
    )
    parser.add_argument(
        "--groups",
        type=count,
        metavar="N",
        help="merge ops into at most N groups and place those: faster for large graphs, coarser",
    )
    parser.add_argument(
        "--keep-together",
        action="append",
        default=[],
        metavar="NAME",
        help="an op, a module or a glob such as 'layers.3.*': what matches shares a device; may be "
        "given again",
    )
    parser.add_argument(
        "--pin",
        type=pin,
        action="append",
        default=[],
        metavar="NAME=DEVICE",
        help="what matches the name runs on this device; may be given again",
    )
    parser.add_argument(
        "--start-from",
        type=Path,
        metavar="FILE",
        help="what you have: a placement, or a device_map as JSON; one more candidate, always run",
    )
    add_pareto(parser)
    add_replicas(parser)
    add_extractor(parser)
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="measure devices and ops anew, whatever is known of them (see placer cache)",
    )
    parser.add_argument(
        "--no-measure", action="store_true", help="end with the simulator's answer, run nothing"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("placement.json"),
        metavar="FILE",
        help="where the placement goes (default: placement.json)",
    )
    parser.add_argument(
        "--timeline", type=Path, metavar="FILE", help="write the simulated step as Chrome trace"
    )
    add_report(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON to stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Optimize, write the placement and the timeline, print the table."""
    if args.cluster is None and (args.devices or "").endswith(".toml"):
        args.cluster, args.devices = Path(args.devices), None
    outputs = {"--out": args.out, "--timeline": args.timeline, "--report": args.report}
    inputs = {"target": _file(args), "--cluster": args.cluster, "--start-from": args.start_from}
    if (why := why_not_outputs(outputs, inputs)) is not None:
        return fail(BAD_USAGE, why)
    try:
        options, cluster = _options(args), _cluster(args)
        check_pareto(args, cluster, options)
        check_replicas(args)
    except (ValueError, OSError) as error:
        return fail(BAD_USAGE, error)
    from graphs.extract import ExtractionError
    from graphs.selection import DemandError
    from placer.outcome import PlacementError, extraction_remarks
    from placer.report.console import stdout_console
    from placer.report.progress import progress_for
    from placer.report.table import print_optimization
    from placer.target import TargetError

    weighed: Tradeoff | None = None
    planned: ReplicaPlan | None = None
    try:
        with progress_for(sys.stderr.isatty()) as progress:
            if args.pareto:
                weighed = _weighed(args, cluster, options, progress)
                found = weighed.picked(args.pareto_pick or "fastest")
                found = replace(found, search_s=weighed.search_s)
            elif args.data_parallel is not None:
                planned = plan_of(
                    args, cluster, options, progress, lambda: _step(args, cluster, progress)
                )
                found = planned.found
            else:
                found = _optimize(args, cluster, options, progress)
    except (TargetError, DemandError) as error:
        return fail(BAD_USAGE, error)
    except (ExtractionError, PlacementError, ValueError, OSError, RuntimeError) as error:
        return fail(JOB_FAILED, error)
    why = _write(found, args)
    try:
        if weighed is not None:
            print_weighed(weighed, args)
        elif planned is not None:
            print_planned(planned, args)
        elif args.json:
            print(json.dumps(_summary(found, args), allow_nan=False))
        else:
            print_optimization(found, stdout_console())
    except KeyboardInterrupt:
        why = why or f"stopped while printing; the placement is in {args.out}"
    if why is not None:
        return fail(JOB_FAILED, why)
    if found.extraction is not None and args.json:
        for remark in extraction_remarks(found.extraction):
            print(remark, file=sys.stderr)
    print(_talk(found, args), file=sys.stderr)
    return 0


def _file(args: argparse.Namespace) -> Path:
    """The file that the target is in."""
    path, colon, _ = args.target.rpartition(":")
    return Path(path if colon else args.target)


def _options(args: argparse.Namespace) -> Options:
    from placer.given import load_given
    from placer.objectives import Objective
    from placer.pipeline import Options
    from placer.placers import placer_named
    from placer.search.budget import Budget

    objective = Objective(
        name=args.objective, micro_batches=args.micro_batches, in_flight=args.in_flight
    )
    if objective != Objective() and not args.target.endswith(".json"):
        raise ValueError(
            "a model is run step by step: other objectives and micro-batches are for graph files "
            "(placer extract writes one)"
        )
    policy = _policy(args)
    return Options(
        objective=objective,
        budget=Budget.parse(args.budget),
        seed=args.seed,
        policy=policy,
        placer=placer_named(args.placer, policy, objective=args.objective),
        measure=not args.no_measure,
        keep_together=tuple(args.keep_together),
        pins=pins_of(args.pin),
        fresh=args.fresh,
        extractor=args.extractor,
        groups=args.groups,
        start_from=None if args.start_from is None else load_given(args.start_from),
    )


def _policy(args: argparse.Namespace) -> Policy | None:
    """The policy that the placer asks.

    Raises:
        ValueError: there is no such policy, or nobody asks the one that is given.
    """
    from placer.placers import asks_policy
    from placer.policies import GENERALIST, load

    if args.policy == "none":
        return None
    if asks_policy(args.placer, objective=args.objective):
        return load(args.policy or GENERALIST)
    if args.policy is not None:
        raise ValueError(
            f"placer {args.placer!r} asks no policy under the objective {args.objective}: leave "
            "--policy out"
        )
    return None


def _cluster(args: argparse.Namespace) -> Cluster:
    from envs.cluster import load_cluster
    from envs.discover import discover
    from envs.op_costs import load_devices

    if args.cluster is not None and args.devices is not None:
        raise ValueError("give --devices or --cluster, not both")
    if args.cluster is not None and args.memory:
        raise ValueError("a cluster file says how much memory its devices have: leave --memory out")
    is_graph = args.target.endswith(".json")
    if (why := why_no_step(args, is_graph=is_graph)) is not None:
        raise ValueError(why)
    if args.cluster is not None:  # a graph has its costs, and may be on devices of anywhere
        return load_cluster(args.cluster) if is_graph else load_devices(args.cluster)
    if is_graph:
        raise ValueError("a graph file has no devices of its own: give --cluster cluster.toml")
    return discover(args.devices or "auto", args.memory)


def _optimize(
    args: argparse.Namespace, cluster: Cluster, options: Options, progress: Progress
) -> Optimization:
    from placer.pipeline import optimize_graph, optimize_step
    from placer.target import is_graph_file, load_graph_target

    if is_graph_file(args.target):
        return optimize_graph(load_graph_target(args.target), cluster, options, progress)
    return optimize_step(_step(args, cluster, progress), cluster, options, progress)


def _weighed(
    args: argparse.Namespace, cluster: Cluster, options: Options, progress: Progress
) -> Tradeoff:
    from placer.target import is_graph_file, load_graph_target
    from placer.weighing import weigh_graph, weigh_step

    if is_graph_file(args.target):
        return weigh_graph(load_graph_target(args.target), cluster, options, progress)
    return weigh_step(_step(args, cluster, progress), cluster, options, progress)


def _step(args: argparse.Namespace, cluster: Cluster, progress: Progress) -> Step:
    from envs.discover import is_here
    from graphs.optimizer import Optimizer
    from placer.target import load_step

    progress.stage("Loading the model")
    measures = any(map(is_here, cluster.names))
    step = load_step(args.target, training=not args.inference, weights=measures)
    return replace(step, optimizer=Optimizer.of(args.optimizer), dtype=args.dtype)


def _write(found: Optimization, args: argparse.Namespace) -> str | None:
    """Write the placement, then timeline and report; why that failed, None if it did not."""
    from placer.interrupt import uninterrupted
    from placer.report.timeline import write_timeline

    with uninterrupted():
        try:
            found.save(args.out)
        except OSError as error:
            return why_not_written(args.out, error)
        if args.timeline is not None:
            try:
                write_timeline(found.problem, found.placement, args.timeline)
            except OSError as error:
                why = why_not_written(args.timeline, error)
                return f"{why}; the placement is in {args.out}"
        if args.report is not None and (unwritten := why_no_report(found, args)) is not None:
            return f"{unwritten}; the placement is in {args.out}"
    return None


def _talk(found: Optimization, args: argparse.Namespace) -> str:
    talk = [f"placement: {args.out}"]
    if args.timeline is not None:
        talk.append(f"timeline: {args.timeline} (opens in ui.perfetto.dev)")
    if args.report is not None:
        talk.append(f"report: {args.report}")
    talk += [f"op costs on {kind}: {source}" for kind, source in found.cost_source.items()]
    talk.append(f"search: {found.search_s:.1f} s, seed {args.seed}")
    if found.stopped:
        talk.insert(0, "stopped early, this is the best so far")
    return "; ".join(talk)


def _summary(found: Optimization, args: argparse.Namespace) -> dict[str, Any]:
    data = found.placement.to_dict()
    times = data["measured"] or data["predicted"]
    return {
        "best": found.best.name,
        "objective": data["objective"],
        "micro_batches": data["micro_batches"],
        "in_flight": found.placement.in_flight,
        "step_s": times["step_s"],
        "predicted": data["predicted"],
        "measured": data["measured"],
        "speed_up": found.speed_up if math.isfinite(found.speed_up) else None,
        "lower_bound_s": found.lower_bound_s,
        "verdict": found.verdict,
        "cost_source": dict(found.cost_source),
        "search_s": found.search_s,
        "seed": args.seed,
        "stopped": found.stopped,
        **extraction_to_dict(found.extraction),
        "out": str(args.out),
    }
