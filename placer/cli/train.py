"""``placer train``: train a policy by reinforcement learning."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from placer.cli.arguments import seed
from placer.cli.failures import BAD_USAGE, JOB_FAILED, fail, why_not_outputs


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("train", help="train a policy on generated graphs")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FOLDER/NAME",
        help="where NAME.safetensors and its card NAME.json go",
    )
    parser.add_argument(
        "--seconds", type=float, default=100.0, help="processor time per seed (default: 100)"
    )
    parser.add_argument("--seeds", type=int, default=3, help="how many (default: 3); best is kept")
    parser.add_argument("--first-seed", type=seed, metavar="N", default=0, help="the default is 0")
    parser.add_argument(
        "--families", nargs="+", metavar="NAME", help="to train on (default: all but chains)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train, write the policy with its card, say which seed was kept."""
    if not args.out.name.strip("."):
        return fail(BAD_USAGE, f"--out {args.out} names no policy; write for example policies/mine")
    weights = args.out.with_name(args.out.name + ".safetensors")
    card = args.out.with_name(args.out.name + ".json")
    if (why := why_not_outputs({"weights": weights, "card": card}, {})) is not None:
        return fail(BAD_USAGE, why)
    from placer.policies.training import train
    from placer.report.progress import progress_for

    try:
        with progress_for(sys.stderr.isatty()) as progress:
            progress.stage(f"Training {args.out.name}")
            policy = train(
                args.out,
                seconds=args.seconds,
                seeds=args.seeds,
                first_seed=args.first_seed,
                chosen=args.families,
                progress=progress.advance,
            )
    except ValueError as error:
        return fail(BAD_USAGE, error)
    except OSError as error:
        return fail(JOB_FAILED, error)
    print(f"{policy.name}: seed {policy.card['seed']} of {args.seeds}, written to {weights}")
    return 0
