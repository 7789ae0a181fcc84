"""Command line parser with suggestions for mistyped words."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Final, NoReturn

from graphs.names import suggestion
from placer.cli.errors import BAD_USAGE

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
