"""Placements, predictions and losses equal the golden files.

`python -m tests.placer.test_golden` rewrites them.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from pathlib import Path
from typing import Any, Final

import networkx as nx
import numpy as np
import pytest
import torch

from envs.executors.torch.placed_module import PlacedModule
from graphs.extract import extract
from graphs.graph_file import save_graph
from graphs.synthetic.families import FAMILIES, draw
from placer.cli.main import main
from tests.fake_cuda import fake_cuda
from tests.helpers.folders import ROOT
from tests.helpers.in_turn import in_turn
from tests.helpers.placed_steps import random_devices
from tests.helpers.tiny_models import TRAINING

FOLDER: Final = ROOT / "tests" / "golden"
OBJECTIVES: Final = {
    "latency": (),
    "throughput": ("--objective", "throughput", "--micro-batches", "4"),
    "max-load": ("--objective", "max-load"),
    "replicas": ("--data-parallel", "auto"),
}
CASES: Final = {
    **{f"{family}, equal": (family, "equal") for family in FAMILIES},
    **{f"{family}, unequal": (family, "unequal") for family in list(FAMILIES)[4:]},
}
MODELS: Final = ("conv_net", "tied_weights", "attention", "weighted_loss", "frozen_norm")
PLACED: Final = ("devices", "priority")
"""Placement data that is stored as one string, in the order of ops."""
UNLIKE: Final = ("command", "measuring_s", "out", "search_s", "total_s")
"""Result keys that differ from run to run."""
VERSION: Final = "0.1.0"
"""The version that wrote the files, which is not compared."""
PROSE: Final = ("cost_source", "remarks", "verdict", "why")


def graph_of(family: str, cluster: str) -> nx.DiGraph[str]:
    """Draw a graph of about 80 ops; on unequal devices each op has its own cost per device kind."""
    rng = np.random.default_rng(list(FAMILIES).index(family))
    graph = draw(rng, family, max_ops=80)
    if cluster == "unequal":
        for node in graph:
            cost_s = graph.nodes[node]["cost_s"]["*"]
            old, cpu = rng.uniform(1.2, 3.0), rng.uniform(1.0, 12.0)
            graph.nodes[node]["cost_s"] = {
                kind: round(cost_s * factor, 9)
                for kind, factor in (("gpu", 1.0), ("old gpu", old), ("cpu", cpu))
            }
    return graph


def answers(case: str) -> dict[str, Any]:
    """Optimize for every objective and simulate the results."""
    family, cluster = CASES[case]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        graph, placement = Path(name) / "graph.json", Path(name) / "placement.json"
        save_graph(graph_of(family, cluster), graph)
        target = (str(graph), "--cluster", str(FOLDER / f"{cluster}.toml"))
        for objective, options in OBJECTIVES.items():
            searched = ("--budget", "400e", "--seed", "0", "--out", str(placement), "--json")
            result = _answer("optimize", *target, *searched, *options)
            written = json.loads(placement.read_text())
            written["made_by"]["version"] = VERSION
            found[objective] = {
                "result": _numbers(result),
                "placement": {k: v for k, v in written.items() if k not in PLACED},
                **{key: " ".join(map(str, written[key].values())) for key in PLACED},
                "simulated": _numbers(
                    _answer("simulate", *target, *("--placement", str(placement)), "--json")
                ),
            }
    return found


def loss_curve(model: str) -> list[float]:
    """Train a model by SGD, with its ops randomly placed on two torch devices."""
    torch.manual_seed(0)
    extraction = extract(TRAINING[model]())
    step, devices = extraction.step, [torch.device("cpu"), torch.device("cuda", 0)]
    placed = PlacedModule(extraction, random_devices(extraction, devices, seed=1))
    optimizer = torch.optim.SGD(placed.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = placed(*step.inputs, **step.keywords)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def text(found: dict[str, Any]) -> str:
    """Format results as JSON with a line per part, so that differences are readable."""
    lines = [
        f'"{objective} {part}": {json.dumps(value)}'
        for objective, parts in found.items()
        for part, value in parts.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def golden(case: str) -> Path:
    """Return the file of a case, or of all loss curves for "losses"."""
    return FOLDER / f"{case.replace(', ', '-')}.json"


def _numbers(result: dict[str, Any]) -> dict[str, Any]:
    """Keep the step time of each candidate; drop sentences and the critical path."""
    kept = {k: v for k, v in result.items() if k not in (*UNLIKE, *PROSE, "critical_path")}
    if "candidates" in kept:
        kept["candidates"] = {c["name"]: c["predicted_step_s"] for c in kept["candidates"]}
    return kept


def _answer(*arguments: str) -> dict[str, Any]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()) as errors:
        code = main(arguments)
    assert output.getvalue(), errors.getvalue()
    return {"exit_code": code, **json.loads(output.getvalue())}


@pytest.mark.slow_repeats
@pytest.mark.parametrize("case", in_turn(CASES, slow=[case for case in CASES if "unequal" in case]))
def test_every_objective_is_optimized_and_simulated_as_before(case: str) -> None:
    assert text(answers(case)).splitlines() == golden(case).read_text().splitlines()


@pytest.mark.slow_repeats
@pytest.mark.usefixtures("second_device")
@pytest.mark.parametrize("model", MODELS)
def test_a_placed_model_has_the_same_losses_as_before(model: str) -> None:
    curves = json.loads(golden("losses").read_text())
    assert loss_curve(model) == pytest.approx(curves[model], rel=1e-4)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in CASES:
        golden(case).write_text(text(answers(case)))
    with fake_cuda():
        curves = {model: loss_curve(model) for model in MODELS}
    golden("losses").write_text(json.dumps(curves, indent=1) + "\n")
