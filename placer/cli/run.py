"""``python -m placer.run``: trains replicas of a placed model, one on each rank of torchrun."""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from graphs.precision import FULL
from placer.cli.arguments import add_extractor, count, dtype, seed
from placer.cli.failures import BAD_USAGE, JOB_FAILED, fail, why_not_outputs
from placer.cli.parser import CommandParser
from placer.parallel.methods.registry import (
    DEFAULT,
    METHODS,
    OPTIONS,
    WARMUP_STEPS,
    SyncConfig,
    method_named,
)
from placer.parallel.plan import OPTIMIZERS, RunRequest

if TYPE_CHECKING:
    from placer.parallel.run import Run
    from placer.parallel.training import Trained

EPILOG: Final = """\
ways to keep replicas one model (--sync):
{methods}

example:
  torchrun --nproc-per-node=2 -m placer.run model.py:build --placement placement.json \\
      --steps 100 --sync bmuf --period 16 --checkpoint run.json --checkpoint-every 50
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    width = max(len(method.name) for method in METHODS)
    methods = "\n".join(f"  {method.name:{width}}  {method.sends}" for method in METHODS)
    parser = CommandParser(
        prog="python -m placer.run",
        description="Trains replicas of a placed model, one for each rank that torchrun starts.",
        epilog=EPILOG.format(methods=methods),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("target", help="path/to/model.py:function or hf:NAME")
    parser.add_argument("--placement", type=Path, required=True, metavar="FILE")
    parser.add_argument("--steps", type=count, required=True, metavar="N", help="steps in all")
    parser.add_argument(
        "--data",
        metavar="FILE:FUNCTION",
        help="gives batch NUMBER, as the target's inputs; made-up batches by default",
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default=OPTIMIZERS[0])
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate (default: 0.01)")
    parser.add_argument("--seed", type=seed, default=0, help="of models and made-up batches")
    _add_sync(parser)
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="where the run is kept")
    parser.add_argument(
        "--checkpoint-every", type=count, metavar="K", help="steps (default: at the end alone)"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint, if any")
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="where rank 0 writes the model, as safetensors"
    )
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=300.0,
        help="a rank that lets others wait for longer counts as hung (default: 300)",
    )
    parser.add_argument(
        "--dtype", type=dtype, default=FULL, metavar="NAME", help="as the placement was made with"
    )
    add_extractor(parser)
    parser.add_argument("--json", action="store_true", help="rank 0 prints the result as JSON")
    return parser


def _add_sync(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("keeping replicas one model")
    group.add_argument(
        "--sync",
        dest="method",
        metavar="NAME",
        help=f"default: what the placement was planned with, or {DEFAULT}",
    )
    group.add_argument(
        "--accumulate",
        type=count,
        metavar="N",
        help="batches of a step of a rank, whose gradients are averaged (default: as planned)",
    )
    group.add_argument(
        "--warmup-steps",
        type=int,
        metavar="N",
        help=f"plain steps before it begins (default: {WARMUP_STEPS} of powersgd and onebit)",
    )
    group.add_argument("--period", type=count, metavar="N", help="steps of a block")
    group.add_argument("--block-momentum", type=float, metavar="X", help="0 .. 1")
    group.add_argument("--block-rate", type=float, metavar="X", help="times the update of a block")
    group.add_argument("--levels", type=levels, metavar="4x2", help="ranks of a node x nodes x ...")
    group.add_argument("--approximation-rank", type=count, metavar="N", help="of PowerSGD")


def levels(text: str) -> tuple[int, ...]:
    """Parse the ranks at each level, innermost first, such as ``4x2``.

    Raises:
        argparse.ArgumentTypeError: the text has another form.
    """
    return tuple(count(part) for part in text.split("x"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one rank and return its exit status: 0, 1 if the run failed, 2 for bad usage."""
    args = build_parser().parse_args(arguments)
    try:
        request = _request(args)
    except ValueError as error:
        return fail(BAD_USAGE, error)
    from graphs.extract import ExtractionError
    from placer.parallel.liveness import StoppedError
    from placer.parallel.processes import own_rank
    from placer.parallel.run import prepare_run, train_rank
    from placer.sources.target import TargetError

    outputs = {"--checkpoint": args.checkpoint, "--save": args.save}
    try:
        why = why_not_outputs(outputs, {"--placement": args.placement}) if not own_rank() else None
    except OSError as error:
        return fail(JOB_FAILED, error)
    if why is not None:
        return fail(BAD_USAGE, why)
    try:
        run = prepare_run(request)
    except (TargetError, ValueError, OSError) as error:
        return fail(BAD_USAGE, error)

    def started(ranks: int) -> None:
        for remark in _remarks(run, ranks):
            print(remark, file=sys.stderr)

    def progress(number: int, loss: float) -> None:
        if not args.json:
            print(f"step {number + 1:6}  loss {loss:.6g}", flush=True)

    try:
        trained = train_rank(run, started, progress)
    except (ExtractionError, ValueError, OSError, RuntimeError, StoppedError) as error:
        return fail(JOB_FAILED, f"rank {own_rank()}: {error}")
    if own_rank() == 0:
        _print(run, trained, as_json=args.json)
    return 0


