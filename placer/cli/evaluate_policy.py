"""``placer evaluate-policy``: scores a policy on graphs that it was not trained on."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from placer.cli.arguments import count
from placer.cli.failures import BAD_USAGE, JOB_FAILED, fail, why_not_outputs, why_not_written
from placer.cli.talk import progress_of, say


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "evaluate-policy",
        help="score a policy on a suite of graphs, and write that into its card",
    )
    parser.add_argument("policy", help="a policy that ships with placer, or the path of your own")
    parser.add_argument(
        "--suite",
        default="families",
        metavar="NAME",
        help="one of trained_policies/suites.toml (default: families)",
    )
    parser.add_argument(
        "--suites", type=Path, metavar="FILE", help="suites of your own, in such a file"
    )
    parser.add_argument(
        "--seeds", type=count, default=5, metavar="N", help="of the samples, from 0 (default: 5)"
    )
    parser.add_argument(
        "--no-card", action="store_true", help="print the scores only, leave the card as it is"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Evaluate the policy, print the scores, write them into its card."""
    from placer.policies.evaluation import evaluate, load_suites, suite_named, write_into_card
    from placer.policies.network import CARD, file_of, load, path_of

    try:
        suite = suite_named(args.suite, load_suites(args.suites))
        path, policy = path_of(args.policy), load(args.policy)
    except (ValueError, OSError) as error:
        return fail(BAD_USAGE, error)
    card = file_of(path, CARD)
    if not args.no_card and (why := why_not_outputs({"the card": card}, {})) is not None:
        return fail(BAD_USAGE, f"{why}; --no-card leaves it as it is")
    try:
        with progress_of(args) as progress:
            progress.stage(f"Evaluating {policy.name}")
            found = evaluate(policy, suite, seeds=args.seeds, progress=progress.advance)
    except ValueError as error:
        return fail(BAD_USAGE, error)
    if args.json:
        print(json.dumps({"policy": policy.name, **found}, allow_nan=False))
    else:
        _print(found)
    if args.no_card:
        return 0
    try:
        write_into_card(path, found)
    except OSError as error:
        return fail(JOB_FAILED, why_not_written(card, error))
    except ValueError as error:  # the card has changed meanwhile
        return fail(JOB_FAILED, error)
    say(args, f"written into {card}")
    return 0


def _print(found: Mapping[str, Any]) -> None:
    from rich.table import Table

    from placer.report.console import stdout_console

    rows: dict[str, dict[str, float]] = found["table"]
    shown = Table(box=None, pad_edge=False)
    shown.add_column("family")
    for name in next(iter(rows.values())):
        shown.add_column(name, justify="right")
    for family, scores in rows.items():
        cells = [f"{v:g}" if name == "graphs" else f"{v:.3f}" for name, v in scores.items()]
        shown.add_row(family, *cells)
    console = stdout_console()
    console.print(shown)
    count = len(found["seeds"])
    seeds = f"medians over {count} seeds" if count > 1 else "of 1 seed"
    console.print(f"Numbers are {found['scores_are']}; {seeds}.")
