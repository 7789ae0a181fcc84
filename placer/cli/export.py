"""``placer export``: writes a placement in the format of another runtime."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from graphs.optimizer import NONE
from placer.cli.arguments import add_extractor, add_memory, add_step, run_options
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
        help="measure what it takes to predict the step as exported against the step as placed, on "
        "the placement's devices; where that is known from before, both are told anyway",
    )
    add_memory(parser, "; an export that would not fit is told")
    parser.add_argument("--inference", action="store_true", help="a placement of inference")
    add_step(parser)
    add_extractor(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Extract the model, write the placement in the format, print remarks on its cost."""
    if (why := why_not_outputs({"--out": args.out}, {"placement": args.placement})) is not None:
        return fail(BAD_USAGE, why)
    from graphs.extract import ExtractionError
    from graphs.whole_file import write_whole
    from placer.export.faults import ExportError, RenamingError
    from placer.target import TargetError

    if args.inference and args.optimizer != NONE:
        return fail(BAD_USAGE, "inference has no gradients: give --inference or --optimizer")
    try:
        found = _exported(args)
    except (TargetError, RenamingError) as error:
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
    from placer.export import format_named
    from placer.export.placed_modules import PlacedModules
    from placer.export.renaming import check_renamed
    from placer.target import is_graph_file, load_step

    placement = _placement(args)
    check_renamed(args.renamed, placement.device_names)
    if is_graph_file(args.target):
        raise ValueError("a graph file has no modules to name: give the model that it is of")
    step = load_step(args.target, training=not args.inference, weights=args.predict)
    step = replace(step, optimizer=Optimizer.of(args.optimizer), dtype=args.dtype)
    extraction = extract(step, args.extractor)
    price = _price(args, extraction, placement)
    placed = PlacedModules.of(
        extraction,
        placement,
        renamed=args.renamed,
        main_device=args.main_device,
        price=price,
    )
    found = format_named(args.format)(placed)
    return replace(found, remarks=(*found.remarks, *_remarks(args, found, placement, price)))


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


def _price(args: argparse.Namespace, extraction: Extraction, placement: Placement) -> Price | None:
    """Return the predictor of exports; None if costs are unknown and ``--predict`` is not given.

    Raises:
        ValueError: ``--predict`` or ``--memory`` is given, but the devices are not on this machine
            or lack the memory.
    """
    from envs.discover import discover
    from envs.model_problem import ModelProblem
    from placer.export.price import price_of

    try:
        cluster = discover(",".join(placement.device_names), args.memory)
        if args.predict:
            known: ModelProblem | None = ModelProblem.of_extraction(extraction, cluster)
        else:
            known = ModelProblem.known(extraction, cluster)
    except ValueError:  # devices elsewhere, a module graph, or unknown memory
        if args.predict or args.memory:
            raise
        return None
    if known is None:
        return None
    return price_of(known.problem, placement, extraction, args.renamed)


def _remarks(
    args: argparse.Namespace, found: Exported, placement: Placement, price: Price | None
) -> list[str]:
    from envs.discover import is_here
    from placer.export.renaming import told_joined

    told = told_joined(args.renamed, placement.device_names)
    if args.main_device is not None and args.format != "device-map":
        told.append(f"--main-device {args.main_device} is not used: only device-map knows of it")
    here = all(map(is_here, placement.device_names))
    if price is None and args.memory:
        told.append("give --predict, too, to know whether it fits into this memory")
    elif price is None and here and not found.is_as_placed:
        told.append("give --predict, too, to know how long a step takes with these ops moved")
    if not found.is_as_placed and not args.inference and placement.micro_batches == 1:
        words = ["torchrun", "--nproc-per-node=1", "-m", "placer.run", args.target]
        words += ["--placement", str(args.placement), "--steps", "100", *run_options(args)]
        told.append(f"placer itself runs every op where it is placed: {shlex.join(words)}")
    return told
