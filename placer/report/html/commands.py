"""What to do next with a placement: commands with the names of its files."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from envs.discover import is_here
from envs.torch_devices import is_core
from graphs.optimizer import NONE
from graphs.precision import FULL


@dataclass(frozen=True, slots=True)
class Command:
    """A command line, and what it is good for."""

    what: str
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What was placed, as it was given on the command line, and where the placement is."""

    placement: Path
    target: str
    devices: Sequence[str]  # by name
    cluster: Path | None = None
    inference: bool = False
    optimizer: str = NONE
    dtype: str = FULL
    extractor: str = "auto"
    search: Sequence[str] = ()  # what else was asked for, as words of the command line

    @property
    def is_graph(self) -> bool:
        """Whether it is a graph file, which has no model."""
        return self.target.endswith(".json")

    @property
    def options(self) -> list[str]:
        """How the model is extracted, as far as it is not the usual way."""
        return [
            *(["--inference"] if self.inference else []),
            *(["--dtype", self.dtype] if self.dtype != FULL else []),
            *(["--extractor", self.extractor] if self.extractor != "auto" else []),
        ]

    @property
    def update(self) -> list[str]:
        """What updates the parameters, where something does."""
        return ["--optimizer", self.optimizer] if self.optimizer != NONE else []


def next_commands(source: Source) -> list[Command]:
    """What a placement can be used for, most useful first."""
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
    def export(what: str, form: str, name: str) -> Command:
        out = source.placement.with_name(name)
        renamed = ["--as", _as_gpus(source.devices)] if any(map(is_core, source.devices)) else []
        words = ["placer", "export", str(source.placement), source.target, "--format", form]
        return _command(what, [*words, *renamed, *source.options, "--out", str(out)])

    found = [
        export(
            "Export for Hugging Face: from_pretrained(device_map=...)",
            "device-map",
            "device_map.json",
        ),
        export(
            "Export for torch.distributed.pipelining: split points", "pipeline", "pipeline.json"
        ),
        export("Export layers per stage, for vLLM and torchtitan", "layer-counts", "layers.json"),
    ]
    if source.cluster is None and all(map(is_here, source.devices)):
        words = ["placer", "measure", source.target, "--placement", str(source.placement)]
        words += [*_devices(source), *source.options, *source.update]
        found.insert(0, _command("Measure it again, on this machine", words))
    return found


def _devices(source: Source) -> list[str]:
    return ["--devices", ",".join(source.devices)]


def _as_gpus(devices: Sequence[str]) -> str:
    """Pinned cores stand for GPUs: no other runtime knows them."""
    return ",".join(f"{name}=cuda:{d}" for d, name in enumerate(devices))


def _command(what: str, words: Sequence[str]) -> Command:
    return Command(what, shlex.join(words))
