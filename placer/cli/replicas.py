"""Data-parallel replicas in ``placer optimize``: ``--data-parallel`` and its options."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any, Final

from envs.collectives import ALGORITHMS, PAYLOADS
from envs.replication import AUTO, BATCHES, Replication
from placer.cli.arguments import count, run_options

if TYPE_CHECKING:
    from placer.replicate.result import ReplicaPlan

OPTIONS: Final = (
    *("batch", "accumulate", "reduction", "payload", "coding_bytes_per_s", "average_every"),
    "samples",
)
"""Options that require ``--data-parallel``, named as in Replication; each is None if not given."""


def add_replicas(parser: argparse.ArgumentParser) -> None:
    """Add ``--data-parallel`` and its options."""
    group = parser.add_argument_group("replicas")
    group.add_argument(
        "--data-parallel",
        type=_replicas,
        metavar="auto|R",
        help="train R replicas of a placement, or as many as are best, each on devices of its own; "
        "gradients are reduced between them; the budget is shared, also with what R is compared "
        "to, nothing is run",
    )
    group.add_argument(
        "--batch",
        choices=BATCHES,
        help="every replica has the batch of the step (default), or they share it",
    )
    group.add_argument(
        "--accumulate",
        type=count,
        metavar="N",
        help="add up the gradients of N passes before they are reduced (default: 1)",
    )
    group.add_argument(
        "--reduction",
        choices=(AUTO, *ALGORITHMS),
        help="how gradients are reduced (default: auto, what is the fastest for each bucket)",
    )
    group.add_argument(
        "--payload",
        choices=tuple(PAYLOADS),
        help="how gradients in fp32 are sent (default: fp32)",
    )
    group.add_argument(
        "--coding-bytes-per-s",
        type=float,
        metavar="RATE",
        help="bytes of gradients that a replica turns into that payload, and back, in a second; "
        "`python -m benchmarks slow_network` measures it (default: that takes no time)",
    )
    group.add_argument(
        "--average-every",
        type=count,
        metavar="N",
        help="average parameters every N steps (model averaging, BMUF), and reduce no gradients",
    )
    group.add_argument(
        "--samples",
        type=count,
        metavar="N",
        help="samples in a step of the target (default: the first dimension of a model's inputs; "
        "1 for a graph file)",
    )


def replication_of(args: argparse.Namespace) -> Replication | None:
    """Return the requested replication, None without ``--data-parallel``.

    Raises:
        ValueError: an option requires ``--data-parallel``, or contradicts another.
    """
    if args.data_parallel is None:
        for name in OPTIONS:
            if getattr(args, name) is not None:
                option = f"--{name.replace('_', '-')}"
                raise ValueError(f"{option} is about replicas: give --data-parallel, too")
        return None
    given = {name: getattr(args, name) for name in OPTIONS if getattr(args, name) is not None}
    return Replication(replicas=None if args.data_parallel == AUTO else args.data_parallel, **given)


def print_planned(plan: ReplicaPlan, args: argparse.Namespace) -> None:
    """Print the plan as tables or JSON."""
    from placer.report.console import stdout_console
    from placer.report.replicas import plan_to_dict, print_plan, verdict_of
    from placer.result import extraction_to_dict

    if not args.json:
        if args.quiet:
            print(verdict_of(plan))
        else:
            print_plan(plan, stdout_console())
        return
    data: dict[str, Any] = {
        **plan_to_dict(plan),
        "seed": args.seed,
        "stopped": plan.left_out > 0,
        **extraction_to_dict(plan.extraction),
        "out": str(args.out),
        "command": command_of(plan, args) or None,
    }
    print(json.dumps(data, allow_nan=False))


def command_of(plan: ReplicaPlan, args: argparse.Namespace) -> str:
    """Return the command that trains the replicas, "" if the plan cannot be run."""
    from placer.parallel.plan import launch_command, why_not_run

    extraction = plan.extraction
    if extraction is None or not extraction.step.training or why_not_run(plan.replicas):
        return ""
    options = run_options(args)
    return launch_command(plan.replicas, args.target, args.out, *options)


def _replicas(text: str) -> int | str:
    return AUTO if text == AUTO else count(text)
