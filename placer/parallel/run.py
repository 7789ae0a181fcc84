"""Train replicas of a placed model, one on each rank that torchrun starts.

::

    torchrun --nproc-per-node=2 -m placer.run model.py:build --placement placement.json --steps 100
"""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from placer.cli.failures import BAD_USAGE, JOB_FAILED, fail, why_not_outputs
from placer.parallel.arguments import build_parser
from placer.parallel.options import SyncOptions
from placer.parallel.registry import check_options, method_named
from placer.parallel.request import Run

if TYPE_CHECKING:
    import torch

    from graphs.extract import Step
    from placer.parallel.data import Batches
    from placer.parallel.replica import Replica
    from placer.parallel.training import Course, Trained


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one rank and return its exit status: 0, 1 if the run failed, 2 for bad usage."""
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
        if args.sync is not None:
            check_options(args.sync, options.given)
    except ValueError as error:
        return fail(BAD_USAGE, error)
    return _run(args, options)


def _run(args: argparse.Namespace, options: SyncOptions) -> int:
    import torch

    from envs.placement import Placement
    from graphs.extract import ExtractionError
    from placer.parallel.data import FromFunction, MadeUp, Shards
    from placer.parallel.liveness import StoppedError
    from placer.parallel.own_devices import on_own_devices
    from placer.parallel.planned import manner_of
    from placer.parallel.processes import own_rank, rank_count
    from placer.target import TargetError, load_function, load_step

    outputs = {"--checkpoint": args.checkpoint, "--save": args.save}
    try:
        why = why_not_outputs(outputs, {"--placement": args.placement}) if not own_rank() else None
    except OSError as error:
        return fail(JOB_FAILED, error)
    if why is not None:
        return fail(BAD_USAGE, why)
    try:
        placement = Placement.load(args.placement)
        manner = manner_of(
            placement,
            ranks=rank_count(),
            sync=args.sync,
            options=options,
            accumulate=args.accumulate,
            target=args.target,
        )
        own, is_shared = on_own_devices(placement)
        torch.manual_seed(args.seed)  # the same model on all ranks
        step = replace(load_step(args.target, training=True), dtype=args.dtype)
        batches: Batches = MadeUp(step, args.seed)
        if args.data is not None:
            batches = FromFunction(load_function(args.data), step)
        if manner.parts > 1:
            step, batches = _part_of(step, manner.parts), Shards(batches, manner.parts)
    except (TargetError, ValueError, OSError) as error:
        return fail(BAD_USAGE, error)
    run = Run(args=args, placement=placement, manner=manner, own=own, is_shared=is_shared)
    try:
        found = _train(run, step, batches)
    except (ExtractionError, ValueError, OSError, RuntimeError, StoppedError) as error:
        return fail(JOB_FAILED, f"rank {own_rank()}: {error}")
    if own_rank() == 0:
        _print(run, found)
    return 0


def _part_of(step: Step, parts: int) -> Step:
    from placer.model_batches import batch_size, with_part_of_inputs

    part = with_part_of_inputs(step, parts)
    if part is None:
        raise ValueError(
            f"the plan cuts the batch of {batch_size(step)} samples into {parts} equal parts, "
            "which it has not: plan with the batch of this target"
        )
    return part


def _train(run: Run, step: Step, batches: Batches) -> Trained:
    import torch
    import torch.distributed as dist

    from envs.executor.seeds import spread_seed
    from envs.host_names import is_core
    from envs.torch_devices import torch_device
    from placer.parallel.groups import check_same, groups_of_slots
    from placer.parallel.liveness import Liveness, StoppedError
    from placer.parallel.processes import joined, stop_on_sigterm
    from placer.parallel.registry import sync_named
    from placer.parallel.replica import placed_replica
    from placer.parallel.run_store import RunStore, shared_secret
    from placer.parallel.sync import Setup
    from placer.parallel.training import train

    args, manner = run.args, run.manner
    cuda = [name for name in run.own.device_names if name.startswith("cuda")]
    if cuda:
        torch.cuda.set_device(cuda[0])  # NCCL uses it for tensors without a device of their own
    nccl = bool(cuda) and not run.is_shared  # NCCL does not let two ranks share a GPU
    with joined(args.timeout_s, nccl=nccl) as store:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        # shorter than the timeout of NCCL's watchdog, which would end the process first
        silence_s = 0.8 * args.timeout_s if nccl else None
        liveness = Liveness(RunStore(store, shared_secret()), rank, ranks, silence_s=silence_s)
        liveness.start()
        replica: Replica | None = None
        try:
            stop_on_sigterm()
            check_same("placements", run.essence)
            check_same("the options of the run", json.dumps(run.settings | run.course))
            if rank == 0:
                _tell(run, ranks)
            torch.manual_seed(spread_seed(args.seed, rank))  # dropout differs between replicas
            replica = placed_replica(step, run.own, args.extractor)
            names = [name for name in run.own.device_names if not is_core(name)]
            setup = Setup(
                module=replica.module,
                make_optimizer=lambda parameters: _optimizer(args, list(parameters)),
                options=manner.options,
                accumulate=manner.accumulate,
                group_of=groups_of_slots(list(map(torch_device, names))),
                bucket_bytes=manner.bucket_bytes,
            )
            return train(
                replica,
                sync_named(manner.sync, setup),
                batches,
                _course(run),
                liveness.at,
                lambda number, loss: _hear(args, number, loss) if rank == 0 else None,
            )
        except (RuntimeError, StoppedError) as error:
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


def _course(run: Run) -> Course:
    from placer.parallel.checkpoint import Checkpoint
    from placer.parallel.training import Course

    path = run.args.checkpoint
    essence = {name: str(value) for name, value in run.settings.items() if value is not None}
    return Course(
        **run.course,
        checkpoint=None if path is None else Checkpoint(path, essence),
        accumulate=run.manner.accumulate,
        save=run.args.save,
    )


def _tell(run: Run, ranks: int) -> None:
    width = len(run.own.device_names)
    told = [f"{ranks} replica{'s'[: ranks > 1]} on {width} device{'s'[: width > 1]}"]
    if ranks > 1:
        told[0] += f" each, kept one model by --sync {run.manner.sync}"
    told.append(f"seed {run.args.seed}")
    if run.manner.accumulate > 1:
        told.append(f"{run.manner.accumulate} passes a step")
    print(", ".join(told), file=sys.stderr)
    for remark in (*run.manner.remarks, *_plain_steps(run)):
        print(remark, file=sys.stderr)
    if run.args.data is None:
        print("no --data: batches are made up, losses mean nothing", file=sys.stderr)
    if run.is_shared:
        print(
            f"replicas of a host share {', '.join(run.own.device_names)}: there are no others here",
            file=sys.stderr,
        )


def _plain_steps(run: Run) -> tuple[str, ...]:
    # Steps before the method begins, unless the user has set their number.
    steps, given = run.args.steps, run.manner.options.warmup_steps
    plain = method_named(run.manner.sync).warmup_steps if given is None else given
    if plain >= steps:
        what = f"and this run has {steps}: give more --steps, or fewer --warmup-steps"
    elif plain and given is None:
        what = "unless --warmup-steps says otherwise"
    else:
        return ()
    return (f"{run.manner.sync} begins after {plain} plain steps, {what}",)


def _hear(args: argparse.Namespace, number: int, loss: float) -> None:
    if not args.json:
        print(f"step {number + 1:6}  loss {loss:.6g}", flush=True)


def _print(run: Run, found: Trained) -> None:
    from placer.milliseconds import milliseconds

    if run.args.json:
        content = {
            "steps": run.args.steps,
            "first_step": found.first_step,
            "sync": run.manner.sync,
            "losses": list(found.losses),
            "step_s": found.step_s,
            "report": dict(found.report),
        }
        print(json.dumps(content))
        return
    if found.step_s is not None:
        print(f"median step: {milliseconds(found.step_s)} ms by the wall clock")
    for name, value in found.report.items():
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


if __name__ == "__main__":
    script()
