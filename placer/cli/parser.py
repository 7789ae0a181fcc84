"""The parser of the command line, which tells what a mistyped word was meant to be."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from itertools import takewhile
from typing import Any


class CommandParser(argparse.ArgumentParser):
    """A parser whose commands answer for their own options.

    argparse hands what a command does not know to the parser above it, which would show the usage
    of all commands; and it tells of a missing argument before it tells of the slip that hides it.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and exit with code 2 where a word is no command and no option."""
        words = sys.argv[1:] if args is None else list(args)
        commands = self._commands()
        # What stands behind the name of a command is for the parser of the command.
        own = list(takewhile(lambda word: word.startswith("-"), words)) if commands else words
        self._check_options(own)
        if commands and len(own) < len(words) and words[len(own)] not in commands:
            self.error(_no_command(words[len(own)], commands))
        found, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def _commands(self) -> list[str]:
        """The names of its commands; a parser of a command has none."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return list(action.choices)
        return []

    def _check_options(self, words: Sequence[str]) -> None:
        for word in takewhile(lambda word: word != "--", words):
            name = word.partition("=")[0]
            if not name.startswith("--") or " " in name or name in self._option_string_actions:
                continue
            near = difflib.get_close_matches(name, self._option_string_actions, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            self.error(f"there is no option {name}{hint}")


def _no_command(word: str, commands: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, commands, n=1)
    hint = f"; did you mean {near[0]}?" if near else f": there are {', '.join(commands)}"
    return f"there is no command {word!r}{hint}"
