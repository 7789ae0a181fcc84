"""``placer optimize``: searches the fastest placement."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from graphs.files import file_error_message
from placer.cli.failures import (
    BAD_USAGE,
    JOB_FAILED,
    LEAST_BYTES,
    fail,
    why_not_outputs,
    why_not_written,
)
from placer.cli.optimize_arguments import add_arguments, job_of
from placer.cli.replicas import command_of, print_planned
from placer.cli.report import why_no_report
from placer.cli.talk import foretold, progress_of, say, taken

if TYPE_CHECKING:
    from placer.job import Job
    from placer.result import Result

EPILOG = """\
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

examples:
  placer optimize graphs/models/inception.py:build --devices core:0,core:1 --budget 60s
  placer optimize model.py:build --devices cuda:0,cpu --memory cuda:0=8GiB
  placer optimize model.py:build --inference --out placement.json --timeline timeline.json
  placer optimize 'hf:gpt2-xl?batch=8' --devices examples/8xh100.toml --data-parallel auto
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "optimize",
        help="find the fastest placement of a model and write it",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Optimize, write the placement, timeline and report, print the table."""
    began = time.perf_counter()
    if args.cluster is None and (args.devices or "").endswith(".toml"):
        args.cluster, args.devices = Path(args.devices), None
    outputs = {"--out": args.out, "--timeline": args.timeline, "--report": args.report}
    inputs = {"target": _file(args), "--cluster": args.cluster, "--start-from": args.start_from}
    if (why := why_not_outputs(outputs, inputs, _least_bytes(args.target))) is not None:
        return fail(BAD_USAGE, why)
    from placer.sources.target import TargetError, check_target

    try:
        job = job_of(args)
        check_target(args.target)
    except (ValueError, OSError) as error:
        return fail(BAD_USAGE, error)
    from graphs.selection import ConstraintError
    from placer.api import run_job
    from placer.choose import PlacementError, WarmStartError
    from placer.progress import Timed
    from placer.replicate.result import ReplicatedResult
    from placer.report.console import stdout_console
    from placer.report.table import print_result

    say(args, _foretold(job))
    stages_s = {"Loading libraries": time.perf_counter() - began}
    try:
        with progress_of(args) as shown:
            progress = Timed(shown)
            found = run_job(job, progress)
        progress.complete()
    except (TargetError, ConstraintError, WarmStartError) as error:
        return fail(BAD_USAGE, error)
    except (PlacementError, ValueError, OSError, RuntimeError) as error:
        return fail(JOB_FAILED, error)
    searched = time.perf_counter()
    why = _write(found, args)
    stages_s |= {**progress.took_s, "Writing files": time.perf_counter() - searched}
    total_s = time.perf_counter() - began
    try:
        if isinstance(found, ReplicatedResult):
            print_planned(found.replication, args)
        elif args.json:
            data = {**found.to_dict(), "total_s": total_s, "out": str(args.out)}
            print(json.dumps(data, allow_nan=False))
        elif args.quiet:
            print(found)
        else:
            print_result(found, stdout_console(), verbose=args.verbose)
    except KeyboardInterrupt:
        why = why or f"stopped while printing; the placement is in {args.out}"
    except BrokenPipeError:
        raise
    except OSError as error:
        why = why or f"{file_error_message(error)}; the placement is in {args.out}"
    if why is not None:
        return fail(JOB_FAILED, why)
    _tell(found, args, job, taken(total_s, stages_s))
    return 0


def _tell(found: Result, args: argparse.Namespace, job: Job, took: str) -> None:
    """Print remarks, output files, duration and next steps."""
    from placer.replicate.result import ReplicatedResult

    if found.extraction is not None and job.search.start_from is not None:
        from placer.device_map import DeviceMap

        start = job.search.start_from
        if isinstance(start, DeviceMap) and (remark := start.conflict(found.extraction)):
            say(args, remark)
    say(args, _talk(found, args, took))
    if isinstance(found, ReplicatedResult) and (command := command_of(found.replication, args)):
        say(args, f"train it: {command}")


def _file(args: argparse.Namespace) -> Path:
    path, colon, _ = args.target.rpartition(":")
    return Path(path if colon else args.target)


def _write(found: Result, args: argparse.Namespace) -> str | None:
    """Write the placement, timeline and report; return why that failed, or None."""
    from placer.interrupt import uninterrupted
    from placer.report.timeline import write_timeline

    with uninterrupted():
        try:
            found.save(args.out)
        except OSError as error:
            return f"{why_not_written(args.out, error)}; {_kept_elsewhere(found, args.out)}"
        if args.timeline is not None:
            try:
                write_timeline(found.problem, found.placement, args.timeline)
            except OSError as error:
                why = why_not_written(args.timeline, error)
                return f"{why}; the placement is in {args.out}"
        if args.report is not None and (unwritten := why_no_report(found, args)) is not None:
            return f"{unwritten}; the placement is in {args.out}"
    return None


def _least_bytes(target: str) -> int:
    """Return a lower bound on the size of the placement file, from that of the graph file."""
    with contextlib.suppress(OSError):
        if target.endswith(".json"):
            return max(LEAST_BYTES, Path(target).stat().st_size // 8)
    return LEAST_BYTES


def _kept_elsewhere(found: Result, out: Path) -> str:
    """Save the placement to a temporary file or print it; return where it is."""
    try:
        other = Path(tempfile.gettempdir()) / f"{out.stem}-{os.urandom(4).hex()}{out.suffix}"
        found.save(other)
    except OSError:
        print(json.dumps(found.placement.to_dict(), allow_nan=False), flush=True)
        return "the placement is on standard output"
    return f"the placement is in {other}"


def _foretold(job: Job) -> str:
    from envs.hardware.discover import is_here

    is_run = not job.has_costs and job.replicas is None and job.search.measure
    return foretold(
        job.search.budget,
        is_model=not job.has_costs,
        is_run=is_run and all(map(is_here, job.cluster.names)),
    )


def _talk(found: Result, args: argparse.Namespace, took: str) -> str:
    talk = [f"placement: {args.out}"]
    if args.timeline is not None:
        talk.append(f"timeline: {args.timeline} (opens in ui.perfetto.dev)")
    if args.report is not None:
        talk.append(f"report: {args.report}")
    talk += [f"op costs on {kind}: {source}" for kind, source in found.cost_source.items()]
    talk += [took, f"seed {args.seed}"]
    if found.stopped:
        talk.insert(0, "stopped early, this is the best so far")
    hidden = len(found.remarks) - len(found.main_remarks)
    has_table = not (args.json or args.data_parallel is not None)
    if hidden and has_table and not args.verbose:
        talk.append(f"--verbose prints {hidden} more remark{'s'[: hidden > 1]}")
    return "; ".join(talk)
