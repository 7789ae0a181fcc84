"""Options of ``placer optimize``, and their conversion to search options and devices."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from placer.cli.arguments import (
    add_devices,
    add_extractor,
    add_in_flight,
    add_step,
    count,
    pin,
    pins_of,
    seed,
    why_no_step,
)
from placer.cli.replicas import add_replicas
from placer.cli.report import add_report
from placer.cli.tradeoff import add_pareto
from placer.placers.registry import DEFAULT

if TYPE_CHECKING:
    from envs.cluster import Cluster
    from placer.pipeline import Options
    from placer.policies import Policy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all options of ``placer optimize``."""
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
    parser.add_argument(
        "--verbose", action="store_true", help="print all remarks and what the columns mean"
    )


def options_of(args: argparse.Namespace) -> Options:
    """Return the options of the search.

    Raises:
        ValueError: an option is invalid or contradicts another.
        OSError: a file cannot be read.
    """
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
    """Return the policy that the placer uses.

    Raises:
        ValueError: the policy does not exist, or the placer uses none.
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


def cluster_of(args: argparse.Namespace) -> Cluster:
    """Return the devices to place on.

    Raises:
        ValueError: a device does not exist, or options for devices contradict each other.
        OSError: the cluster file cannot be read.
    """
    from envs.cluster import load_cluster
    from envs.discover import discover

    if args.cluster is not None and args.devices is not None:
        raise ValueError("give --devices or --cluster, not both")
    if args.cluster is not None and args.memory:
        raise ValueError("a cluster file says how much memory its devices have: leave --memory out")
    is_graph = args.target.endswith(".json")
    if (why := why_no_step(args, is_graph=is_graph)) is not None:
        raise ValueError(why)
    if args.cluster is not None:
        if is_graph:  # it has costs, so its devices may be anywhere
            return load_cluster(args.cluster)
        from envs.op_costs import load_devices

        return load_devices(args.cluster)
    if is_graph:
        raise ValueError("a graph file has no devices of its own: give --cluster cluster.toml")
    return discover(args.devices or "auto", args.memory)
