"""Command line parser with suggestions for mistyped words."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, NoReturn

from graphs.names import suggestion
from placer.cli.failures import BAD_USAGE


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
            words = self._led_by_command(words, commands)
        else:
            self._check_options(words)
        found, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Exit with the error in one line and a pointer to the help, as the usage may be long."""
        self.exit(BAD_USAGE, f"{self.prog}: error: {message}\nsee {self.prog} --help\n")

    def _commands(self) -> Mapping[str, argparse.ArgumentParser]:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return action.choices
        return {}

    def _led_by_command(
        self, words: Sequence[str], commands: Mapping[str, argparse.ArgumentParser]
    ) -> list[str]:
        """Move options that all commands share from before the command's name to behind it."""
        begin = list(takewhile(lambda word: word.startswith("-"), words))
        rest = words[len(begin) :]
        every = set.intersection(*(set(one._option_string_actions) for one in commands.values()))
        every -= set(self._option_string_actions)
        passed = [word for word in begin if word in every and rest]
        own = [word for word in begin if word not in passed]
        for word in own:
            self._check_place(word.partition("=")[0], rest, commands)
        self._check_options(own)
        if rest and rest[0] not in commands:
            self.error(_no_command(rest[0], list(commands)))
        if not words:
            self.print_help(sys.stderr)
            self.exit(BAD_USAGE)
        return [*own, *rest[:1], *passed, *rest[1:]]

    def _check_place(
        self, name: str, rest: Sequence[str], commands: Mapping[str, argparse.ArgumentParser]
    ) -> None:
        """Exit if an option of a command precedes the command's name."""
        able = [key for key, one in commands.items() if name in one._option_string_actions]
        if able and name not in self._option_string_actions:
            meant = next((word for word in rest if word in able), able[0])
            self.error(f"{name} stands behind the command: placer {meant} {name}")

    def _check_options(self, words: Sequence[str]) -> None:
        for word in takewhile(lambda word: word != "--", words):
            name = word.partition("=")[0]
            if not name.startswith("--") or " " in name or name in self._option_string_actions:
                continue
            hint = suggestion(name, self._option_string_actions)
            self.error(f"there is no option {name}{hint}")


def _no_command(word: str, commands: Sequence[str]) -> str:
    hint = suggestion(word, commands) or f": there are {', '.join(commands)}"
    return f"there is no command {word!r}{hint}"
