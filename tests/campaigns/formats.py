"""File formats that placer reads: valid specimens, loaders, and the commands that use them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from envs.costs.cache import FILE, Conditions, CostCache, Session
from envs.hardware.cluster import cluster_to_toml, load_cluster
from envs.placement import Placement
from graphs.extract import Extraction, Workload, extract
from graphs.graph import GraphArrays
from graphs.graph_file import load_graph, save_graph
from graphs.synthetic.shapes import layered
from placer.cli.main import main
from placer.exports.existing_map import DeviceMap
from placer.parallel.training import STATE_FORMAT
from placer.policies import load as load_policy
from placer.policies.evaluation import Suite, load_suites
from placer.policies.training import TrainingConfig, load_config
from placer.policies.training.config import Length, Stage, Testing
from placer.policies.training.run import read_checkpoint, train
from placer.sources import exported, huggingface, onnx
from placer.sources.target import load_step
from placer.state_file import read_state, write_state
from placer.warm_start import load_warm_start, placement_of
from tests.helpers.clusters import CLUSTER
from tests.helpers.tiny_models import export_onnx
from tests.helpers.tiny_training import TINY, TWO_STAGES, inline_toml, toml

from .mutation import Syntax

MODEL: Final = """
import torch
from torch import nn
from torch.nn import functional as F

class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Linear(64, 64)
        self.right = nn.Linear(64, 64)
        self.head = nn.Linear(128, 4)

    def forward(self, x):
        return self.head(torch.cat([self.left(x).relu(), self.right(x).tanh()], 1))

def build():
    torch.manual_seed(0)
    return Towers(), (torch.randn(32, 64), torch.arange(32) % 4), F.cross_entropy
