"""The arguments of ``python -m placer.run``."""

from __future__ import annotations

import argparse
from pathlib import Path

from graphs.precision import FULL
from placer.cli.arguments import add_extractor, count, dtype, seed
from placer.cli.parser import CommandParser
from placer.parallel.options import WARMUP_STEPS
from placer.parallel.registry import DEFAULT, METHODS

OPTIMIZERS = ("sgd", "momentum", "adam", "adamw")
EPILOG = """\
ways to keep replicas one model (--sync):
{methods}

example:
  torchrun --nproc-per-node=2 -m placer.run model.py:build --placement placement.json \\
      --steps 100 --sync bmuf --period 16 --checkpoint run.json --checkpoint-every 50
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    width = max(len(method.name) for method in METHODS)
    methods = "\n".join(f"  {method.name:{width}}  {method.summary}" for method in METHODS)
    parser = CommandParser(
        prog="python -m placer.run",
        description="Trains replicas of a placed model, one for each rank that torchrun starts.",
        epilog=EPILOG.format(methods=methods),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("target", help="path/to/model.py:function or hf:NAME")
    parser.add_argument("--placement", type=Path, required=True, metavar="FILE")
    parser.add_argument("--steps", type=count, required=True, metavar="N", help="steps in all")
    parser.add_argument(
        "--data",
        metavar="FILE:FUNCTION",
        help="gives batch NUMBER, as the target's inputs; made-up batches by default",
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate (default: 0.01)")
    parser.add_argument("--seed", type=seed, default=0, help="of models and made-up batches")
    _add_sync(parser)
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="where the run is kept")
    parser.add_argument(
        "--checkpoint-every", type=count, metavar="K", help="steps (default: at the end alone)"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint, if any")
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="where rank 0 writes the model, as safetensors"
    )
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=300.0,
        help="a rank that lets others wait for longer counts as hung (default: 300)",
    )
    parser.add_argument(
        "--dtype", type=dtype, default=FULL, metavar="NAME", help="as the placement was made with"
    )
    add_extractor(parser)
    parser.add_argument("--json", action="store_true", help="rank 0 prints the result as JSON")
    return parser


def _add_sync(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("keeping replicas one model")
    group.add_argument(
        "--sync", metavar="NAME", help=f"default: what the placement was planned with, or {DEFAULT}"
    )
    group.add_argument(
        "--accumulate",
        type=count,
        metavar="N",
        help="batches of a step of a rank, whose gradients are averaged (default: as planned)",
    )
    group.add_argument(
        "--warmup-steps",
        type=int,
        metavar="N",
        help=f"plain steps before it begins (default: {WARMUP_STEPS} of powersgd and onebit)",
    )
    group.add_argument("--period", type=count, metavar="N", help="steps of a block")
    group.add_argument("--block-momentum", type=float, metavar="X", help="0 .. 1")
    group.add_argument("--block-rate", type=float, metavar="X", help="times the update of a block")
    group.add_argument("--levels", type=levels, metavar="4x2", help="ranks of a node x nodes x ...")
    group.add_argument("--approximation-rank", type=count, metavar="N", help="of PowerSGD")


def levels(text: str) -> tuple[int, ...]:
    """Parse the ranks at each level, innermost first, such as ``4x2``.

    Raises:
        argparse.ArgumentTypeError: the text has another form.
    """
    return tuple(count(part) for part in text.split("x"))
