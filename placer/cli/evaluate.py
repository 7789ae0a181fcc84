"""``placer evaluate``: the step time of an existing placement, simulated or measured."""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from placer.cli.arguments import (
    add_devices,
    add_model,
    check_model_options,
    count,
    option,
    output_group,
    take_mode,
    target_file,
    target_of,
)
from placer.cli.errors import JobError, UsageError, usage_errors
from placer.cli.output import check_outputs, print_result, progress_of, say, writing
from placer.sources.names import is_graph_file

if TYPE_CHECKING:
    from placer.evaluation import Evaluation
    from placer.job import Job

HELP: Final = "simulate or measure the step of a placement or device_map"
EPILOG: Final = """\
examples:
  placer evaluate graph.json --cluster cluster.toml --placement placement.json
  placer evaluate model.py:build --placement placement.json
  placer evaluate hf:gpt2 --placement device_map.json --devices cuda:0,cpu --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("target", help="placed model or graph file, as for placer optimize")
    option(
        parser,
        "--placement",
        "placement.json, or device_map as JSON: {module: GPU number or device}",
        type=Path,
        required=True,
    )
    option(
        parser,
        "--backend",
        "source of the step time",
        shown="measured; simulated for graph files",
        choices=["simulated", "measured"],
    )
    option(
        parser,
        "--micro-batches",
        "micro-batches per step of a graph file",
        shown="as placed",
        type=count,
    )
    add_devices(parser.add_argument_group("devices"), "those of the placement", cluster=True)
    add_model(parser.add_argument_group("model"))
    option(
        output_group(parser), "--timeline", "Chrome trace of the simulated step to write", type=Path
    )


def run(args: argparse.Namespace) -> int:
    """Evaluate the placement and print its step time; return 1 if it cannot run."""
    inputs = {"target": target_file(args.target), "--cluster": args.cluster}
    check_outputs({"--timeline": args.timeline}, {**inputs, "--placement": args.placement})
    check_model_options(args, args.target)
    simulates_graph = is_graph_file(args.target)
    backend = args.backend or ("simulated" if simulates_graph else "measured")
    from placer.evaluation import evaluate_job

    with usage_errors():
        job = _job(args, is_run=backend == "measured" and not simulates_graph)
    # With a graph file, reading files is all that can go wrong.
    errors = usage_errors() if simulates_graph else nullcontext()
    with progress_of(args) as progress, errors:
        evaluation = evaluate_job(job, backend, progress)
    print_result(args, evaluation.to_dict, lambda _: _print(evaluation))
    if evaluation.remark:
        say(args, evaluation.remark)
    if args.timeline is not None:
        _write_timeline(evaluation, args.timeline)
        say(args, f"timeline: {args.timeline}")
    if evaluation.measurement is not None and evaluation.measurement.failure:
        raise JobError(evaluation.measurement.failure)
    return 0 if evaluation.feasible else 1


def _job(args: argparse.Namespace, *, is_run: bool) -> Job:
    from envs.placement import Placement
    from placer.evaluation import evaluation_job
    from placer.warm_start import load_warm_start

    start = load_warm_start(args.placement)
    if isinstance(start, Placement):
        start = replace(start, micro_batches=args.micro_batches or start.micro_batches)
        if is_run and start.micro_batches > 1:
            raise UsageError(
                f"whole steps are run, not {start.micro_batches} micro-batches: give --backend "
                "simulated, or --micro-batches 1"
            )
        if not is_graph_file(args.target):
            take_mode(args, start)
            check_model_options(args, args.target)
    elif args.micro_batches is not None:
        raise UsageError("a device map has no micro-batches: leave --micro-batches out")
    return evaluation_job(
        start,
        target_of(args),
        args.cluster or args.devices,
        memory=args.memory,
        extractor=args.extractor,
    )


def _print(evaluation: Evaluation) -> None:
    from envs.hardware.units import human_bytes, milliseconds

    predicted, measurement = evaluation.predicted, evaluation.measurement
    if predicted.feasible:
        print(f"predicted step: {milliseconds(predicted.step_s)} ms")
    else:
        print(f"not feasible: {predicted.why}")
    if predicted.period_s is not None:
        print(
            f"{evaluation.placement.micro_batches} micro-batches, "
            f"{milliseconds(predicted.period_s)} ms for each further one"
        )
    elif predicted.no_period_reason:
        print(f"time of a further micro-batch: unknown, {predicted.no_period_reason}")
    if measurement is None:
        if evaluation.max_load_s is not None:
            print(f"largest load: {milliseconds(evaluation.max_load_s)} ms")
        return
    if measurement.ok:
        spread = f"median of {len(measurement.wall_s)}, shortest {milliseconds(measurement.min_s)}"
        spread += f" ms, quartiles {measurement.spread:.0%} apart"
        if evaluation.contended:
            spread = f"by the wall clock {milliseconds(measurement.median_s)} ms, {spread}"
            spread = f"CPU-clock time, since the machine is busy; {spread}"
        print(f"measured step: {milliseconds(evaluation.step_s)} ms ({spread})")
    for name, size in measurement.peak_memory_bytes.items():
        expected = human_bytes(predicted.peak_memory_bytes.get(name, 0))
        reserved = measurement.reserved_memory_bytes.get(name, size)
        gaps = f", {human_bytes(reserved)} with gaps between tensors" if reserved > size else ""
        print(f"memory of {name}: {human_bytes(size)} at its peak{gaps}, {expected} predicted")


def _write_timeline(evaluation: Evaluation, path: Path) -> None:
    """Write the simulated step as Chrome trace, which opens in Perfetto and chrome://tracing."""
    from envs.simulator import Simulated
    from envs.simulator.trace import chrome_trace
    from graphs.files import write_whole

    try:
        trace = chrome_trace(*Simulated(evaluation.problem).run(evaluation.placement))
    except ValueError as error:
        raise JobError(f"{path} is not written: {error}") from error
    with writing(path):
        write_whole(path, json.dumps(trace))
