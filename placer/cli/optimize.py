"""``placer optimize``: searches the fastest placement."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from envs.collectives import ALGORITHMS, PAYLOADS
from envs.replication import AUTO, BATCHES, Replication
from placer.cli.arguments import (
    add_devices,
    add_model,
    check_model_options,
    count,
    flag,
    option,
    output_group,
    pair,
    seed,
    settings,
    target_file,
    target_of,
    workers,
)
from placer.cli.duration import estimate, taken
from placer.cli.errors import JobError, UsageError, sentence, usage_errors
from placer.cli.output import (
    LEAST_BYTES,
    check_outputs,
    print_result,
    progress_of,
    say,
    write_error,
)
from placer.cli.show import launch_command_of, write_report
from placer.search.registry import DEFAULT, listings

if TYPE_CHECKING:
    from placer.job import Job
    from placer.replicate.result import ReplicatedResult
    from placer.result import Result

HELP: Final = "find the fastest placement of a model and write it"
EPILOG: Final = f"""\
targets:
  path/to/model.py:function   called without arguments, returns (model, inputs) or
                              (model, inputs, loss); with a loss the last input is the target:
                              loss(model(*inputs[:-1]), inputs[-1])
  hf:NAME                     a model of transformers, random weights, no download, as in
                              hf:bert-base-uncased or 'hf:gpt2?batch=2&sequence=64&n_layer=4'
  model.pt2                   a program that torch.export.save wrote (needs --inference)
  model.onnx                  a file of ONNX (needs --inference), with the sizes it leaves open,
                              as in 'model.onnx?batch=2&sequence=64'
  graph.json                  a graph with known costs (needs --cluster); nothing is run

settings of --data-parallel (plans are run on cores and GPUs of this machine only):
  batch               {" or ".join(BATCHES)}: replicas have whole batches, or share one
  accumulate          passes whose gradients are added up before they are reduced [1]
  reduction           {AUTO} or one of {", ".join(ALGORITHMS[:3])},
                      {", ".join(ALGORITHMS[3:])} [{AUTO}]
  payload             how gradients are sent: {", ".join(PAYLOADS)} [fp32]
  bucket-bytes        bytes of gradients that are reduced together
  average-every       steps between averages of parameters, instead of reducing gradients
  coding-bytes-per-s  rate at which gradients are encoded and decoded [no time]
  samples             samples per step [first dimension of the inputs; 1 for a graph file]

examples:
  placer optimize graphs/models/inception.py:build --devices core:0,core:1 --budget 60s
  placer optimize model.py:build --devices cuda:0,cpu --memory cuda:0=8GiB
  placer optimize 'hf:gpt2-xl?batch=8' --devices examples/8xh100.toml --data-parallel auto
  placer optimize graph.json --cluster cluster.toml --data-parallel 4,batch=global,payload=fp16

