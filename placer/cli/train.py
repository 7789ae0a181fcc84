"""``placer train``: trains a policy by reinforcement learning, or evaluates one on a suite."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from placer.cli.arguments import add_devices, count, flag, option, output_group, seed, workers
from placer.cli.errors import JobError, UsageError, usage_errors
from placer.cli.output import check_outputs, print_result, progress_of, say, writing
from placer.sources.names import is_graph_file

if TYPE_CHECKING:
    from rich.console import Console

    from envs.hardware.cluster import Cluster
    from graphs.extract import Workload
    from placer.policies.training import TrainingConfig

HELP: Final = "train a policy by simulated or measured steps, or evaluate one"
EPILOG: Final = """\
A training that was stopped or killed goes on from NAME.checkpoint when the same command is given
again; with simulated reward it ends as it would have without. NAME.csv has a line for every
rollout; with the extra "track" so has NAME.tensorboard. Suites are in trained_policies/suites.toml.

examples:
  placer train --config trained_policies/generalist.toml --out trained_policies/generalist
  placer train --out policies/mine --families layered moe --decodes 100000 --seeds 1
  placer train --backend measured --target graphs/models/inception.py:build \\
    --devices core:0,core:1 --start generalist --decodes 64 --out policies/inception
  placer train --evaluate families --policy policies/mine
