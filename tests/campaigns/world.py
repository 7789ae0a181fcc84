"""Shared inputs of the jobs of a campaign, a warm cache, and the undisturbed result of each job."""

from __future__ import annotations

import csv
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np

from envs.costs.calibrate import core_calibration
from envs.hardware.cluster import Link
from envs.hardware.discover import present
from graphs.graph_file import save_graph
from graphs.synthetic.shapes import layered
from tests.helpers import runs
from tests.helpers.ranks import free_port
from tests.helpers.tiny_training import TWO_STAGES, toml

from .formats import MODEL, Format, formats
from .jobs import Command, Job

STEPS: Final = 24
RANKS: Final = 2
CORES: Final = tuple(f"core:{core}" for core in sorted(os.sched_getaffinity(0))[:2])


Commands: TypeAlias = Callable[[Path], list[Command]]
"""Returns the commands of a job for the folder that they write to."""


@dataclass(frozen=True, slots=True)
class Usual:
    """Result of an undisturbed job: the files that it writes and the seconds it takes."""

    files: Mapping[str, object]
    took_s: float


class World:
    """Shared data of all cases, read-only, in its own folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache = folder / "cache"
        os.environ["PLACER_CACHE"] = str(self.cache)
        self.formats: dict[str, Format] = {f.name: f for f in formats(folder / "specimens")}
        self.cluster = self.formats["cluster"].specimen
        self.graph = folder / "graph.json"
        save_graph(layered(np.random.default_rng(0), ops=60, width=6), self.graph)
        self.model = folder / "model.py"
        self.model.write_text(MODEL)
        self.training = folder / "two.toml"
        self.training.write_text(toml(replace(TWO_STAGES, checkpoint_rollouts=2)))
        (folder / "run").mkdir()
        self.target = runs.written(folder / "run", dropout=0.2)
        self.replica = runs.placed(f"{self.target}:build", folder / "run/placement.json", "cpu")
        self._calibrate()
        for _ in range(3):  # on a busy machine costs are known after three runs
            self.ended_well([Job(self.model_command(folder / "model.json", measure=False))])
        file, trained = "placement.json", ("p.safetensors", "p.json", "p.csv")
        self.usual = {
            "graph": self._usual("graph", lambda out: [self.graph_command(out / file)], file),
            "model": self._usual("model", lambda out: [self.model_command(out / file)]),
            "train": self._usual("train", lambda out: [self.train_command(out / "p")], *trained),
            "run": self._usual("run", self.rank_commands, "model.safetensors"),
        }

    def graph_command(self, out: Path, evaluations: int = 4_000) -> Command:
        """Return a command that optimizes a graph file, deterministically."""
        arguments = ["optimize", str(self.graph), "--cluster", str(self.cluster), "--out", str(out)]
        return Command(arguments=[*arguments, "--budget", f"{evaluations}e"], folder=out.parent)

    def model_command(self, out: Path, *, measure: bool = True) -> Command:
        """Return a command that optimizes a model on two cores and measures it there."""
        arguments = [
            "optimize",
            f"{self.model}:build",
            "--devices",
            ",".join(CORES),
            "--out",
            str(out),
        ]
        more = [] if measure else ["--no-measure"]
        return Command(arguments=[*arguments, "--budget", "0.3s", *more], folder=out.parent)

    def train_command(self, out: Path) -> Command:
        """Return a command that trains a policy, deterministically; ``out`` has no suffix."""
        arguments = ["train", "--config", str(self.training), "--out", str(out)]
        return Command(arguments=arguments, folder=out.parent)

    def run_arguments(self, folder: Path, steps: int = STEPS) -> list[str]:
        """Return the arguments of a run whose checkpoint and model go to this folder."""
        kept: dict[str, object] = {"checkpoint": folder / "run.json", "checkpoint_every": 3}
        options: dict[str, object] = {"data": f"{self.target}:batch", "timeout_s": 30, **kept}
        saved = {"save": folder / "model.safetensors"}
        arguments = runs.arguments(self.target, self.replica, steps, **options, **saved)
        return [*arguments, "--resume"]

    def rank_commands(self, folder: Path) -> list[Command]:
        """Return the commands of a data-parallel run, one for each rank."""
        common = {
            "GLOO_SOCKET_IFNAME": "lo",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(RANKS),
            "LOCAL_WORLD_SIZE": str(RANKS),
        }
        return [
            Command(
                arguments=self.run_arguments(folder),
                folder=folder,
                module="placer.run",
                environment={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(RANKS)
        ]

    def ended_well(self, jobs: Sequence[Job]) -> None:
        """Wait for jobs and check that they end without errors."""
        for ended in [job.finish() for job in jobs]:
            if ended.code or ended.hung or ended.orphans or ended.left:
                raise RuntimeError(f"a job fails without a fault: {ended}")

    def _usual(self, name: str, commands: Commands, *files: str) -> Usual:
        folder = self.folder / f"usual-{name}"
        folder.mkdir()
        began_s = time.monotonic()
        self.ended_well([Job(command) for command in commands(folder)])
        return Usual(contents(folder, files), time.monotonic() - began_s)

    def _calibrate(self) -> None:
        """Store made-up core speeds: measuring takes long and fails under disturbance."""
        here = present(CORES)
        devices = tuple(
            replace(device, peak_flop_per_s=1e11, bandwidth_bytes_per_s=1e10)
            for device in here.devices
        )
        link = Link(between=CORES, latency_s=1e-5, bandwidth_bytes_per_s=1e10)
        links = (link,) if len(CORES) > 1 else ()
        known = replace(here, devices=devices, links=links)
        replace(core_calibration(here), measure=lambda _: known).measured()


def contents(folder: Path, names: Sequence[str]) -> dict[str, object]:
    """Return the contents of files without times and process counts; None for a missing file."""
    return {name: _content(folder / name) for name in names}


def _content(path: Path) -> object:
    if not path.exists():
        return None
    if path.suffix == ".json":
        return _lasting(json.loads(path.read_bytes()))
    if path.suffix == ".csv":
        with path.open() as file:
            return [_lasting(row) for row in csv.DictReader(file)]
    return path.read_bytes()


def _lasting(value: object) -> object:
    if isinstance(value, dict):
        return {k: _lasting(v) for k, v in value.items() if k not in ("spent_s", "workers")}
    return [_lasting(item) for item in value] if isinstance(value, list) else value