def _request(args: argparse.Namespace) -> RunRequest:
    # Raises ValueError if options contradict each other.
    if args.resume and args.checkpoint is None:
        raise ValueError("--resume goes on from a checkpoint: give --checkpoint, too")
    if args.checkpoint_every is not None and args.checkpoint is None:
        raise ValueError("--checkpoint-every needs a --checkpoint to write")
    if args.checkpoint is not None and args.method == "asgd":
        raise ValueError("asgd cannot go on from a checkpoint: gradients are under way")
    if not args.timeout_s > 0:
        raise ValueError(f"--timeout-s {args.timeout_s} is not above 0")
    given = vars(args).copy()
    given.pop("json")
    names = ("method", "accumulate", *OPTIONS)
    overrides = {name: v for name in names if (v := given.pop(name)) is not None}
    if args.method is not None:
        SyncConfig(**overrides)  # a mistake is told before the model is loaded
    return RunRequest(**given, overrides=overrides)


def _remarks(run: Run, ranks: int) -> Iterator[str]:
    """Yield what the run is, and what differs from the plan or is assumed, one line each."""
    request, sync, names = run.request, run.plan.sync, run.own.device_names
    width = len(names)
    title = f"{ranks} replica{'s'[: ranks > 1]} on {width} device{'s'[: width > 1]}"
    if ranks > 1:
        title += f" each, kept one model by --sync {sync.method}"
    title += f", seed {request.seed}"
    yield title + (f", {sync.accumulate} passes a step" if sync.accumulate > 1 else "")
    yield from run.plan.remarks
    given = sync.warmup_steps
    plain = method_named(sync.method).warmup_steps if given is None else given
    begins = f"{sync.method} begins after {plain} plain steps"
    if plain >= request.steps:
        steps = f"this run has {request.steps}: give more --steps, or fewer --warmup-steps"
        yield f"{begins}, and {steps}"
    elif plain and given is None:
        yield f"{begins}, unless --warmup-steps says otherwise"
    if request.data is None:
        yield "no --data: batches are made up, losses mean nothing"
    if run.is_shared:
        yield f"replicas of a host share {', '.join(names)}: there are no others here"


def _print(run: Run, trained: Trained, *, as_json: bool) -> None:
    from placer.milliseconds import milliseconds

    if as_json:
        content: dict[str, Any] = {
            "steps": run.request.steps,
            "first_step": trained.first_step,
            "sync": run.plan.sync.method,
            "losses": list(trained.losses),
            "step_s": trained.step_s,
            "report": dict(trained.report),
        }
        print(json.dumps(content))
        return
    if trained.step_s is not None:
        print(f"median step: {milliseconds(trained.step_s)} ms by the wall clock")
    for name, value in trained.report.items():
        print(f"{name}: {value:.6g}")


def end_with(launcher: int) -> None:
    """End this process when its launcher ends: a killed launcher does not stop its ranks."""
    gone = select.poll()
    gone.register(os.pidfd_open(launcher), select.POLLIN)

    def leave() -> None:
        gone.poll()
        os._exit(JOB_FAILED)

    threading.Thread(target=leave, name="launcher", daemon=True).start()


def script() -> NoReturn:
    """Run the module as a script.

    Exits without interpreter shutdown, in which gloo's threads may abort the process.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with(os.getppid())
    try:
        code = main()
    except SystemExit as leaving:  # argparse, on --help and bad usage
        code = leaving.code if isinstance(leaving.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
