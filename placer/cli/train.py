"""``placer train``: trains a policy by reinforcement learning."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from placer.cli.arguments import add_devices, count, seed
from placer.cli.failures import BAD_USAGE, JOB_FAILED, fail, why_not_outputs
from placer.cli.talk import progress_of

if TYPE_CHECKING:
    from placer.policies.training import TrainingConfig

EPILOG = """\
A training that was stopped or killed goes on from NAME.checkpoint when the same command is given
again, and ends as it would have without. NAME.csv tells of every rollout; with the extra "track"
so does NAME.tensorboard.

With --reward measured a policy is tuned to one model on devices of this machine, and the fastest
placement that was measured goes to NAME.placement.json.

examples:
  placer train --config trained_policies/generalist.toml --out trained_policies/generalist
  placer train --out policies/mine --families layered moe --decodes 100000 --seeds 1
  placer train --reward measured --target examples/inception.py:build --devices core:0,core:1 \\
    --from generalist --out policies/inception
"""
ONLY_SIMULATED = [
    "config",
    "decodes",
    "seconds",
    "seeds",
    "families",
    "workers",
    "device",
    "ray",
    "fresh",
]
ONLY_MEASURED = ["target", "devices", "memory", "from_policy", "rounds", "plans", "budget"]


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "train",
        help="train a policy on generated graphs",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FOLDER/NAME",
        help="where NAME.safetensors and its card NAME.json go",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="what to train on and how (TOML); the options below go before what it says",
    )
    parser.add_argument(
        "--decodes", type=int, metavar="N", help="length of each seed (default: 350000)"
    )
    parser.add_argument(
        "--seconds", type=float, help="length of each seed in processor time instead"
    )
    parser.add_argument("--seeds", type=int, help="how many (default: 5)")
    parser.add_argument("--first-seed", type=seed, metavar="N", help="the default is 0")
    parser.add_argument(
        "--families", nargs="+", metavar="NAME", help="to train on (default: all but chains)"
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help="processes that decode (default: only this one)"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], help="of the network (default: cpu)")
    parser.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="decode on a Ray cluster (extra: cluster); without an address on this machine",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="begin anew, whatever checkpoint there is"
    )
    measured = parser.add_argument_group("tuning to one model by measured steps")
    measured.add_argument(
        "--reward",
        choices=["simulated", "measured"],
        default="simulated",
        help="measured: tune a policy to --target by what its steps take here",
    )
    measured.add_argument("--target", help="the model, as for placer optimize")
    add_devices(measured, "auto")
    measured.add_argument(
        "--from",
        dest="from_policy",
        metavar="NAME",
        help="the policy to begin with (default: generalist)",
    )
    measured.add_argument("--rounds", type=count, metavar="N", help="of measuring (default: 6)")
    measured.add_argument(
        "--plans", type=count, metavar="N", help="sampled and run in each round (default: 6)"
    )
    measured.add_argument(
        "--budget", help="of each search by simulated reward (default: 20s), as for placer optimize"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train the policy, write it with its card, print which seed was kept."""
    if not args.out.name.strip("."):
        return fail(BAD_USAGE, f"--out {args.out} names no policy; write for example policies/mine")
    other = ONLY_MEASURED if args.reward == "simulated" else ONLY_SIMULATED
    if given := [name for name in other if getattr(args, name) not in (None, False, {})]:
        option = given[0].partition("_")[0]
        return fail(BAD_USAGE, f"--{option} says nothing with --reward {args.reward}: leave it out")
    if args.reward == "measured":
        from placer.cli.tuning import run_tuning

        return run_tuning(args)
    endings = {"weights": "safetensors", "card": "json", "log": "csv", "checkpoint": "checkpoint"}
    files = {key: args.out.with_name(f"{args.out.name}.{end}") for key, end in endings.items()}
    if (why := why_not_outputs(files, {"--config": args.config})) is not None:
        return fail(BAD_USAGE, why)
    from placer.policies.training import train

    try:
        config = _config(args)
    except (ValueError, OSError) as error:
        return fail(BAD_USAGE, error)
    try:
        with progress_of(args) as progress:
            progress.stage(f"Training {args.out.name}")
            card = train(args.out, config, progress=progress.advance, fresh=args.fresh)
    except ValueError as error:
        return fail(BAD_USAGE, error)
    except (OSError, FloatingPointError) as error:
        return fail(JOB_FAILED, error)
    except KeyboardInterrupt:
        if not files["checkpoint"].exists():
            raise
        return fail(JOB_FAILED, "stopped; the same command goes on from the last checkpoint")
    if args.json:
        print(json.dumps({**card, "out": str(files["weights"])}, allow_nan=False))
        return 0
    print(f"{card['name']}: seed {card['seed']} of {config.seeds}, written to {files['weights']}")
    return 0


def _config(args: argparse.Namespace) -> TrainingConfig:
    """Return the configuration, overridden by the other options.

    Raises:
        ValueError: the file is not a configuration, or an option is invalid.
        OSError: the file cannot be read.
    """
    from placer.policies.training import TrainingConfig, load_config
    from placer.policies.training.config import Length

    config = TrainingConfig() if args.config is None else load_config(args.config)
    if args.decodes is not None or args.seconds is not None:
        config = replace(config, length=Length(decodes=args.decodes, seconds=args.seconds))
    if args.families is not None:
        stages = tuple(replace(stage, families=tuple(args.families)) for stage in config.stage)
        config = replace(config, stage=stages)
    given = {name: getattr(args, name) for name in ("seeds", "first_seed", "workers", "device")}
    config = replace(config, **{k: v for k, v in given.items() if v is not None})
    if args.ray is None:
        return config
    if args.workers is not None:
        raise ValueError("give --workers or --ray, not both")
    return replace(config, workers="ray", ray_address=args.ray or config.ray_address)
