"""Options of ``placer optimize``, and their conversion to a job."""

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
    target_of,
    why_no_step,
)
from placer.cli.replicas import add_replicas, replication_of
from placer.cli.report import add_report
from placer.search.registry import DEFAULT

if TYPE_CHECKING:
    from placer.job import Job


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
        help="warm start: a placement, or a device_map as JSON; one more candidate, always run",
    )
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


def job_of(args: argparse.Namespace) -> Job:
    """Return the job that the arguments describe; its target is not loaded yet.

    Raises:
        ValueError: an argument is invalid or contradicts another.
        OSError: a file cannot be read.
    """
    from placer.job import Constraints, Job, SearchConfig

    target = target_of(args)
    if args.cluster is not None and args.devices is not None:
        raise ValueError("give --devices or --cluster, not both")
    if args.cluster is not None and args.memory:
        raise ValueError("a cluster file says how much memory its devices have: leave --memory out")
    if (why := why_no_step(args, is_graph=target.is_graph)) is not None:
        raise ValueError(why)
    if target.is_graph and args.cluster is None:
        raise ValueError("a graph file has no devices of its own: give --cluster cluster.toml")
    return Job.of(
        target,
        args.cluster or args.devices or "auto",
        search=SearchConfig(
            budget=args.budget,
            seed=args.seed,
            placer=args.placer,
            policy=args.policy or "auto",
            objective=args.objective,
            micro_batches=args.micro_batches,
            in_flight=args.in_flight,
            groups=args.groups,
            measure=not args.no_measure,
            start_from=args.start_from,
        ),
        constraints=Constraints(
            keep_together=tuple(args.keep_together), pins=pins_of(args.pin), memory=args.memory
        ),
        replicas=replication_of(args),
        extractor=args.extractor,
        fresh=args.fresh,
    )
