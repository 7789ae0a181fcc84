"""``placer measure``: measures the step time of an existing placement."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from placer.cli.arguments import add_devices, add_extractor, add_step, target_of, why_no_step
from placer.cli.failures import BAD_USAGE, JOB_FAILED, fail
from placer.cli.talk import progress_of, say

if TYPE_CHECKING:
    from placer.measuring import Score

EPILOG = """\
examples:
  placer measure model.py:build --placement placement.json
  placer measure hf:gpt2 --placement device_map.json --devices cuda:0,cpu --json
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "measure",
        help="run a model as a placement or device_map says, and print its step time",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", help="path/to/model.py:function or hf:NAME")
    parser.add_argument(
        "--placement",
        type=Path,
        required=True,
        metavar="FILE",
        help="placement.json, or a device_map as JSON: {module: GPU number or device}",
    )
    add_devices(parser, "those of the placement")
    parser.add_argument("--inference", action="store_true", help="of inference, not training")
    add_step(parser)
    add_extractor(parser)
    parser.add_argument(
        "--fresh", action="store_true", help="measure devices and ops anew (see placer cache)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure the placement; return 1 if it could not be run."""
    if (why := why_no_step(args, is_graph=False)) is not None:
        return fail(BAD_USAGE, why)
    from envs.hardware.discover import discover
    from graphs.extract import ExtractionError
    from placer.choose import WarmStartError
    from placer.sources.target import TargetError, is_graph_file
    from placer.warm_start import check_here, load_warm_start

    try:
        if is_graph_file(args.target):
            raise ValueError("a graph file has no model to run: see placer simulate")
        placement = load_warm_start(args.placement)
        if args.devices is None:
            check_here(placement)
        cluster = discover(args.devices or ",".join(placement.device_names), args.memory)
    except (ValueError, OSError) as error:
        return fail(BAD_USAGE, error)
    from placer.measuring import score

    try:
        with progress_of(args) as progress:
            progress.stage("Loading the model")
            found = score(
                target_of(args).load(),
                placement,
                cluster,
                fresh=args.fresh,
                extractor=args.extractor,
                progress=progress,
            )
    except (TargetError, WarmStartError) as error:
        return fail(BAD_USAGE, error)
    except (ExtractionError, ValueError, OSError, RuntimeError) as error:
        return fail(JOB_FAILED, error)
    if args.json:
        print(json.dumps(found.to_dict(), allow_nan=False))
    else:
        _print(found)
    if found.conflict:
        say(args, found.conflict)
    return fail(JOB_FAILED, found.measurement.failure) if found.measurement.failure else 0


def _print(found: Score) -> None:
    from envs.hardware.byte_size import human_bytes
    from placer.milliseconds import milliseconds

    predicted, seen = found.predicted, found.measurement
    told = (
        f"{milliseconds(predicted.step_s)} ms" if predicted.feasible else f"none: {predicted.why}"
    )
    print(f"predicted step: {told}")
    if seen.ok:
        wall = f"median of {len(seen.wall_s)}, shortest {milliseconds(seen.min_s)} ms, quartiles "
        wall += f"{seen.spread:.0%} apart"
        if found.loaded:
            wall = f"by the wall clock {milliseconds(seen.median_s)} ms, {wall}"
            wall = f"CPU-clock time, since the machine is busy; {wall}"
        print(f"measured step: {milliseconds(found.step_s)} ms ({wall})")
    for name, size in seen.peak_memory_bytes.items():
        thought = human_bytes(predicted.peak_memory_bytes.get(name, 0))
        print(f"memory of {name}: {human_bytes(size)} at its peak, {thought} predicted")