"""
HERE: Final = Conditions(kind="core", hardware="this", torch="2")
SUITES: Final[Mapping[str, Any]] = {
    "format": "placer-suites/1",
    "suite": [
        {"name": "tiny", "families": ["layered"], "graphs": 2, "max_ops": 80},
        {"name": "other", "about": "two devices", "graphs": 1, "clusters": {"devices": [2]}},
    ],
}
SEARCH: Final = "--budget 5e --quiet --out {it.parent}/out.json"
GRAPH: Final = "{at.graph} --cluster {at.cluster}"
OF_PLACEMENT: Final = (
    "show {it}",
    "show {it} --json",
    f"evaluate {GRAPH} --placement {{it}}",
    f"show {{it}} --html {{it.parent}}/page.html --target {GRAPH}",
    f"optimize {GRAPH} --start-from {{it}} {SEARCH}",
)
OF_POLICY: Final = (
    f"optimize {GRAPH} --policy {{it}} {SEARCH}",
    "train --policy {it} --suites {at.suites} --evaluate tiny --seeds 1",
)
OF_SUITES: Final = "train --policy generalist --no-card --seeds 1 --suites={it} --evaluate={name}"
OF_CLUSTER: Final = (
    f"optimize {{at.graph}} --cluster {{it}} {SEARCH}",
    "simulate {at.graph} --cluster {it} --placement {at.placement}",
)
OF_CHECKPOINT: Final = "train --config {at.interrupted_config} --out {it.parent}/{it.stem}"


@dataclass(frozen=True, slots=True)
class Format:
    """A file format with a valid specimen; its folder contains the files that must lie beside it.

    ``load`` may raise only ValueError or OSError for an invalid file.
    """

    name: str
    syntax: Syntax
    specimen: Path
    load: Callable[[Path], Any]
    uses: Sequence[str] = ()  # commands of placer
    share: int = 10  # weight among the formats of a campaign
    at: _Specimens | None = None
    words: Callable[[Any], Mapping[str, str] | None] = lambda loaded: {}
    """Return the words that commands take from a loaded file; None if they would take too long."""

    def commands(self, path: Path, loaded: object) -> list[list[str]]:
        """Return command lines that use a file of this format."""
        if (words := self.words(loaded)) is None:
            return []
        places = {"at": self.at, "it": path, **words}
        return [[word.format_map(places) for word in use.split()] for use in self.uses]


def formats(folder: Path) -> tuple[Format, ...]:
    """Return all formats, with specimens in subfolders of ``folder``.

    The specimens of policies and checkpoints are trained, which takes some seconds.
    """
    at = _Specimens(folder)
    of_graph = f"optimize {{it}} --cluster {{at.cluster}} --report {{it.parent}}/page.html {SEARCH}"
    of_program = f"optimize {{it}} --cluster {{at.rated}} --inference {SEARCH}"
    of_training = "train --config {it} --out {it.parent}/policy"

    def cached(path: Path) -> None:
        CostCache(path).known(HERE, ["a", "b"])
        CostCache(path).holdings()

    def checkpoint(path: Path) -> object:
        return read_checkpoint(path, load_config(at.interrupted_config).essence())

    def device_map(path: Path) -> object:
        start = load_warm_start(path)
        extraction, graph = _extraction()
        placement = placement_of(start, extraction, graph, load_cluster(at.cluster))
        return start.conflict(extraction) if isinstance(start, DeviceMap) else placement

    def policy(path: Path) -> object:
        return load_policy(str(path))

    def onnx_file(path: Path) -> object:
        return onnx.load(str(path))

    program = exported.load
    return (
        Format("graph", "json", at.graph, load_graph, [of_graph], 20, at),
        Format("cluster", "toml", at.cluster, load_cluster, OF_CLUSTER, 20, at),
        Format("placement", "json", at.placement, Placement.load, OF_PLACEMENT, 15, at),
        Format("plan of replicas", "json", at.plan, load_warm_start, OF_PLACEMENT, 8, at),
        Format("device map", "json", at.device_map, device_map),
        Format("training", "toml", at.training, load_config, [of_training], 15, words=_if_short),
        Format("suites", "toml", at.suites, load_suites, [OF_SUITES], words=_small_suite),
        Format("policy card", "json", at.card, policy, OF_POLICY, at=at),
        Format("policy", "safetensors", at.policy, policy, OF_POLICY, at=at),
        Format("checkpoint", "safetensors", at.checkpoint, checkpoint, [OF_CHECKPOINT], 4, at),
        Format(
            "state of a rank",
            "safetensors",
            at.state,
            lambda path: read_state(path, STATE_FORMAT),
            share=6,
        ),
        Format(
            "cost cache",
            "bytes",
            at.cost_cache,
            cached,
            ["machine --cache", "machine --clear-cache"],
            6,
        ),
        Format("ONNX", "bytes", at.onnx, onnx_file, share=4),
        Format("exported program", "zip", at.exported, program, [of_program], 15, at),
        Format("transformers", "json", at.transformers, _transformers, share=2),
    )


def _small_suite(suites: Mapping[str, Suite]) -> Mapping[str, str] | None:
    small = [name for name, s in suites.items() if s.graphs <= 2 and s.max_ops <= 80]
    return {"name": small[0]} if small else None


def _if_short(config: TrainingConfig) -> Mapping[str, str] | None:
    """Return no words, or None unless the training is certain to end within a second or two."""
    ppo = config.ppo
    sets: list[Stage | Testing] = [*config.stage, config.test]
    is_short = (
        (config.length.decodes or 10**9) <= 64
        and config.seeds * ppo.epochs <= 4
        and ppo.environments * ppo.steps <= 64
        and sum((*ppo.layers, *ppo.critic_layers)) <= 512
        and all(one.graphs <= 4 and one.max_ops <= 100 for one in sets)
        and all(max(one.clusters.devices) <= 16 for one in sets)
        and config.workers == 0
    )
    return {} if is_short else None


class Sized(torch.nn.Module):
    """A module whose output shapes depend on the batch size, with a keyword and a buffer."""

    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.linear(x).reshape(x.shape[0] * 2, 2)
        return rows.sum() * torch.ones(x.shape[0] // 2 + 1, 4) * scale + self.shift


@cache
def _extraction() -> tuple[Extraction, GraphArrays]:
    step = Workload.of(
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), (torch.ones(2, 4),)
    )
    extraction = extract(replace(step, training=False))
    return extraction, GraphArrays.from_graph(extraction.graph)


def _transformers(path: Path) -> object:
    request = huggingface.Request(str(path.parent), batch=1, sequence=4)
    return huggingface.load(request, training=False, weights=False)


class _Specimens:
    """Valid files, made by the project's own writers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.graph = self._at("graph/graph.json")
        save_graph(layered(np.random.default_rng(0), ops=12, width=3), self.graph)
        self.cluster = self._at("cluster/cluster.toml")
        self.cluster.write_text(CLUSTER.format(memory=1 << 34))
        self.cluster.write_text(cluster_to_toml(load_cluster(self.cluster)))
        self.rated = self._at("rated/cluster.toml")
        speeds = "peak_flop_per_s = 1e12\nbandwidth_bytes_per_s = 1e11"
        self.rated.write_text(CLUSTER.format(memory=f"{1 << 34}\n{speeds}"))
        self.placement = self._at("placement/placement.json")
        self._optimize(self.placement)
        self.plan = self._at("plan/placement.json")
        self._optimize(self.plan, "--data-parallel", "2")
        self.device_map = self._at("map/map.json")
        self.device_map.write_text(json.dumps({"0": "a", "1": "b"}))
        self.training = self._at("training/tiny.toml")
        self.training.write_text(toml(replace(TINY, test=replace(TINY.test, graphs=1))))
        self.suites = self._at("suites/suites.toml")
        self.suites.write_text(inline_toml(SUITES))
        self._train()
        self.state = self._at("state/run.json.6.0")
        tensors = {"weight": torch.ones(3, 2), "step": 6, "groups": [{"lr": 0.1, "betas": (0.9,)}]}
        write_state(self.state, {"model": tensors, "random": [torch.get_rng_state()]}, STATE_FORMAT)
        self.cost_cache = self._at(f"costs/{FILE}")
        for spread in (0.05, 0.3):
            cost_s = {"a": 1e-3, "b": 2e-3}
            session = Session(cost_s=cost_s, runs=5, spread=spread, measured="2026-01-31")
            CostCache(self.cost_cache).store(HERE, session)
        self._export()

    def _at(self, name: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True)
        return path

    def _optimize(self, out: Path, *more: str) -> None:
        target = [str(self.graph), "--cluster", str(self.cluster), "--budget", "20e", "--quiet"]
        assert main(["optimize", *target, "--out", str(out), *more]) == 0

    def _train(self) -> None:
        self.card = self._at("card/policy.json")
        train(self.card.with_suffix(""), TINY)
        self.policy = self._at("policy/policy.safetensors")
        two = replace(TWO_STAGES, seeds=2, length=Length(decodes=64), checkpoint_rollouts=1)
        train(self.policy.with_suffix(""), two)
        self.interrupted_config = self._at("interrupted/tiny.toml")
        self.interrupted_config.write_text(toml(TINY))
        self.checkpoint = self._at("checkpoint/policy.checkpoint")

        def stop(_share: float, _text: str) -> None:
            if self.checkpoint.exists():
                raise InterruptedError

        try:
            train(self.checkpoint.with_suffix(""), TINY, progress=stop)
        except InterruptedError:
            return
        raise AssertionError("the training was over before it was stopped")

    def _export(self) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        self.exported = self._at("exported/model.pt2")
        shapes = {"x": {0: torch.export.Dim("batch", min=2, max=64)}, "scale": None}
        inputs, keywords = (torch.ones(6, 4),), {"scale": torch.ones(4)}
        program = torch.export.export(Sized(), inputs, keywords, dynamic_shapes=shapes)
        torch.export.save(program, self.exported)
        self.onnx = export_onnx(model, (torch.ones(2, 4),), self._at("onnx/model.onnx"))
        self.transformers = self._at("transformers/config.json")
        sizes = "n_embd=8&n_layer=1&n_head=2&vocab_size=31&batch=1&sequence=4"
        step = load_step(f"hf:gpt2?{sizes}", training=False, weights=False)
        self.transformers.write_text(json.dumps(step.model.config.to_dict()))  # type: ignore[operator, union-attr]  # of transformers
