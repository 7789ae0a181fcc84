"""``placer run``: trains or infers with a placed model, in one process or one rank of torchrun."""

from __future__ import annotations

import argparse
import os
import select
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from envs.hardware.errors import UnavailableError
from placer.cli.arguments import (
    add_dtype,
    add_extractor,
    count,
    flag,
    option,
    seed,
    settings,
    take_mode,
    target_file,
)
from placer.cli.errors import JOB_FAILED, JobError, UsageError, sentence, usage_errors
from placer.cli.output import check_outputs, print_result, say
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
    from envs.placement import Placement
    from placer.parallel.run import Run
    from placer.parallel.training import Trained

LONGEST_TIMEOUT_S: Final = 1_000_000
_DEFAULTS: Final = {field.name: field.default for field in fields(RunRequest)}
_OF_TRAINING: Final = (
    "optimizer",
    "lr",
    "checkpoint",
    "checkpoint_every",
    "resume",
    "save",
    "timeout_s",
)
HELP: Final = "train or infer with a placed model; under torchrun one replica per rank"
_METHODS: Final = "\n".join(f"  {method.name:20}{method.sends}" for method in METHODS)
EPILOG: Final = f"""\
methods that keep replicas in sync (--sync):
{_METHODS}

settings of --sync (default: those of the plan, then those of the method):
  accumulate          batches per step of a rank, whose gradients are averaged
  warmup-steps        plain steps before the method begins [{WARMUP_STEPS} of powersgd and onebit]
  period              steps per block
  block-momentum      momentum of block updates, 0 to 1
  block-rate          factor of block updates
  levels              ranks of a node x nodes x ..., as in 4x2
  approximation-rank  rank of the matrices of powersgd

examples:
  placer run model.py:build --placement placement.json --steps 100
  torchrun --nproc-per-node=2 -m placer.run model.py:build --placement placement.json \\
      --steps 100 --sync bmuf,period=16 --checkpoint run.json --checkpoint-every 50
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("target", help="placed model: path/to/model.py:function or hf:NAME")
    option(parser, "--placement", "placement.json", type=Path, required=True)
    option(parser, "--steps", "total number of steps", type=count, required=True)
    option(
        parser,
        "--data",
        "function from batch number to inputs",
        shown="made-up batches",
        metavar="FILE:FUNCTION",
    )
    option(parser, "--seed", "seed of models and batches", type=seed, default=0)
    group = parser.add_argument_group("model")
    flag(group, "--inference", "inference, which the placement is of")
    add_dtype(group)
    add_extractor(group)
    _add_training(parser.add_argument_group("training"))


def _add_training(group: argparse._ArgumentGroup) -> None:
    option(group, "--optimizer", "optimizer", choices=OPTIMIZERS, default=OPTIMIZERS[0])
    option(group, "--lr", "learning rate", type=float, default=_DEFAULTS["lr"])
    option(
        group,
        "--sync",
        "method that keeps replicas in sync, see below",
        shown=f"as planned, or {DEFAULT}",
        type=sync_overrides,
        default={},
        metavar="NAME[,KEY=VALUE...]",
    )
    option(group, "--checkpoint", "checkpoint file to write and resume from", type=Path)
    option(group, "--checkpoint-every", "steps between checkpoints", shown="all", type=count)
    flag(group, "--resume", "continuation from the checkpoint, if there is one")
    option(group, "--save", "safetensors file for the trained model", type=Path)
    option(
        group,
        "--timeout-s",
        "seconds of silence after which a rank counts as hung",
        type=float,
        default=_DEFAULTS["timeout_s"],
    )


def sync_overrides(text: str) -> dict[str, Any]:
    """Parse ``bmuf,period=16`` to fields of SyncConfig; the name may be left out."""
    name, values = settings(text, SyncConfig, ("accumulate", *OPTIONS))
    try:
        if name:
            SyncConfig(method=name, **values)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return {"method": name, **values} if name else values


def run(args: argparse.Namespace) -> int:
    """Run this process's part of the training, or infer if the placement is of inference."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        exit_with(os.getppid())
    from envs.placement import Placement

    with usage_errors():
        placement = Placement.load(args.placement)
    take_mode(args, placement)
    return _infer(args, placement) if args.inference else _train(args, _request(args))


def _train(args: argparse.Namespace, request: RunRequest) -> int:
    from placer.parallel.processes import StoppedError, own_rank
    from placer.parallel.run import prepare_run, train_rank

    rank = own_rank()
    if rank == 0:
        inputs = {"--placement": args.placement, "target": target_file(args.target)}
        if args.data is not None:
            inputs["--data"] = target_file(args.data)
        check_outputs({"--checkpoint": args.checkpoint, "--save": args.save}, inputs)
    with usage_errors():
        prepared = prepare_run(request)

    def started(ranks: int, is_shared: bool) -> None:
        for remark in _remarks(prepared, ranks, is_shared):
            say(args, remark)

    def progress(number: int, loss: float) -> None:
        if not (args.json or args.quiet):
            print(f"step {number + 1:6}  loss {loss:.6g}", flush=True)

    try:
        trained = train_rank(prepared, started, progress)
    except (ValueError, OSError, RuntimeError, StoppedError) as error:
        is_usage = isinstance(error, ValueError) and not isinstance(error, UnavailableError)
        kind = UsageError if is_usage else JobError
        raise kind(f"rank {rank}: {sentence(error)}") from error
    if rank == 0:
        print_result(args, lambda: _to_dict(prepared, trained), lambda _: _print(trained))
    return 0


