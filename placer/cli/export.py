"""``placer export``: writes a placement in the format of another runtime."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Final

from placer.cli.arguments import (
    Merged,
    add_memory,
    add_model,
    check_model_options,
    flag,
    option,
    output_group,
    pair,
    take_mode,
    target_file,
    target_of,
)
from placer.cli.errors import UsageError, usage_errors
from placer.cli.output import check_outputs, print_result, say, writing
from placer.exports import FORMATS
from placer.sources.names import is_graph_file

if TYPE_CHECKING:
    from envs.placement import Placement
    from envs.problem import Problem
    from graphs.extract import Extraction

HELP: Final = "write a placement as a device_map, pipeline split, layer counts or overrides"
_FORMATS: Final = "\n".join(f"  {name:16}{text}" for name, (_, text) in FORMATS.items())
EPILOG: Final = f"""\
formats:
{_FORMATS}

examples:
  placer export placement.json model.py:build --format device-map --out device_map.json
  placer export placement.json hf:gpt2 --format pipeline --as core:0=cuda:0,core:1=cuda:1 --predict
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("placement", type=Path, help="placement.json")
    parser.add_argument("target", help="placed model, as for placer optimize")
    option(parser, "--format", "format, see below", required=True, choices=list(FORMATS))
    group = parser.add_argument_group("devices")
    option(
        group,
        "--as",
        "devices to write, as in core:0=cuda:0,core:1=cuda:1",
        shown="those placed on",
        dest="renamed",
        action=Merged,
        type=renamings,
        default={},
        metavar="NAMES",
    )
    option(
        group, "--main-device", "device of the inputs, for device-map", shown="first accelerator"
    )
    flag(group, "--predict", "predicted steps as placed and exported; measures missing op costs")
    add_memory(group)
    add_model(parser.add_argument_group("model"))
    option(output_group(parser), "--out", "file to write", shown="standard output", type=Path)


def run(args: argparse.Namespace) -> int:
    """Extract the model, write the placement in the format, compare both."""
    inputs = {"placement": args.placement, "target": target_file(args.target)}
    check_outputs({"--out": args.out}, inputs)
    if is_graph_file(args.target):
        raise UsageError("a graph file has no modules to name: give the model that it is of")
    if args.main_device is not None and args.format != "device-map":
        raise UsageError(f"--main-device is for device-map, not for {args.format}: leave it out")
    from envs.runtime import extraction_for
    from graphs.files import write_whole
    from placer.exports import format_named
    from placer.exports.format import export_extracted
    from placer.exports.renaming import ExportError, renamed_devices

    predict = args.predict or bool(args.memory)
    with usage_errors():
        placement = _placement(args.placement)
        renamed = renamed_devices(args.renamed, placement.device_names)
    take_mode(args, placement)
    check_model_options(args, args.target)
    step = target_of(args).load(weights=predict)
    extraction = extraction_for(step, placement.device_names, args.extractor)
    with usage_errors(ExportError):
        problem, remarks = _problem(extraction, placement, args.memory, measure=predict)
        exported = export_extracted(
            format_named(args.format),
            extraction,
            placement,
            problem=problem,
            renamed=renamed,
            main_device=args.main_device,
        )
    for remark in [*exported.summary, *remarks]:
        say(args, remark)
    out = None if args.out is None else str(args.out)
    if args.out is not None:
        with writing(args.out):
            write_whole(args.out, exported.text)
        say(args, f"{args.format}: {args.out}")
    if args.json or args.out is None:
        print_result(
            args,
            lambda: {"format": args.format, **exported.to_dict(), "out": out},
            lambda _: print(exported.text, end=""),
        )
    return 0


UNKNOWN_COSTS: Final = "no step is predicted, as op costs are not known: --predict measures them"
"""They are kept if they were measured on a quiet machine, or three times on a busy one."""


def renamings(text: str) -> dict[str, str]:
    """Parse ``core:0=cuda:0,core:1=cuda:1`` to {device: device to write}."""
    pairs = [pair(part) for part in text.split(",")]
    renamed = dict(pairs)
    if len(renamed) < len(pairs):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} renames a device twice")
    return renamed


def _placement(path: Path) -> Placement:
    from envs.placement import Placement
    from placer.warm_start import load_warm_start

    placement = load_warm_start(path)
    if not isinstance(placement, Placement):
        raise UsageError(f"{path} is a device_map already: export takes a placement file")
    return placement


def _problem(
    extraction: Extraction, placement: Placement, memory: dict[str, int], *, measure: bool
) -> tuple[Problem | None, list[str]]:
    """Return the placed graph with op costs, None without them, and a remark if they can be had."""
    from envs.hardware.discover import discover
    from envs.runtime import costed_problem, known_problem, runtime_for

    try:
        cluster = discover(",".join(placement.device_names), memory)
        runtime = runtime_for(extraction, cluster)
        if measure:
            return costed_problem(runtime, cluster), []
        problem = known_problem(runtime, cluster)
    except ValueError:  # devices elsewhere, a module graph, or unknown memory
        if measure:
            raise
        return None, []
    return problem, [] if problem else [UNKNOWN_COSTS]
