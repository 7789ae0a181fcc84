"""The parser of all commands, the arguments that several share, and the parsers of their values."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from graphs.optimizer import NONE, STATE
from graphs.precision import FULL, check_dtype
from graphs.text import suggestion
from placer.cli.errors import BAD_USAGE, UsageError
from placer.sources.names import file_named, is_graph_file

if TYPE_CHECKING:
    from envs.placement import Placement
    from placer.sources.target import Target

LARGEST_SEED: Final = 2**32 - 1
"""The largest seed that all random generators accept, torch's and numpy's included."""
OTHER_SPELLINGS: Final = {"simulate": "evaluate"}
"""{accepted word: command}; other programs call them, and the help leaves them out."""


class CommandParser(argparse.ArgumentParser):
    """A parser whose commands report errors in their own options.

    argparse passes options that a command does not know to the parent parser, which would print the
    usage of all commands; and it reports a missing argument before the mistyped option that hides
    it.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and exit with code 2 if a word is neither a command nor an option."""
        words = sys.argv[1:] if args is None else list(args)
        if commands := self._commands():
            words = self._check_command(words, commands)
        else:
            self._check_options(words)
        parsed, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # An empty word, as of a shell variable that is not set, would often mean the default.
        if action.option_strings and not all(word.strip() for word in arg_strings):
            raise argparse.ArgumentError(action, "the value is empty: give one, or leave it out")
        return super()._get_values(action, arg_strings)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += suggestion(str(value), map(str, action.choices or ()))
            raise

    def error(self, message: str) -> NoReturn:
        """Exit with the error in one line and a pointer to the help, as the usage may be long."""
        self.exit(BAD_USAGE, f"{self.prog}: error: {message}\nsee {self.prog} --help\n")

    def _commands(self) -> Mapping[str, argparse.ArgumentParser]:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return action.choices
        return {}

    def _check_command(
        self, words: Sequence[str], commands: Mapping[str, argparse.ArgumentParser]
    ) -> list[str]:
        """Return the words with the command's usual name; exit if there is none."""
        if not words:
            self.print_help(sys.stderr)
            self.exit(BAD_USAGE)
        before = list(takewhile(lambda word: word.startswith("-"), words))
        self._check_options(before)
        name, rest = words[len(before) :][:1], words[len(before) + 1 :]
        name = [OTHER_SPELLINGS.get(word, word) for word in name]
        if name and name[0] not in commands:
            hint = suggestion(name[0], list(commands)) or f": there are {', '.join(commands)}"
            self.error(f"there is no command {name[0]!r}{hint}")
        return [*before, *name, *rest]

    def _check_options(self, words: Sequence[str]) -> None:
        for word in takewhile(lambda word: word != "--", words):
            name = word.partition("=")[0]
            if not name.startswith("--") or " " in name or name in self._option_string_actions:
                continue
            hint = suggestion(name, self._option_string_actions)
            if not hint and self._commands():
                hint = ": options follow the name of their command"
            self.error(f"there is no option {name}{hint}")


def seed(text: str) -> int:
    """Parse a seed."""
    number = int(text) if text.isdecimal() else -1
    if not 0 <= number <= LARGEST_SEED:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is no seed: give a whole number from 0 to {LARGEST_SEED}"
        )
    return number


