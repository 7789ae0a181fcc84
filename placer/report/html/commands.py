"""Next steps with a placement: command lines with the names of its files."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from envs.hardware.discover import is_here
from envs.placement import Placement
from envs.problem import Problem
from envs.runtime import is_of_torch
from graphs.optimizer import NONE
from graphs.precision import FULL
from placer.exports import format_named
from placer.sources.names import PREFIX

if TYPE_CHECKING:
    from graphs.extract import Extraction
    from placer.exports.format import Exported

EXPORTS: Final = ("device-map", "pipeline", "layer-counts")
"""The formats that a report offers."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command line, its purpose ``what`` and remarks ``told``.

    If it is not possible, ``command`` is empty and ``told`` says why.
    """

    what: str
    command: str
    told: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The placed target with its command-line options, and the placement file."""

    placement: Path
    target: str
    devices: Sequence[str]  # by name
    cluster: Path | None = None
    memory: Mapping[str, int] = field(default_factory=dict)  # {device: limit in bytes}
    inference: bool = False
    optimizer: str = NONE
    dtype: str = FULL
    extractor: str = "auto"
    launch: str = ""  # command that trains it with placer
    search: Sequence[str] = ()  # other search options, as words
    exports: Mapping[str, Exported | str] = field(default_factory=dict)  # see export_trials

    @property
    def is_graph(self) -> bool:
        """Return whether the target is a graph file, which has no model."""
        return self.target.endswith(".json")

    @property
    def options(self) -> list[str]:
        """Return the options for extracting the model that differ from the defaults."""
        return [
            *(["--inference"] if self.inference else []),
            *(["--dtype", self.dtype] if self.dtype != FULL else []),
            *(["--extractor", self.extractor] if self.extractor != "auto" else []),
        ]

    @property
    def update(self) -> list[str]:
        """Return the option for the optimizer, if there is one."""
        return ["--optimizer", self.optimizer] if self.optimizer != NONE else []

    @property
    def limits(self) -> list[str]:
        """Return the option for memory limits, if there are any."""
        told = ",".join(f"{name}={size}" for name, size in self.memory.items())
        return ["--memory", told] if told else []


def export_trials(
    extraction: Extraction, placement: Placement, problem: Problem, renamed: Mapping[str, str]
) -> dict[str, Exported | str]:
    """Return {format: export, or why it is not possible}, so that no offered command fails.

    Args:
        extraction: the source of the placed graph.
        placement: of its ops or calls.
        problem: the simulated problem.
        renamed: {device of the placement: device to export}.
    """
    from placer.exports.format import export_extracted

    known = problem if placement.graph == problem.graph.hash else None
    found: dict[str, Exported | str] = {}
    for name in EXPORTS:
        try:
            found[name] = export_extracted(
                format_named(name), extraction, placement, problem=known, renamed=renamed
            )
        except ValueError as error:  # the runtime cannot run this placement or model
            found[name] = str(error)
    return found


def next_commands(source: Source) -> list[Command]:
    """Return commands that use the placement, the most useful first."""
    placement = str(source.placement)
    found = _of_graph(source) if source.is_graph else _of_model(source)
    where = ["--cluster", str(source.cluster)] if source.cluster else _devices(source)
    again = ["placer", "optimize", source.target, *where]
    again += [] if source.is_graph else [*source.options, *source.update]
    longer = str(source.placement.with_name(f"{source.placement.stem}-longer.json"))
    again += [*source.search, "--start-from", placement, "--budget", "5m", "--out", longer]
    return [
        *found,
        _command("See the device of every module", ["placer", "show", placement]),
        _command("Search longer, beginning with this placement", again),
    ]


def _of_graph(source: Source) -> list[Command]:
    cluster = ["--cluster", str(source.cluster)] if source.cluster else []
    simulate = ["placer", "simulate", source.target, *cluster]
    simulate += ["--placement", str(source.placement)]
    return [
        _command("Simulate the step again, with its critical path", [*simulate, "--json"]),
        _command(
            "Look at every op and transfer in ui.perfetto.dev",
            [*simulate, "--timeline", str(source.placement.with_name("timeline.json"))],
        ),
    ]


def _of_model(source: Source) -> list[Command]:
    here = source.cluster is None and all(map(is_here, source.devices))

    def export(what: str, form: str, name: str) -> Command:
        trial = source.exports.get(form)
        renamed = as_gpus(source.devices)
        called = ", ".join(f"{name} is called {gpu}" for name, gpu in renamed.items())
        called = f" Here {called}." if called else ""
        if isinstance(trial, str):
            return Command(what, "", f"Not possible: {trial}.{called}")
        out = source.placement.with_name(name)
        words = ["placer", "export", str(source.placement), source.target, "--format", form]
        if renamed:
            words += ["--as", ",".join(f"{name}={gpu}" for name, gpu in renamed.items())]
        words += [*source.options, *source.update]
        words += ["--predict", *source.limits] if here else []
        summary = [] if trial is None else trial.summary
        told = " ".join(f"{sentence[:1].upper()}{sentence[1:]}." for sentence in summary)
        told += called if told else ""
        return _command(what, [*words, "--out", str(out)], told)

    found = [
        export(
            "Export for Hugging Face: from_pretrained(device_map=...)"
            if source.target.startswith(PREFIX)
            else "Export for Hugging Face: accelerate's dispatch_model(device_map=...)",
            "device-map",
            "device_map.json",
        ),
        export(
            "Export for torch.distributed.pipelining: split points", "pipeline", "pipeline.json"
        ),
        export("Export layers per stage, for vLLM and torchtitan", "layer-counts", "layers.json"),
    ]
    found.sort(key=lambda command: not command.command)
    if here:
        words = ["placer", "measure", source.target, "--placement", str(source.placement)]
        words += [*_devices(source), *source.options, *source.update]
        found.insert(0, _command("Measure it again, on this machine", words))
    if source.launch:
        found.insert(0, Command("Train with it, every op where it is placed", source.launch))
    return found


def _devices(source: Source) -> list[str]:
    return ["--devices", ",".join(source.devices), *source.limits]


def as_gpus(devices: Sequence[str]) -> dict[str, str]:
    """Return {device: GPU to write} for exports; empty if torch has all devices."""
    if all(map(is_of_torch, devices)):
        return {}
    return {name: f"cuda:{d}" for d, name in enumerate(devices)}


def _command(what: str, words: Sequence[str], told: str = "") -> Command:
    return Command(what, shlex.join(words), told)
