"""``placer train``: train a policy by reinforcement learning."""

from __future__ import annotations

import argparse
from pathlib import Path

from placer.cli.failures import BAD_USAGE, fail


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("train", help="train a policy on generated graphs")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER/NAME", help="where the policy goes"
    )
    parser.add_argument("--seconds", type=float, default=100.0, help="per seed (default: 100)")
    parser.add_argument("--seeds", type=int, default=3, help="how many (default: 3); best is kept")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train and write the policy with its card."""
    from placer.policies.training import train

    try:
        train(args.out, seconds=args.seconds, seeds=args.seeds)
    except (ValueError, OSError) as error:
        return fail(BAD_USAGE, error)
    return 0
