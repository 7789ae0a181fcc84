"""Next steps with a placement: command lines with the names of its files."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from envs.hardware.discover import is_here
from envs.runtime import is_of_torch

EXPORTS: Final = {
    "device-map": "Hugging Face's dispatch_model and from_pretrained",
    "pipeline": "torch.distributed.pipelining",
    "layer-counts": "vLLM and torchtitan",
}
"""{format that a report offers: its runtime}."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command line and its purpose."""

    what: str
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The placed target as words of a command line, and the placement file."""

    placement: Path
    target: str
    devices: Sequence[str]  # by name
    place: Sequence[str]  # options that choose the devices
    model: Sequence[str] = ()  # options with which the model's graph is extracted
    search: Sequence[str] = ()  # options of a further search, its devices included
    launch: str = ""  # command that trains with the placement
    is_of_part: bool = False  # whether the placement is of a part of the batch, not of the target

    @property
    def is_graph(self) -> bool:
        """Return whether the target is a graph file, which has no model."""
        return self.target.endswith(".json")


def next_commands(source: Source) -> list[Command]:
    """Return commands that use the placement, the most useful first."""
    placement = str(source.placement)
    shown = _command("See the device of every module", "placer", "show", placement)
    if source.is_of_part:  # all others take the placement with the whole target
        return [*_launch(source), shown]
    longer = str(source.placement.with_name(f"{source.placement.stem}-longer.json"))
    again = ["placer", "optimize", source.target, *source.model, *source.search]
    again += ["--start-from", placement, "--budget", "5m", "--out", longer]
    return [
        *(_of_graph(source) if source.is_graph else _of_model(source)),
        shown,
        _command("Search longer, beginning with this placement", *again),
    ]


def _of_graph(source: Source) -> list[Command]:
    evaluate = ["placer", "evaluate", source.target, *source.place]
    evaluate += ["--placement", str(source.placement)]
    timeline = str(source.placement.with_name("timeline.json"))
    return [
        _command("Simulate the step again, with its critical path", *evaluate, "--json"),
        _command("Look at every op in ui.perfetto.dev", *evaluate, "--timeline", timeline),
    ]


def _of_model(source: Source) -> list[Command]:
    commands = _launch(source)
    if all(map(is_here, source.devices)):
        words = ["placer", "evaluate", source.target, "--placement", str(source.placement)]
        words += [*source.place, *source.model]
        commands.append(_command("Measure it again, on this machine", *words))
    return commands + [_export(source, name) for name in EXPORTS]


def _launch(source: Source) -> list[Command]:
    what = "Train with it, every op where it is placed"
    return [Command(what, source.launch)] if source.launch else []


def _export(source: Source, name: str) -> Command:
    words = ["placer", "export", str(source.placement), source.target, "--format", name]
    if not all(map(is_of_torch, source.devices)):
        gpus = [f"{device}=cuda:{d}" for d, device in enumerate(source.devices)]
        words += ["--as", ",".join(gpus)]
    out = source.placement.with_name(f"{name}.json")
    return _command(f"Export for {EXPORTS[name]}", *words, *source.model, "--out", str(out))


def _command(what: str, *words: str) -> Command:
    return Command(what, shlex.join(words))