search algorithms (--placer):
"""
REPLICA_SETTINGS: Final = (
    *("batch", "accumulate", "samples", "reduction", "payload", "bucket_bytes", "average_every"),
    "coding_bytes_per_s",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("target", help="model or graph file, see below")
    add_devices(parser.add_argument_group("devices"), "auto", cluster=True)
    add_model(parser.add_argument_group("model"))
    _add_search(parser.add_argument_group("search"))
    parser.add_argument_group("replicas").add_argument(
        "--data-parallel",
        type=replication,
        metavar=f"{AUTO}|R[,KEY=VALUE...]",
        help="number of data-parallel replicas, and settings, see below",
    )
    group = output_group(parser)
    option(group, "--out", "placement file to write", type=Path, default=Path("placement.json"))
    option(group, "--report", "HTML report of the result to write", type=Path)
    flag(group, "--verbose", "all remarks, and the meaning of the columns")


def _add_search(group: argparse._ArgumentGroup) -> None:
    option(
        group,
        "--budget",
        "search and runs: wall time (60s) or evaluations (4000e)",
        default="20s",
        metavar="BUDGET",
    )
    option(group, "--seed", "seed of the search", type=seed, default=0)
    option(
        group,
        "--workers",
        "threads of the search, or Ray cluster: ray, ray://HOST:PORT",
        type=workers,
        shown="all cores; 1 with a budget of evaluations",
    )
    option(
        group,
        "--objective",
        "objective; throughput and max-load are for graph files",
        choices=["latency", "throughput", "max-load"],
        default="latency",
    )
    option(
        group,
        "--micro-batches",
        "micro-batches per step; a graph file is that of one",
        type=count,
        default=1,
    )
    option(
        group,
        "--placer",
        "search algorithm, see below; heuristics are always included",
        default=DEFAULT,
    )
    option(
        group, "--policy", "trained policy that proposes placements, or none", shown="generalist"
    )
    option(
        group,
        "--keep-together",
        "op, module or glob whose matches share a device; repeatable",
        action="append",
        default=[],
    )
    option(
        group,
        "--pin",
        "device for an op, module or glob; repeatable",
        type=pair,
        action="append",
        default=[],
        metavar="NAME=DEVICE",
    )
    option(
        group,
        "--start-from",
        "warm start: a placement or device_map to search from, always measured",
        type=Path,
    )
    option(
        group,
        "--measure-budget",
        "wall time of the runs",
        shown="half of the budget, at least 6s",
        metavar="TIME",
    )
    flag(group, "--no-measure", "simulated result: no candidate is run")


def epilog() -> str:
    """Return the end of the help, with all search algorithms."""
    return EPILOG + "".join(
        f"  {listing.name:21}{listing.summary}{f' ({listing.needs})' if listing.needs else ''}\n"
        for listing in listings()
    )


def replication(text: str) -> Replication:
    """Parse ``auto,batch=global``: the number of replicas and settings of Replication."""
    head, values = settings(text, Replication, REPLICA_SETTINGS)
    try:
        return Replication(replicas=None if head == AUTO else count(head), **values)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(args: argparse.Namespace) -> int:
    """Optimize, write the placement and report, print the table."""
    began = time.perf_counter()
    if args.cluster is None and (args.devices or "").endswith(".toml"):
        args.cluster, args.devices = Path(args.devices), None
    check_outputs(
        {"--out": args.out, "--report": args.report},
        {
            "target": target_file(args.target),
            "--cluster": args.cluster,
            "--start-from": args.start_from,
        },
        _least_bytes(args.target),
    )
    from placer.sources.target import check_target

    with usage_errors():
        job = job_of(args)
        check_target(args.target)
    from placer.api import run_job
    from placer.progress import TimedStages

    say(args, estimate(job))
    with progress_of(args) as shown, TimedStages(shown) as progress:
        result = run_job(job, progress)
    unwritten = _write(result, args)
    total_s = time.perf_counter() - began
    try:
        _print(result, args, total_s)
    except KeyboardInterrupt:
        raise unwritten or JobError(
            f"stopped while printing; the placement is in {args.out}"
        ) from None
    except BrokenPipeError:
        raise
    except OSError as error:
        raise unwritten or JobError(f"{sentence(error)}; the placement is in {args.out}") from error
    if unwritten is not None:
        raise unwritten
    _remark(result, args, job, taken(total_s, progress.seconds))
    return 0


def job_of(args: argparse.Namespace) -> Job:
    """Return the job that the arguments describe; its target is not loaded yet."""
    from placer.job import Constraints, Job, SearchConfig

    check_model_options(args, args.target)
    target = target_of(args)
    if args.no_measure and args.measure_budget:
        raise UsageError("nothing is run with --no-measure: omit --measure-budget")
    pins: dict[str, str] = {}
    for name, device in args.pin:
        if pins.setdefault(name, device) != device:
            raise UsageError(f"--pin {name!r} is given with {pins[name]} and with {device}")
    return Job.of(
        target,
        args.cluster or args.devices or "auto",
        search=SearchConfig(
            budget=args.budget,
            seed=args.seed,
            placer=args.placer,
            policy=args.policy or "auto",
            objective=args.objective,
            micro_batches=args.micro_batches,
            measure=not args.no_measure and (args.measure_budget or True),
            start_from=args.start_from,
            workers=args.workers,
        ),
        constraints=Constraints(
            keep_together=tuple(args.keep_together), pins=pins, memory=args.memory
        ),
        replicas=args.data_parallel,
        extractor=args.extractor,
    )


def _print(result: Result, args: argparse.Namespace, total_s: float) -> None:
    from placer.replicate.result import ReplicatedResult

    if isinstance(result, ReplicatedResult):
        _print_plan(result, args)
        return
    from placer.report.table import print_result as print_table

    print_result(
        args,
        lambda: {**result.to_dict(), "total_s": total_s, "out": str(args.out)},
        lambda console: print_table(result, console, verbose=args.verbose),
        result,
    )


def _print_plan(result: ReplicatedResult, args: argparse.Namespace) -> None:
    from placer.report.replicas import print_plan

    print_result(
        args,
        lambda: {
            **result.to_dict(),
            "out": str(args.out),
            "command": launch_command_of(result, args, args.out) or None,
        },
        lambda console: print_plan(result.replication, console),
        result,
    )


def _write(result: Result, args: argparse.Namespace) -> JobError | None:
    """Write the placement and the report; return why that failed, or None."""
    from placer.interrupt import uninterrupted

    with uninterrupted():
        try:
            result.save(args.out)
        except OSError as error:
            other = _saved_elsewhere(result, args.out)
            where = f"in {other}" if other else "on standard output"
            failure = JobError(f"{write_error(args.out, error)}; the placement is {where}")
            if other is None:  # nothing else is printed there
                raise failure from error
            return failure
        if args.report is not None:
            try:
                write_report(result, args, args.out, args.report)
            except JobError as error:
                return JobError(f"{error}; the placement is in {args.out}")
    return None


def _saved_elsewhere(result: Result, out: Path) -> Path | None:
    """Save the placement to a temporary file, which is returned, or print it."""
    try:
        other = Path(tempfile.gettempdir()) / f"{out.stem}-{os.urandom(4).hex()}{out.suffix}"
        result.save(other)
    except OSError:
        print(json.dumps(result.placement.to_dict(), allow_nan=False), flush=True)
        return None
    return other


def _least_bytes(target: str) -> int:
    """Return a lower bound on the size of the placement file, from that of the graph file."""
    with contextlib.suppress(OSError):
        if target.endswith(".json"):
            return max(LEAST_BYTES, Path(target).stat().st_size // 8)
    return LEAST_BYTES


def _remark(result: Result, args: argparse.Namespace, job: Job, took: str) -> None:
    """Print output files, sources of costs, duration and next steps."""
    if result.extraction is not None and job.search.start_from is not None:
        from placer.exports.existing_map import DeviceMap

        start = job.search.start_from
        if isinstance(start, DeviceMap) and (remark := start.conflict(result.extraction)):
            say(args, remark)
    remarks = ["stopped early, this is the best so far"] if result.stopped else []
    remarks.append(f"placement: {args.out}")
    if args.report is not None:
        remarks.append(f"report: {args.report}")
    remarks += [f"op costs on {kind}: {source}" for kind, source in result.cost_source.items()]
    remarks += [took, f"seed {args.seed}"]
    hidden = len(result.remarks) - len(result.main_remarks)
    has_table = not (args.json or args.data_parallel is not None)
    if hidden and has_table and not args.verbose:
        remarks.append(f"--verbose prints {hidden} more remark{'s'[: hidden > 1]}")
    say(args, "; ".join(remarks))
    if args.data_parallel is not None and (command := launch_command_of(result, args, args.out)):
        say(args, f"train it: {command}")
