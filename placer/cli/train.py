"""``placer train``: trains a policy by reinforcement learning."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from placer.cli.arguments import add_devices, seed
from placer.cli.failures import BAD_USAGE, JOB_FAILED, fail, why_not_outputs
from placer.cli.talk import progress_of

if TYPE_CHECKING:
    from envs.hardware.cluster import Cluster
    from graphs.extract import Workload
    from placer.policies.training import TrainingConfig

EPILOG = """\
A training that was stopped or killed goes on from NAME.checkpoint when the same command is given
again; with simulated reward it ends as it would have without. NAME.csv has a line for every
rollout; with the extra "track" so has NAME.tensorboard.

examples:
  placer train --config trained_policies/generalist.toml --out trained_policies/generalist
  placer train --out policies/mine --families layered moe --decodes 100000 --seeds 1
  placer train --backend measured --target graphs/models/inception.py:build \\
    --devices core:0,core:1 --start generalist --decodes 64 --out policies/inception
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "train",
        help="train a policy on generated graphs, or on one model by measured steps",
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
        help="training configuration (TOML); the options below override it",
    )
    parser.add_argument(
        "--start", metavar="NAME", help="policy to begin with (default with measured: generalist)"
    )
    parser.add_argument(
        "--decodes",
        type=int,
        metavar="N",
        help="length of each seed (default: 350000, measured 256)",
    )
    parser.add_argument("--seconds", type=float, help="length of each seed in time instead")
    parser.add_argument("--seeds", type=int, help="number of seeds (default: 5, measured 1)")
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
    measured = parser.add_argument_group("reward")
    measured.add_argument(
        "--backend",
        choices=["simulated", "measured"],
        help="of the steps: simulated (default), or measured, of one model",
    )
    measured.add_argument("--target", help="the model to measure, as for placer optimize")
    add_devices(measured, "auto")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train the policy, write it with its card, print which seed was kept."""
    if not args.out.name.strip("."):
        return fail(BAD_USAGE, f"--out {args.out} names no policy; write for example policies/mine")
    endings = {"weights": "safetensors", "card": "json", "log": "csv", "checkpoint": "checkpoint"}
    files = {key: args.out.with_name(f"{args.out.name}.{end}") for key, end in endings.items()}
    if (why := why_not_outputs(files, {"--config": args.config})) is not None:
        return fail(BAD_USAGE, why)
    from graphs.extract import ExtractionError
    from placer.policies.training import train
    from placer.sources.target import TargetError

    try:
        config = _config(args)
        measured = _measured(args, config)
    except (TargetError, ValueError, OSError) as error:
        return fail(BAD_USAGE, error)
    try:
        with progress_of(args) as progress:
            progress.stage(f"Training {args.out.name}")
            card = train(
                args.out, config, measured=measured, progress=progress.advance, fresh=args.fresh
            )
    except ExtractionError as error:
        return fail(JOB_FAILED, error)
    except ValueError as error:
        return fail(BAD_USAGE, error)
    except (OSError, FloatingPointError, RuntimeError) as error:
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
    from placer.policies.training import Length, config_of

    if args.ray is not None and args.workers is not None:
        raise ValueError("give --workers or --ray, not both")
    has_length = args.decodes is not None or args.seconds is not None
    return config_of(
        args.config,
        length=Length(decodes=args.decodes, seconds=args.seconds) if has_length else None,
        families=args.families,
        backend=args.backend,
        start=args.start,
        seeds=args.seeds,
        first_seed=args.first_seed,
        workers=args.workers if args.ray is None else "ray",
        ray_address=args.ray or None,
        device=args.device,
    )


def _measured(args: argparse.Namespace, config: TrainingConfig) -> tuple[Workload, Cluster] | None:
    """Return the step to measure and its devices, if steps are measured.

    Raises:
        TargetError: the target cannot be loaded.
        ValueError: there is no such device, or options do not suit the backend.
    """
    if config.backend == "simulated":
        given = {"--target": args.target, "--devices": args.devices, "--memory": args.memory}
        if names := [name for name, value in given.items() if value]:
            raise ValueError(f"{names[0]} needs --backend measured")
        return None
    from envs.hardware.discover import discover
    from placer.sources.target import is_graph_file, load_step

    if args.target is None:
        raise ValueError("measured steps are those of one model: give --target")
    if is_graph_file(args.target):
        raise ValueError("a graph file cannot be run: give the function that makes the model")
    cluster = discover(args.devices or "auto", args.memory)
    return load_step(args.target, training=True), cluster
