"""``placer export``: writes a placement in the format of another runtime."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from graphs.optimizer import NONE
from placer.cli.arguments import add_extractor, add_memory, add_step
from placer.cli.failures import BAD_USAGE, JOB_FAILED, fail, why_not_outputs, why_not_written
from placer.cli.talk import say
from placer.exports import FORMATS

if TYPE_CHECKING:
    from envs.placement import Placement
    from envs.problem import Problem
    from graphs.extract import Extraction
    from placer.exports.format import Exported

EPILOG = """\
formats:
{formats}

examples:
  placer export placement.json model.py:build --format device-map --out device_map.json
  placer export placement.json hf:gpt2 --format pipeline --as core:0=cuda:0,core:1=cuda:1 --predict
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    formats = [f"  {name:16}{entry.description}" for name, entry in FORMATS.items()]
    parser = commands.add_parser(
        "export",
        help="write a placement as a device_map, pipeline split, layer counts or overrides",
        epilog=EPILOG.format(formats="\n".join(formats)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("placement", type=Path, help="placement.json")
    parser.add_argument("target", help="the model that was placed, as given to placer optimize")
    parser.add_argument("--format", required=True, choices=list(FORMATS), help="see below")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="where it goes (default: standard output)"
    )
    parser.add_argument(
        "--as",
        dest="renamed",
        type=renamings,
        default={},
        metavar="NAMES",
        help="devices to write for those of the placement, as in core:0=cuda:0,core:1=cuda:1",
    )
    parser.add_argument(
        "--main-device",
        metavar="NAME",
        help="device of the model's inputs, for device-map (default: the first accelerator)",
    )
    parser.add_argument(
        "--predict",
        action="store_true",
        help="measure op costs that are not known yet, to predict the step as placed and exported",
    )
    add_memory(parser, "; implies --predict")
    parser.add_argument("--inference", action="store_true", help="a placement of inference")
    add_step(parser)
    add_extractor(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Extract the model, write the placement in the format, compare both."""
    if (why := why_not_outputs({"--out": args.out}, {"placement": args.placement})) is not None:
        return fail(BAD_USAGE, why)
    from graphs.extract import ExtractionError
    from graphs.files import write_whole
    from placer.exports.renaming import ExportError, RenamingError
    from placer.sources.target import TargetError

    if args.inference and args.optimizer != NONE:
        return fail(BAD_USAGE, "inference has no gradients: give --inference or --optimizer")
    try:
        exported = _exported(args)
    except (TargetError, RenamingError) as error:
        return fail(BAD_USAGE, error)
    except (ExtractionError, ExportError) as error:
        return fail(JOB_FAILED, error)
    except (ValueError, OSError) as error:
        return fail(BAD_USAGE, error)
    for sentence in exported.summary:
        say(args, sentence)
    if args.out is not None:
        try:
            write_whole(args.out, exported.text)
        except OSError as error:
            return fail(JOB_FAILED, why_not_written(args.out, error))
        say(args, f"{args.format}: {args.out}")
    if args.json:
        out = None if args.out is None else str(args.out)
        data = {"format": args.format, **exported.to_dict(), "out": out}
        print(json.dumps(data, allow_nan=False))
    elif args.out is None:
        print(exported.text, end="")
    return 0


def renamings(text: str) -> dict[str, str]:
    """Parse ``core:0=cuda:0,core:1=cuda:1`` to {device: device to write}.

    Raises:
        argparse.ArgumentTypeError: the text is not of this form.
    """
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(name and other for name, _, other in pairs):
        raise argparse.ArgumentTypeError(
            f"{text[:80]!r} renames nothing: give NAME=DEVICE, such as core:0=cuda:0"
        )
    return {name.strip(): other.strip() for name, _, other in pairs}


def _exported(args: argparse.Namespace) -> Exported:
    from dataclasses import replace

    from graphs.extract import extract
    from graphs.optimizer import Optimizer
    from placer.exports import format_named
    from placer.exports.format import export_extracted
    from placer.exports.renaming import check_renamed
    from placer.sources.target import is_graph_file, load_step

    placement = _placement(args)
    check_renamed(args.renamed, placement.device_names)
    if is_graph_file(args.target):
        raise ValueError("a graph file has no modules to name: give the model that it is of")
    predict = args.predict or bool(args.memory)
    step = load_step(args.target, training=not args.inference, weights=predict)
    step = replace(step, optimizer=Optimizer.of(args.optimizer), dtype=args.dtype)
    extraction = extract(step, args.extractor)
    return export_extracted(
        format_named(args.format),
        extraction,
        placement,
        problem=_problem(extraction, placement, args.memory, measure=predict),
        renamed=args.renamed,
        main_device=args.main_device,
    )


def _placement(args: argparse.Namespace) -> Placement:
    from envs.placement import Placement
    from placer.warm_start import load_warm_start

    try:
        return Placement.load(args.placement)
    except ValueError:
        if not isinstance(load_warm_start(args.placement), Placement):
            raise ValueError(
                f"{args.placement} is a device_map already: placer export takes the placement that "
                "placer optimize wrote; placer measure and placer optimize --start-from take maps"
            ) from None
        raise


def _problem(
    extraction: Extraction, placement: Placement, memory: dict[str, int], *, measure: bool
) -> Problem | None:
    """Return the placed graph with op costs; None if costs are unknown and not to be measured.

    Raises:
        ValueError: costs are to be measured, but the devices are not on this machine or lack the
            memory.
    """
    from envs.hardware.discover import discover
    from envs.runtime import costed_problem, known_problem, runtime_for

    try:
        cluster = discover(",".join(placement.device_names), memory)
        runtime = runtime_for(extraction, cluster)
        return (costed_problem if measure else known_problem)(runtime, cluster)
    except ValueError:  # devices elsewhere, a module graph, or unknown memory
        if measure:
            raise
        return None
