"""What ``placer optimize --pareto`` does in place of placing on the whole cluster."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from envs.cluster import Cluster
    from placer.pipeline import Options
    from placer.tradeoff import Tradeoff


def add_pareto(parser: argparse.ArgumentParser) -> None:
    """Add ``--pareto`` and ``--pareto-pick``."""
    parser.add_argument(
        "--pareto",
        action="store_true",
        help="which devices are worth renting: step and price for every sub-cluster of --cluster, "
        "whose devices need price_per_hour; the budget is shared, nothing is run",
    )
    parser.add_argument(
        "--pareto-pick",
        choices=["fastest", "cheapest"],
        help="which placement is written with --pareto (default: fastest; cheapest: per step)",
    )


def check_pareto(args: argparse.Namespace, cluster: Cluster, options: Options) -> None:
    """Make sure that the options fit ``--pareto``.

    Raises:
        ValueError: they do not; says which, or which price is missing.
    """
    if not args.pareto:
        if args.pareto_pick is not None:
            raise ValueError("--pareto-pick says which placement --pareto writes: give both")
        return
    from placer.weighing import check_options

    if args.cluster is None:
        raise ValueError(
            "--pareto needs prices: give --cluster cluster.toml with price_per_hour = 2.49, in any "
            "currency, under each [[device]]"
        )
    check_options(cluster, options)


def print_weighed(found: Tradeoff, args: argparse.Namespace) -> None:
    """The table, or JSON."""
    from placer.report.console import stdout_console
    from placer.report.tradeoff import print_tradeoff, rent_line, tradeoff_to_dict
    from placer.result import extraction_to_dict

    if not args.json:
        if args.quiet:
            print(rent_line(found))
        else:
            print_tradeoff(found, stdout_console())
        return
    data: dict[str, Any] = {
        **tradeoff_to_dict(found),
        "picked": args.pareto_pick or "fastest",
        "seed": args.seed,
        "stopped": found.left_out > 0,
        **extraction_to_dict(found.extraction),
        "out": str(args.out),
    }
    print(json.dumps(data, allow_nan=False))