def _request(args: argparse.Namespace) -> RunRequest:
    if args.resume and args.checkpoint is None:
        raise UsageError("--resume continues from a checkpoint: give --checkpoint, too")
    if args.checkpoint_every is not None and args.checkpoint is None:
        raise UsageError("--checkpoint-every needs a --checkpoint to write")
    if args.checkpoint is not None and args.sync.get("method") == "asgd":
        raise UsageError("asgd cannot go on from a checkpoint: gradients are under way")
    if not 0 < args.timeout_s <= LONGEST_TIMEOUT_S:
        raise UsageError(
            f"--timeout-s {args.timeout_s} is not above 0 and at most {LONGEST_TIMEOUT_S:,}"
        )
    names = {field.name for field in fields(RunRequest)} - {"overrides"}
    return RunRequest(**{name: getattr(args, name) for name in names}, overrides=args.sync)


def _remarks(run: Run, ranks: int, is_shared: bool) -> Iterator[str]:
    """Yield what the run is, and what differs from the plan or is assumed, one line each."""
    request, sync, names = run.request, run.plan.sync, run.local.device_names
    width = len(names)
    title = f"{ranks} replica{'s'[: ranks > 1]} on {width} device{'s'[: width > 1]}"
    if ranks > 1:
        title += f" each, kept in sync by {sync.method}"
    title += f", seed {request.seed}"
    yield title + (f", {sync.accumulate} passes a step" if sync.accumulate > 1 else "")
    yield from run.plan.remarks
    default = sync.warmup_steps is None
    plain = method_named(sync.method).warmup_steps if default else sync.warmup_steps
    begins = f"{sync.method} begins after {plain} plain steps"
    if plain and plain >= request.steps:
        yield f"{begins}, and this run has {request.steps}: set --steps or warmup-steps"
    elif plain and default:
        yield f"{begins}; warmup-steps sets their number"
    if request.data is None:
        yield "no --data: batches are made up, losses mean nothing"
    if is_shared:
        yield f"replicas of a host share {', '.join(names)}: there are no others here"


def _to_dict(run: Run, trained: Trained) -> dict[str, Any]:
    from placer.result import finite

    return {
        "steps": run.request.steps,
        "first_step": trained.first_step,
        "sync": run.plan.sync.method,
        "losses": [finite(loss) for loss in trained.losses],
        "step_s": trained.step_s,
        "report": dict(trained.report),
    }


def _print(trained: Trained) -> None:
    from envs.hardware.units import milliseconds

    if trained.step_s is not None:
        step = milliseconds(trained.step_s)
        print(f"median step: {step} ms by the wall clock, without loading its batch")
    for name, value in trained.report.items():
        print(f"{name}: {value:.6g}")


def _infer(args: argparse.Namespace, placement: Placement) -> int:
    """Run forward passes of the placed model in this process and print their median time."""
    given = [name for name in _OF_TRAINING if getattr(args, name) != _DEFAULTS[name]]
    if given or args.sync:
        option = f"--{(given or ['sync'])[0].replace('_', '-')}"
        raise UsageError(f"{option} is for training, and this is inference")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("inference runs in one process: start it without torchrun")
    import torch

    from envs.hardware.torch_devices import failures_named, synchronize
    from envs.hardware.units import milliseconds
    from envs.runtime import extraction_for, tensor_device
    from placer.applying import apply_extracted, check_can_run
    from placer.parallel.data import Batches, FromFunction, MadeUp
    from placer.sources.target import load_function, load_step

    with usage_errors():
        check_can_run(placement)
        torch.manual_seed(args.seed)
        step = replace(load_step(args.target, training=False), dtype=args.dtype)
        batches: Batches = MadeUp(step, args.seed)
        if args.data is not None:
            batches = FromFunction(load_function(args.data), step)
    if args.data is None:
        say(args, "no --data: batches are made up")
    extraction = extraction_for(step, placement.device_names, args.extractor)
    devices = [tensor_device(name) for name in placement.device_names]

    def now() -> float:
        for device in devices:
            synchronize(device)
        return time.perf_counter()

    seconds = []
    with (
        usage_errors(OSError),
        failures_named(*devices),
        apply_extracted(extraction, placement) as placed,
    ):
        for number in range(args.steps):
            inputs, keywords = batches(number)
            began = now()
            placed.step(*inputs, **keywords)
            seconds.append(now() - began)
    step_s = statistics.median(seconds)
    print_result(
        args,
        lambda: {"steps": args.steps, "step_s": step_s},
        lambda _: print(f"median step: {milliseconds(step_s)} ms by the wall clock"),
    )
    return 0


def exit_with(launcher: int) -> None:
    """End this process when its launcher ends: a killed launcher does not stop its ranks."""
    ended = select.poll()
    ended.register(os.pidfd_open(launcher), select.POLLIN)

    def leave() -> None:
        ended.poll()
        os._exit(JOB_FAILED)

    threading.Thread(target=leave, name="launcher", daemon=True).start()
