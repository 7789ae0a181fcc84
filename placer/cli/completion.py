"""Scripts with which a shell completes the command line."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PLACES: Final = {
    "bash": "~/.local/share/bash-completion/completions/placer",
    "zsh": '"${fpath[1]}/_placer"',
    "fish": "~/.config/fish/completions/placer.fish",
}
"""{shell: where it looks for the script}."""
FILES: Final = ("target", "devices", "placement")
"""Arguments without type Path that may be files."""
_HEAD: Final = re.compile(r"# AUTOMATICALLY GENERATED.*\n(?:#.*\n)*")
"""The header that shtab writes, which names other places than this command."""


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return a script that completes commands, options, choices, files, algorithms and policies.

    Search algorithms and policies are those that exist when the script is made. The parser is
    changed: it must not be used afterwards.
    """
    import shtab

    from graphs.precision import DTYPES
    from placer.policies.network import names
    from placer.search.registry import listings

    shipped = names()
    choices = {
        "--placer": [listing.name for listing in listings()],
        "--policy": ["none", *shipped],
        "--start": shipped,
        "--dtype": DTYPES,
    }
    for action in _actions(parser):
        if action.type is Path or action.dest in FILES:
            setattr(action, "complete", shtab.FILE)  # noqa: B010 - what shtab looks for
        elif (name := (*action.option_strings, action.dest)[0]) in choices:
            action.choices = choices[name]
    head = (
        "# Made by placer with shtab. To have it in every new shell, in a folder that exists:\n"
        f"#   placer machine --completion {shell} > {PLACES[shell]}\n"
    )
    script: str = _HEAD.sub(lambda _: head, shtab.complete(parser, shell), count=1)
    # With -o filenames bash continues inside folders and quotes names.
    return script.replace("complete -o bashdefault -F", "complete -o bashdefault -o filenames -F")


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in dict[str, argparse.ArgumentParser](action.choices).values():
                yield from _actions(command)