"""
ENDINGS = {"weights": "safetensors", "card": "json", "log": "csv", "checkpoint": "checkpoint"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    _add_training(parser.add_argument_group("training"))
    group = parser.add_argument_group("reward")
    option(
        group,
        "--backend",
        "reward: simulated steps, or measured steps of --target",
        shown="simulated",
        choices=["simulated", "measured"],
    )
    option(group, "--target", "model to measure, as for placer optimize")
    add_devices(group, "auto")
    group = parser.add_argument_group("evaluation")
    option(group, "--evaluate", "suite to score --policy on, instead of training")
    option(group, "--policy", "name or path of a trained policy")
    option(group, "--suites", "file with your own suites", type=Path)
    flag(group, "--no-card", "scores are printed only, not written to the card")
    option(
        output_group(parser),
        "--out",
        "policy to write: NAME.safetensors and its card NAME.json",
        type=policy_path,
        metavar="FOLDER/NAME",
    )


def _add_training(group: argparse._ArgumentGroup) -> None:
    option(
        group, "--config", "training configuration (TOML), overridden by other options", type=Path
    )
    option(group, "--start", "initial policy", shown="none; generalist for measured steps")
    option(group, "--decodes", "decodes per seed", shown="350000; 256 if measured", type=count)
    option(group, "--seconds", "duration of each seed, instead of --decodes", type=float)
    option(group, "--seeds", "number of seeds", shown="5; 1 if measured", type=count)
    option(group, "--first-seed", "first seed", shown="0", type=seed)
    option(group, "--families", "families of graphs", shown="all but chains", nargs="+")
    option(
        group,
        "--workers",
        "processes that decode, or Ray cluster: ray, ray://HOST:PORT",
        type=workers,
        shown="this one",
    )
    option(group, "--device", "device of the network", shown="cpu", choices=["cpu", "cuda"])
    flag(group, "--fresh", "new training, even if there is a checkpoint")


def policy_path(text: str) -> Path:
    """Parse ``FOLDER/NAME`` of a policy to write."""
    path = Path(text)
    if text.endswith(os.sep) or path.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text!r} is a folder: add the name of the policy, as in {path / 'mine'}"
        )
    return path


def run(args: argparse.Namespace) -> int:
    """Train or evaluate."""
    if args.evaluate is not None:
        return _evaluate(args)
    evaluation = {"--policy": args.policy, "--suites": args.suites, "--no-card": args.no_card}
    if names := [name for name, value in evaluation.items() if value]:
        raise UsageError(f"{names[0]} needs --evaluate SUITE")
    if args.out is None or not args.out.name.strip("."):
        raise UsageError("a training needs a name: give --out, for example policies/mine")
    return _train(args)


def _train(args: argparse.Namespace) -> int:
    """Train the policy, write it with its card, print which seed was kept."""
    files = {key: args.out.with_name(f"{args.out.name}.{end}") for key, end in ENDINGS.items()}
    check_outputs(files, {"--config": args.config})
    from graphs.extract import ExtractionError
    from placer.policies.training import train

    with usage_errors():
        config = _config(args)
        measured = _measured(args, config)
    try:
        with progress_of(args) as progress, usage_errors(ExtractionError, OSError):
            progress.stage(f"Training {args.out.name}")
            card = train(
                args.out, config, measured=measured, progress=progress.advance, fresh=args.fresh
            )
    except FloatingPointError as error:
        raise JobError(str(error)) from error
    except KeyboardInterrupt:
        if not files["checkpoint"].exists():
            raise
        raise JobError("stopped; the same command goes on from the last checkpoint") from None
    failed = sum(row["failed"] for row in card["seeds"])
    line = f"{card['name']}: seed {card['seed']} of {config.seeds}, written to {files['weights']}"
    if failed:
        tried = sum(row["decodes"] for row in card["seeds"])
        line = f"{line}; {failed} of {tried} decoded placements could not be run"
    print_result(args, lambda: {**card, "out": str(files["weights"])}, lambda _: print(line))
    return 0


def _config(args: argparse.Namespace) -> TrainingConfig:
    """Return the configuration, overridden by the other options."""
    from placer.policies.training import Length, config_of

    has_length = args.decodes is not None or args.seconds is not None
    return config_of(
        args.config,
        length=Length(decodes=args.decodes, seconds=args.seconds) if has_length else None,
        families=args.families,
        backend=args.backend,
        start=args.start,
        seeds=args.seeds,
        first_seed=args.first_seed,
        workers=args.workers,
        device=args.device,
    )


def _measured(args: argparse.Namespace, config: TrainingConfig) -> tuple[Workload, Cluster] | None:
    """Return the step to measure and its devices, None if steps are simulated."""
    if config.backend == "simulated":
        options = {"--target": args.target, "--devices": args.devices, "--memory": args.memory}
        if names := [name for name, value in options.items() if value]:
            raise UsageError(f"{names[0]} needs --backend measured")
        return None
    from envs.hardware.discover import discover
    from placer.sources.target import load_step

    if args.target is None:
        raise UsageError("measured steps are those of one model: give --target")
    if is_graph_file(args.target):
        raise UsageError("a graph file cannot be run: give the function that makes the model")
    cluster = discover(args.devices or "auto", args.memory)
    return load_step(args.target, training=True), cluster


def _evaluate(args: argparse.Namespace) -> int:
    """Evaluate the policy, print the scores, write them into its card."""
    if args.policy is None or args.out is not None or args.config is not None:
        raise UsageError("an evaluation takes --policy NAME, and neither --out nor --config")
    names = ("start", "decodes", "seconds", "first_seed", "families", "workers", "device", "fresh")
    given = vars(args)
    for name in (*names, "backend", "target", "devices", "memory"):
        if given[name]:
            raise UsageError(f"--{name.replace('_', '-')} is for training, not for --evaluate")
    from placer.policies.evaluation import (
        SEEDS,
        evaluate,
        load_suites,
        suite_named,
        write_into_card,
    )
    from placer.policies.network import CARD, file_of, load, path_of

    with usage_errors():
        suite = suite_named(args.evaluate, load_suites(args.suites))
        path, policy = path_of(args.policy), load(args.policy)
    card = file_of(path, CARD)
    if not args.no_card:
        try:
            check_outputs({"the card": card}, {})
        except UsageError as error:
            raise UsageError(f"{error}; --no-card leaves it as it is") from error
    with progress_of(args) as progress, usage_errors():
        progress.stage(f"Evaluating {policy.name}")
        scores = evaluate(policy, suite, seeds=args.seeds or SEEDS, progress=progress.advance)
    print_result(
        args,
        lambda: {"policy": policy.name, **scores},
        lambda console: _print_scores(scores, console),
    )
    if not args.no_card:
        with writing(card):
            write_into_card(path, scores)
        say(args, f"written into {card}")
    return 0


def _print_scores(scores: Mapping[str, Any], console: Console) -> None:
    from placer.report.console import print_rows

    table: dict[str, dict[str, float]] = scores["table"]
    print_rows(
        console,
        ("family", *next(iter(table.values()))),
        [
            (family, *(f"{row[name]:.{0 if name == 'graphs' else 3}f}" for name in row))
            for family, row in table.items()
        ],
    )
    number = len(scores["seeds"])
    seeds = f"medians over {number} seeds" if number > 1 else "of 1 seed"
    console.print(f"Numbers are {scores['scores_are']}; {seeds}.")