def count(text: str) -> int:
    """Parse a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number from 1")
    return int(text)


def workers(text: str) -> int | str:
    """Parse a number of workers, or the Ray cluster that they are on."""
    if text.isdecimal():
        return count(text)
    from placer.ray_cluster.address import address_of

    try:
        address_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def dtype(text: str) -> str:
    """Parse the dtype of a step."""
    try:
        return check_dtype(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def memory(text: str) -> dict[str, int]:
    """Parse ``cuda:0=8GiB,cpu=64GiB`` to {device name: bytes}."""
    from envs.hardware.units import parse_limits

    try:
        return parse_limits(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def pair(text: str) -> tuple[str, str]:
    """Parse ``NAME=DEVICE``; the name may contain ``=``."""
    name, _, device = (part.strip() for part in text.rpartition("="))
    if not name or not device:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not NAME=DEVICE, such as embed=core:0")
    return name, device


def settings(text: str, kind: type, allowed: Collection[str]) -> tuple[str, dict[str, Any]]:
    """Parse ``HEAD,KEY=VALUE,...``; keys are fields of the dataclass ``kind``, hyphens allowed.

    Returns the head, "" if it is missing, and {field: value of the field's type}.
    """
    head, values = "", {}
    types = {field.name: str(field.type) for field in fields(kind)}
    for position, part in enumerate(text.split(",")):
        key, equals, value = (word.strip() for word in part.partition("="))
        if position == 0 and not equals:
            head = key
            continue
        name = key.replace("-", "_")
        if name not in allowed:
            keys = [one.replace("_", "-") for one in allowed]
            hint = suggestion(key, keys) or f": there are {', '.join(keys)}"
            raise argparse.ArgumentTypeError(f"there is no setting {key[:40]!r}{hint}")
        if not value:
            raise argparse.ArgumentTypeError(f"{key} has no value: write {key}=VALUE")
        if name in values:
            raise argparse.ArgumentTypeError(f"{key} is set twice")
        try:
            values[name] = _converted(value, types[name])
        except ValueError:
            raise argparse.ArgumentTypeError(f"{key} is {value[:40]!r}, not a number") from None
    return head, values


class Merged(argparse.Action):
    """Merges the dicts of an option that is given several times."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        """Add the values; a name has one."""
        known = getattr(namespace, self.dest)
        for name, value in values.items():
            if known.get(name, value) != value:
                raise argparse.ArgumentError(self, f"{name} is given twice, with other values")
        setattr(namespace, self.dest, {**known, **values})


def _converted(text: str, kind: str) -> Any:
    if kind.startswith("tuple[int"):  # ranks at each level, as in 4x2
        return tuple(int(part) for part in text.split("x"))
    if kind.startswith("int"):
        return int(text)
    return float(text) if kind.startswith("float") else text


METAVARS: Final[dict[object, str]] = {
    Path: "FILE",
    count: "N",
    seed: "N",
    workers: "N",
    float: "X",
}
"""{type of an option: the word for its value in the help}; NAME for others."""


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add ``--json`` and ``--quiet``, which every command has, to its group "output"."""
    group = output_group(parser)
    flag(group, "--json", "result as one JSON object on stdout, empty after an error")
    flag(group, "--quiet", "result and errors only: no progress, no remarks, no table")


def output_group(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Return the group "output" of a parser, which is made once."""
    groups = {group.title: group for group in parser._action_groups}
    return groups.get("output") or parser.add_argument_group("output")


def option(
    parser: argparse._ActionsContainer,
    name: str,
    text: str,
    *,
    shown: object = None,
    default: Any = None,
    **more: Any,
) -> None:
    """Add an option whose help ends with its default, or with ``shown`` where that is derived."""
    if "choices" not in more:
        more.setdefault("metavar", METAVARS.get(more.get("type"), "NAME"))
    shown = shown or default
    help_text = text if shown in (None, [], {}) else f"{text} [{shown}]"
    parser.add_argument(name, default=default, help=help_text, **more)


def flag(parser: argparse._ActionsContainer, name: str, text: str) -> None:
    """Add an option without a value."""
    parser.add_argument(name, action="store_true", help=text)


def add_devices(parser: argparse._ActionsContainer, default: str, *, cluster: bool = False) -> None:
    """Add ``--devices``, ``--memory`` and ``--cluster``; ``default`` is only shown in the help."""
    option(
        parser,
        "--devices",
        "devices, such as cuda:0,cpu or core:0,core:1 or core:0-3",
        shown=default,
        metavar="NAMES",
    )
    add_memory(parser)
    if cluster:
        option(
            parser,
            "--cluster",
            "cluster file (TOML); devices that are not here are simulated",
            type=Path,
        )


def add_memory(parser: argparse._ActionsContainer) -> None:
    """Add ``--memory``."""
    option(
        parser,
        "--memory",
        "memory to use, as in cuda:0=8GiB,cpu=64GiB",
        shown="free memory",
        action=Merged,
        type=memory,
        default={},
        metavar="SIZES",
    )


def add_model(parser: argparse._ActionsContainer) -> None:
    """Add the options that define the step of a model and how it is extracted."""
    flag(parser, "--inference", "inference step instead of a training step")
    option(
        parser,
        "--optimizer",
        "optimizer of the training step, as ops of its own",
        choices=[NONE, *STATE],
        default=NONE,
    )
    add_dtype(parser)
    add_extractor(parser)


def add_dtype(parser: argparse._ActionsContainer) -> None:
    """Add ``--dtype``."""
    option(
        parser,
        "--dtype",
        "dtype of the step; bf16 runs under torch.autocast",
        type=dtype,
        default=FULL,
    )


def add_extractor(parser: argparse._ActionsContainer) -> None:
    """Add ``--extractor``."""
    option(
        parser,
        "--extractor",
        "graph extractor; auto is the first that works",
        choices=["auto", "export", "dispatch", "modules"],
        default="auto",
    )


def target_of(args: argparse.Namespace, name: str | None = None) -> Target:
    """Return the target with the options of :func:`add_model`."""
    from graphs.optimizer import Optimizer
    from placer.sources.target import Target

    return Target(
        name=name or args.target,
        training=not args.inference,
        optimizer=Optimizer.of(args.optimizer),
        dtype=args.dtype,
    )


def target_file(target: str) -> Path:
    """Return the file that a target names; a path that does not exist for ``hf:`` names."""
    return file_named(target) or Path(target.rpartition(":")[0] or target)


def model_options(args: argparse.Namespace, *, inference: bool = True) -> list[str]:
    """Return the words of the options of :func:`add_model` that differ from their defaults."""
    values = (
        ("--optimizer", args.optimizer, NONE),
        ("--dtype", args.dtype, FULL),
        ("--extractor", args.extractor, "auto"),
    )
    words = [word for name, value, default in values if value != default for word in (name, value)]
    return ["--inference", *words] if inference and args.inference else words


def take_mode(args: argparse.Namespace, placement: Placement) -> None:
    """Set ``args.inference`` to what a placement is of, which an option need not repeat.

    Raises UsageError if ``--inference`` was given and the placement is of a training step.
    """
    if args.inference and placement.is_training:
        raise UsageError("the placement is of a training step: leave --inference out")
    args.inference = not placement.is_training


def check_model_options(
    args: argparse.Namespace, target: str, *, needs_cluster: bool = True
) -> None:
    """Check that the options of :func:`add_model` and the devices suit the target."""
    if args.inference and args.optimizer != NONE:
        raise UsageError("inference has no gradients for an optimizer: leave --optimizer out")
    cluster = getattr(args, "cluster", None)
    if cluster is not None and (args.devices is not None or getattr(args, "memory", None)):
        raise UsageError(
            "give --devices and --memory, or --cluster: a cluster file has devices and memory sizes"
        )
    if needs_cluster and is_graph_file(target) and cluster is None:
        raise UsageError("a graph file has no devices of its own: give --cluster cluster.toml")
    words = model_options(args)
    words += ["--no-measure"] if getattr(args, "no_measure", False) else []
    words += ["--measure-budget"] if getattr(args, "measure_budget", None) else []
    if words and is_graph_file(target):
        names = " and ".join(word for word in words if word.startswith("--"))
        raise UsageError(f"a graph file is extracted already: {names} can only be given for models")
