"""Arguments shared by several commands, checked while they are parsed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from placer.sources.target import Target

from graphs.optimizer import NONE, STATE
from graphs.precision import FULL, check_dtype

LARGEST_SEED: Final = 2**32 - 1
"""The largest seed that all random generators accept, torch's and numpy's included."""


def seed(text: str) -> int:
    """Parse a seed.

    Raises:
        argparse.ArgumentTypeError: the text is not a seed.
    """
    try:
        given = int(text)
    except ValueError:
        given = -1
    if not 0 <= given <= LARGEST_SEED:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is no seed: give a whole number from 0 to {LARGEST_SEED}"
        )
    return given


def count(text: str) -> int:
    """Parse a whole number of at least 1.

    Raises:
        argparse.ArgumentTypeError: the text is not such a number.
    """
    try:
        given = int(text)
    except ValueError:
        given = 0
    if given < 1:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number from 1")
    return given


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add ``--json`` and ``--quiet``, which every command has."""
    group = parser.add_argument_group("output")
    group.add_argument(
        "--json", action="store_true", help="print the result as JSON to stdout, for machines"
    )
    group.add_argument(
        "--quiet",
        action="store_true",
        help="print nothing but the result and errors: no progress, no remarks; of a search the "
        "last line, without its table",
    )


def add_in_flight(parser: argparse.ArgumentParser, default: str) -> None:
    """Add ``--in-flight``; ``default`` is only shown in the help."""
    parser.add_argument(
        "--in-flight",
        type=count,
        metavar="N",
        help=f"at most N micro-batches are under way at once (default: {default})",
    )


def add_step(parser: argparse.ArgumentParser) -> None:
    """Add ``--optimizer`` and ``--dtype``, which define the step besides its model."""
    parser.add_argument(
        "--optimizer",
        choices=[NONE, *STATE],
        default=NONE,
        help="what updates the parameters in a training step, as ops of its own (default: none)",
    )
    parser.add_argument(
        "--dtype",
        type=dtype,
        default=FULL,
        metavar="NAME",
        help="bf16 places the step under torch.autocast; fp32 (default) as the model is",
    )


def target_of(args: argparse.Namespace) -> Target:
    """Return the target with the options of :func:`add_step` and ``--inference``."""
    from graphs.optimizer import Optimizer
    from placer.sources.target import Target

    return Target(
        name=args.target,
        training=not args.inference,
        optimizer=Optimizer.of(args.optimizer),
        dtype=args.dtype,
    )


def dtype(text: str) -> str:
    """Parse a dtype.

    Raises:
        argparse.ArgumentTypeError: a step cannot have this dtype.
    """
    try:
        return check_dtype(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run_options(args: argparse.Namespace) -> list[str]:
    """Return the options with which ``placer.run`` runs the placed step."""
    given = (
        ("--optimizer", args.optimizer, NONE),
        ("--dtype", args.dtype, FULL),
        ("--extractor", args.extractor, "auto"),
    )
    return [text for name, value, default in given if value != default for text in (name, value)]


def why_no_step(args: argparse.Namespace, *, is_graph: bool) -> str | None:
    """Return why options for running a step contradict others, None if they do not."""
    if args.inference and args.optimizer != NONE:
        return "inference has no gradients for an optimizer: give --inference or --optimizer"
    given = {
        "--inference": args.inference,
        "--optimizer": args.optimizer != NONE,
        "--dtype": args.dtype != FULL,
        "--extractor": args.extractor != "auto",
        "--fresh": args.fresh,
        "--no-measure": getattr(args, "no_measure", False),
    }
    names = " and ".join(name for name, is_given in given.items() if is_given)
    if is_graph and names:
        return f"a graph file is extracted already: {names} can only be given for models"
    return None


def pin(text: str) -> tuple[str, str]:
    """Parse ``NAME=DEVICE``.

    Raises:
        argparse.ArgumentTypeError: the name or the device is missing.
    """
    name, _, device = text.rpartition("=")
    if not name or not device:
        raise argparse.ArgumentTypeError(
            f"{text[:80]!r} is no pin: give NAME=DEVICE, such as embed=core:0"
        )
    return name, device


def add_extractor(parser: argparse.ArgumentParser) -> None:
    """Add ``--extractor``."""
    parser.add_argument(
        "--extractor",
        choices=["auto", "export", "dispatch", "modules"],
        default="auto",
        help="how the graph of a model is extracted: by torch.export, by recording the ops of a "
        "real step, by its modules' calls; auto (default) takes the first that works",
    )


def memory(text: str) -> dict[str, int]:
    """Parse ``cuda:0=8GiB,cpu=64GiB`` to {device name: bytes}.

    Raises:
        argparse.ArgumentTypeError: the text is not of this form.
    """
    from envs.hardware.byte_size import parse_limits

    try:
        return parse_limits(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_devices(parser: argparse._ActionsContainer, default: str) -> None:
    """Add ``--devices`` and ``--memory``; ``default`` is only shown in the help."""
    parser.add_argument(
        "--devices",
        metavar="NAMES",
        help="cuda:0,cpu (cpu: all cores together), core:0,core:1 (pinned cores), core:0-3 (a core "
        f"set), or auto; the default is {default}",
    )
    add_memory(parser, "; enforced on cuda:N, checked on cores, predicted for cpu")


def add_memory(parser: argparse._ActionsContainer, more: str = "") -> None:
    """Add ``--memory``."""
    parser.add_argument(
        "--memory",
        type=memory,
        default={},
        metavar="SIZES",
        help="what may be used of devices, as in cuda:0=8GiB,cpu=64GiB (default: what is free)"
        + more,
    )


def pins_of(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return {name: device} for pairs.

    Raises:
        ValueError: a name is pinned to two devices.
    """
    pins: dict[str, str] = {}
    for name, device in pairs:
        if pins.setdefault(name, device) != device:
            raise ValueError(f"--pin {name!r} is given with {pins[name]} and with {device}")
    return pins
