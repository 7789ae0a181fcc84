"""``placer export``: a placement in the terms of another runtime."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from graphs.precision import FULL
from placer.cli.arguments import add_extractor, dtype
from placer.cli.failures import BAD_USAGE, JOB_FAILED, fail, why_not_outputs, why_not_written
from placer.cli.talk import say
from placer.export import FORMATS

if TYPE_CHECKING:
    from envs.placement import Placement
    from graphs.extract import Extraction
    from placer.export.format import Exported
    from placer.export.price import Price

EPILOG = """\
formats:
  device-map      Hugging Face: {module: GPU}, for from_pretrained and accelerate's dispatch_model
  pipeline        torch.distributed.pipelining: modules that stages begin with (split_spec)
  layer-counts    layers per stage, for vLLM (VLLM_PP_LAYER_PARTITION) and torchtitan
                  (module_fqns_per_model_part)
  override-regex  llama.cpp: where the experts are, for --override-tensor

examples:
  placer export placement.json model.py:build --format device-map --out device_map.json
  placer export placement.json hf:gpt2 --format pipeline --as core:0=cuda:0,core:1=cuda:1 --predict
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "export",
        help="write a placement as a device_map, pipeline split, layer counts or overrides",
        epilog=EPILOG,
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
        help="where the model will be fed, for device-map (default: the first accelerator)",
    )
    parser.add_argument(
        "--predict",
        action="store_true",
        help="predict the step as exported against the step as placed, on the placement's devices; "
        "op costs are measured unless they are known",
    )
    parser.add_argument("--inference", action="store_true", help="a placement of inference")
    parser.add_argument(
        "--dtype", type=dtype, default=FULL, metavar="NAME", help="as given to placer optimize"
    )
    add_extractor(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Extract the model, write the placement in the format, say what it costs."""
    if (why := why_not_outputs({"--out": args.out}, {"placement": args.placement})) is not None:
        return fail(BAD_USAGE, why)
    from graphs.extract import ExtractionError
    from graphs.whole_file import write_whole
    from placer.export.placed_modules import ExportError
    from placer.target import TargetError

    try:
        found = _exported(args)
    except TargetError as error:
        return fail(BAD_USAGE, error)
    except (ExtractionError, ExportError) as error:
        return fail(JOB_FAILED, error)
    except (ValueError, OSError) as error:
        return fail(BAD_USAGE, error)
    for remark in found.remarks:
        say(args, remark)
    if args.out is not None:
        try:
            write_whole(args.out, found.text)
        except OSError as error:
            return fail(JOB_FAILED, why_not_written(args.out, error))
        say(args, f"{args.format}: {args.out}")
    if args.json:
        out = None if args.out is None else str(args.out)
        told = {"format": args.format, "content": found.content, "remarks": found.remarks}
        print(json.dumps({**told, "out": out}, allow_nan=False))
    elif args.out is None:
        print(found.text, end="")
    return 0


def renamings(text: str) -> dict[str, str]:
    """{device: device to write} of ``core:0=cuda:0,core:1=cuda:1``.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(name and other for name, _, other in pairs):
        raise argparse.ArgumentTypeError(
            f"{text[:80]!r} renames nothing: give NAME=DEVICE, such as core:0=cuda:0"
        )
    return {name.strip(): other.strip() for name, _, other in pairs}


def _exported(args: argparse.Namespace) -> Exported:
    from dataclasses import replace

    from envs.placement import Placement
    from graphs.extract import extract
    from placer.export import format_named
    from placer.export.placed_modules import PlacedModules
    from placer.target import is_graph_file, load_step

    placement = Placement.load(args.placement)
    if is_graph_file(args.target):
        raise ValueError("a graph file has no modules to name: give the model that it is of")
    step = load_step(args.target, training=not args.inference, weights=args.predict)
    extraction = extract(replace(step, dtype=args.dtype), args.extractor)
    placed = PlacedModules.of(
        extraction,
        placement,
        renamed=args.renamed,
        main_device=args.main_device,
        price=_price(extraction, placement, args.renamed) if args.predict else None,
    )
    return format_named(args.format)(placed)


def _price(extraction: Extraction, placement: Placement, renamed: dict[str, str]) -> Price:
    from envs.discover import discover
    from envs.model_problem import ModelProblem
    from placer.export.price import price_of

    known = ModelProblem.of_extraction(extraction, discover(",".join(placement.device_names)))
    return price_of(known.problem, placement, extraction.step.model, renamed)
