"""Trains replicas of a placed model, one for each rank that torchrun starts.

::

    torchrun --nproc-per-node=2 -m placer.run model.py:build --placement placement.json --steps 100
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from placer.cli.arguments import add_extractor, count, seed
from placer.cli.failures import BAD_USAGE, JOB_FAILED, fail
from placer.parallel.options import SyncOptions
from placer.parallel.registry import DEFAULT, METHODS, check_options

if TYPE_CHECKING:
    import torch

    from envs.placement import Placement
    from graphs.extract import Step
    from placer.parallel.data import Batches
    from placer.parallel.replica import Replica
    from placer.parallel.training import Course, Trained

OPTIMIZERS = ("sgd", "momentum", "adam", "adamw")
EPILOG = """\
ways to keep replicas one model (--sync):
{methods}

example:
  torchrun --nproc-per-node=2 -m placer.run model.py:build --placement placement.json \\
      --steps 100 --sync bmuf --period 16 --checkpoint run.json --checkpoint-every 50
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    width = max(len(method.name) for method in METHODS)
    methods = "\n".join(f"  {method.name:{width}}  {method.summary}" for method in METHODS)
    parser = argparse.ArgumentParser(
        prog="python -m placer.run",
        description="Trains replicas of a placed model, one for each rank that torchrun starts.",
        epilog=EPILOG.format(methods=methods),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", help="path/to/model.py:function or hf:NAME")
    parser.add_argument("--placement", type=Path, required=True, metavar="FILE")
    parser.add_argument("--steps", type=count, required=True, metavar="N", help="steps in all")
    parser.add_argument(
        "--data",
        metavar="FILE:FUNCTION",
        help="gives batch NUMBER, as the target's inputs; made-up batches by default",
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate (default: 0.01)")
    parser.add_argument("--seed", type=seed, default=0, help="of models and made-up batches")
    _add_sync(parser)
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="where the run is kept")
    parser.add_argument(
        "--checkpoint-every", type=count, metavar="K", help="steps (default: at the end alone)"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint, if any")
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=300.0,
        help="a rank that lets others wait for longer counts as hung (default: 300)",
    )
    add_extractor(parser)
    parser.add_argument("--json", action="store_true", help="rank 0 prints the result as JSON")
    return parser


def _add_sync(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("keeping replicas one model")
    group.add_argument("--sync", default=DEFAULT, metavar="NAME", help=f"default: {DEFAULT}")
    group.add_argument("--warmup-steps", type=int, metavar="N", help="plain steps before it begins")
    group.add_argument("--period", type=count, metavar="N", help="steps of a block")
    group.add_argument("--block-momentum", type=float, metavar="X", help="0 .. 1")
    group.add_argument("--block-rate", type=float, metavar="X", help="times the update of a block")
    group.add_argument("--levels", type=levels, metavar="4x2", help="ranks of a node x nodes x ...")
    group.add_argument("--approximation-rank", type=count, metavar="N", help="of PowerSGD")


def levels(text: str) -> tuple[int, ...]:
    """Ranks at each level, innermost first, of ``4x2``.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    return tuple(count(part) for part in text.split("x"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one rank; 0, 1 for a run that failed, 2 for bad usage."""
    args = build_parser().parse_args(arguments)
    if args.resume and args.checkpoint is None:
        return fail(BAD_USAGE, "--resume goes on from a checkpoint: give --checkpoint, too")
    if args.checkpoint_every is not None and args.checkpoint is None:
        return fail(BAD_USAGE, "--checkpoint-every needs a --checkpoint to write")
    if args.checkpoint is not None and args.sync == "asgd":
        return fail(BAD_USAGE, "asgd cannot go on from a checkpoint: gradients are under way")
    if not args.timeout_s > 0:
        return fail(BAD_USAGE, f"--timeout-s {args.timeout_s} is not above 0")
    try:
        options = SyncOptions(
            **{name: getattr(args, name) for name in SyncOptions.__dataclass_fields__}
        )
        check_options(args.sync, options.given)
    except ValueError as error:
        return fail(BAD_USAGE, error)
    return _run(args, options)


def _run(args: argparse.Namespace, options: SyncOptions) -> int:
    import torch

    from envs.placement import Placement
    from graphs.extract import ExtractionError
    from placer.parallel.data import FromFunction, MadeUp
    from placer.parallel.processes import own_rank
    from placer.target import TargetError, load_function, load_step

    try:
        placement = Placement.load(args.placement)
        torch.manual_seed(args.seed)  # all ranks make the same model
        step = load_step(args.target, training=True)
        batches: Batches = MadeUp(step, args.seed)
        if args.data is not None:
            batches = FromFunction(load_function(args.data), step)
    except (TargetError, ValueError, OSError) as error:
        return fail(BAD_USAGE, error)
    try:
        found = _train(args, options, placement, step, batches)
    except (ExtractionError, ValueError, OSError, RuntimeError) as error:
        return fail(JOB_FAILED, f"rank {own_rank()}: {error}")
    if own_rank() == 0:
        _print(args, found)
    return 0


def _train(
    args: argparse.Namespace,
    options: SyncOptions,
    placement: Placement,
    step: Step,
    batches: Batches,
) -> Trained:
    import torch
    import torch.distributed as dist

    from placer.parallel.groups import check_same
    from placer.parallel.liveness import Liveness
    from placer.parallel.processes import joined, on_this_host, stop_on_sigterm
    from placer.parallel.registry import sync_named
    from placer.parallel.replica import on_own_devices, placed_replica
    from placer.parallel.sync import Setup
    from placer.parallel.training import train

    own, is_shared = on_own_devices(placement, *on_this_host())
    # two ranks cannot share a GPU under NCCL
    nccl = not is_shared and any(name.startswith("cuda") for name in own.device_names)
    with joined(args.timeout_s, nccl=nccl) as store:
        check_same("placements", _essence(placement))
        check_same("the options of the run", json.dumps(_settings(args, options)))
        rank, ranks = dist.get_rank(), dist.get_world_size()
        if rank == 0:
            _tell(args, own, is_shared, ranks)
        stop_on_sigterm()
        liveness = Liveness(store, rank, ranks)
        replica: Replica | None = None
        try:
            replica = placed_replica(step, own, args.extractor)
            setup = Setup(
                module=replica.module,
                make_optimizer=lambda parameters: _optimizer(args, list(parameters)),
                options=options,
            )
            torch.manual_seed(args.seed + 1 + rank)  # dropout differs between replicas
            return train(
                replica,
                sync_named(args.sync, setup),
                batches,
                _course(args, options, placement),
                liveness.at,
                lambda number, loss: _hear(args, number, loss) if rank == 0 else None,
            )
        except RuntimeError as error:
            raise liveness.error(error) from error
        finally:
            if replica is not None:
                replica.close()
            liveness.close()


def _optimizer(
    args: argparse.Namespace, parameters: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    import torch

    match args.optimizer:
        case "sgd":
            return torch.optim.SGD(parameters, lr=args.lr)
        case "momentum":
            return torch.optim.SGD(parameters, lr=args.lr, momentum=0.9)
        case "adam":
            return torch.optim.Adam(parameters, lr=args.lr)
    return torch.optim.AdamW(parameters, lr=args.lr)


def _course(args: argparse.Namespace, options: SyncOptions, placement: Placement) -> Course:
    from placer.parallel.checkpoint import Checkpoint
    from placer.parallel.training import Course

    kept = None
    if args.checkpoint is not None:
        essence = {
            name: str(value)
            for name, value in _settings(args, options).items()
            if name != "steps" and value is not None
        }
        kept = Checkpoint(args.checkpoint, {**essence, "graph": placement.graph})
    return Course(
        steps=args.steps,
        checkpoint=kept,
        checkpoint_every=args.checkpoint_every,
        resume=args.resume,
    )


def _settings(args: argparse.Namespace, options: SyncOptions) -> dict[str, Any]:
    """What all ranks must agree on."""
    names = ("target", "data", "steps", "optimizer", "lr", "seed", "sync")
    given = {name: getattr(args, name) for name in names}
    return given | {name: getattr(options, name) for name in options.given}


def _essence(placement: Placement) -> str:
    """What a placement says, whoever made it."""
    content = placement.to_dict()
    return json.dumps({key: content[key] for key in ("graph", "devices", "priority")})


def _tell(args: argparse.Namespace, own: Placement, is_shared: bool, ranks: int) -> None:
    width = len(own.device_names)
    replicas = f"{ranks} replica{'s'[: ranks > 1]} on {width} device{'s'[: width > 1]} each"
    print(f"{replicas}, sync {args.sync}, seed {args.seed}", file=sys.stderr)
    if args.data is None:
        print("no --data: batches are made up, losses mean nothing", file=sys.stderr)
    if is_shared:
        print(
            f"replicas of a host share {', '.join(own.device_names)}: there are no others here",
            file=sys.stderr,
        )


def _hear(args: argparse.Namespace, number: int, loss: float) -> None:
    if not args.json:
        print(f"step {number + 1:6}  loss {loss:.6g}", flush=True)


def _print(args: argparse.Namespace, found: Trained) -> None:
    if args.json:
        content = {
            "steps": args.steps,
            "first_step": found.first_step,
            "sync": args.sync,
            "losses": list(found.losses),
            "step_s": found.step_s,
            "report": dict(found.report),
        }
        print(json.dumps(content))
        return
    if found.step_s is not None:
        print(f"median step: {found.step_s * 1e3:.6g} ms")
    for name, value in found.report.items():
        print(f"{name}: {value:.6g}")


def script() -> NoReturn:
    """Entry of the module.

    Leaves without a farewell: threads of gloo may abort a process that says one.
    """
    try:
        code = main()
    except SystemExit as leaving:  # argparse, on --help and bad usage
        code = leaving.code if isinstance(leaving.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    script()
