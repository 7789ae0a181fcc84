"""``placer completion``: prints a shell completion script."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

SHELLS: Final = ("bash", "zsh", "fish")
FILES: Final = ("target", "devices", "placement")
"""Arguments without type Path that may be files."""

PLACES: Final = {
    "bash": "~/.local/share/bash-completion/completions/placer",
    "zsh": '"${fpath[1]}/_placer"',
    "fish": "~/.config/fish/completions/placer.fish",
}
"""Where each shell looks for the script."""
EPILOG = "to have it in every new shell, in a folder that is there:\n" + "".join(
    f"  {shell:6} placer completion {shell} > {place}\n" for shell, place in PLACES.items()
)
_HEAD: Final = re.compile(r"# AUTOMATICALLY GENERATED.*\n(?:#.*\n)*")
"""The header that shtab writes, which names other places than this command."""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "completion",
        help="print a script with which a shell completes this command line",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    script = completion_script(args.shell)
    print(json.dumps({"shell": args.shell, "script": script}) if args.json else script)
    return 0


def completion_script(shell: str) -> str:
    """Return a script that completes commands, options, choices, files, placers and policies.

    Placers and policies are those that exist when the script is made.
    """
    import shtab

    from graphs.precision import DTYPES
    from placer.cli.commands import build_parser
    from placer.policies.network import names
    from placer.search.registry import listings

    shipped = names()
    choices = {
        "--placer": [listing.name for listing in listings()],
        "--policy": ["none", *shipped],
        "--from": shipped,
        "policy": shipped,
        "--dtype": DTYPES,
    }
    parser = build_parser()
    for action in _actions(parser):
        if action.type is Path or action.dest in FILES:
            setattr(action, "complete", shtab.FILE)  # noqa: B010 - what shtab looks for
        elif (name := (*action.option_strings, action.dest)[0]) in choices:
            action.choices = choices[name]
    head = f"# Made by placer with shtab. {EPILOG.partition(':')[0].capitalize()}:\n"
    head += f"#   placer completion {shell} > {PLACES[shell]}\n"
    script: str = _HEAD.sub(lambda _: head, shtab.complete(parser, shell), count=1)
    # With -o filenames bash continues inside folders and quotes names.
    return script.replace("complete -o bashdefault -F", "complete -o bashdefault -o filenames -F")


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            parsers: dict[str, Any] = dict(action.choices)
            for command in parsers.values():
                yield from _actions(command)
