"""Runs of several ranks on a small target, started through the command line."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from envs.hardware.discover import present
from envs.placement import Placement
from graphs.extract import Workload, extract
from graphs.extract.placeable import call_graph
from graphs.graph import GraphArrays
from placer.cli.main import main
from placer.parallel.methods.registry import OPTIONS
from placer.sources.target import load_function, load_step
from tests.helpers.ranks import free_port, on_ranks

TARGET = """
import os, signal, torch
from torch import nn
from torch.nn import functional as F
from placer.parallel import Blocks

def build():
    model = nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout({dropout}), nn.Linear(16, 4)
    )
    return model, (torch.randn(4, 6), torch.randn(4, 4)), F.mse_loss

def batch(number):
    random = torch.Generator().manual_seed(number)
    x = torch.randn(4, 6, generator=random)
    return x, x[:, :4].sin()

def same(number):
    return batch(0)

x = torch.linspace(-2, 2, 60 * 6).view(60, 6)
blocks = Blocks((x, x[:, :4].sin()), batch=4, ranks=2, period=3)

def deadly(number):
    mark = __file__ + ".died"
    if number == {deadly} and not os.path.exists(mark):
        open(mark, "w").close()
        os.kill(os.getpid(), signal.{signal})
    return batch(number)
"""


def written(folder: Path, dropout: float = 0.0, deadly: int = -1, signal: str = "SIGKILL") -> str:
    text = TARGET.format(dropout=dropout, deadly=deadly, signal=signal)
    (folder / "target.py").write_text(text)
    return str(folder / "target.py")


def placed(target: str, path: Path, *names: str, shift: int = 0, training: bool = True) -> Path:
    """Save a placement of the target's ops on devices in turn, with groups on the first device."""
    extraction = extract(load_step(target, training=training))
    is_core = names[0].startswith("core")
    graph = GraphArrays.from_graph(extraction.graph if is_core else call_graph(extraction).graph)
    devices = (np.arange(len(graph)) + shift) % len(names)
    devices[graph.group >= 0] = 0
    Placement.of(graph, present(names), devices, np.zeros(len(graph))).save(path)
    return path


def prepared(folder: Path, device: str = "cpu", **options: Any) -> Callable[..., list[str]]:
    """Write a target and its placement on one device; return what makes the words of a run.

    ``data`` of a run is the name of a function in the target.
    """
    target = written(folder, **options)
    placement = placed(f"{target}:build", folder / "placement.json", device)

    def words(steps: int, data: str = "", **run: object) -> list[str]:
        if data:
            run["data"] = f"{target}:{data}"
        return arguments(target, placement, steps, **run)

    return words


def rank(arguments: Sequence[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["run", *arguments])
    return code, out.getvalue(), err.getvalue()


def run_in_turn(runs: Sequence[tuple[int, Sequence[str]]]) -> list[tuple[int, str, str]]:
    """Run each of (port of the store, arguments); a single rank needs no store and may fail."""
    results = []
    for port, words in runs:
        os.environ["MASTER_PORT"] = str(port)
        results.append(rank(words))
        if dist.is_initialized():  # it failed
            dist.destroy_process_group()
    return results


def all_ran(ranks: int, *runs: Sequence[str]) -> list[dict[str, Any]]:
    """Return the JSON that rank 0 prints in each of several runs, one after the other."""
    stored = [(free_port(), [*words, "--json"]) for words in runs]
    found: list[dict[str, Any]] = []
    for of_run in zip(*on_ranks(ranks, run_in_turn, stored, joined=False), strict=True):
        for code, _, err in of_run:
            assert code == 0, err
        assert all(not out for _, out, _ in of_run[1:])
        found.append(json.loads(of_run[0][1]))
    return found


def ran(ranks: int, *arguments: str) -> dict[str, Any]:
    """Return the JSON that rank 0 prints."""
    [found] = all_ran(ranks, arguments)
    return found


def arguments(target: str, placement: Path, steps: int, **options: object) -> list[str]:
    """Return the words of a run; options of the method of synchronization go into ``--sync``."""
    names = ("accumulate", *OPTIONS)
    sync = [str(options.pop("sync"))] if "sync" in options else []
    sync += [f"{name}={options.pop(name)}" for name in names if name in options]
    if sync:
        options["sync"] = ",".join(sync)
    given = [
        text
        for key, value in options.items()
        for text in (f"--{key.replace('_', '-')}", str(value))
    ]
    return [
        *(f"{target}:build", "--placement", str(placement), "--steps", str(steps)),
        *("--lr", "0.1", *given),
    ]


def errors_to_file(path: Path, words: list[str]) -> None:
    """Run and save the error output to a file, because the rank itself ends with the test."""
    code, _, err = rank(words)
    path.with_suffix(f".{os.environ['RANK']}").write_text(err)
    assert code == 1


def losses_in_one_process(
    target: str, steps: int, *, ranks: int = 2, passes: int = 1, cut: int = 1
) -> list[float]:
    """Return mean losses of rank 0's passes while training on the mean loss of all ranks.

    ``cut`` is the number of passes per batch.
    """
    torch.manual_seed(0)
    step = load_step(f"{target}:build", training=True)
    batch = cast("Callable[[int], tuple[Tensor, ...]]", load_function(f"{target}:batch"))
    sgd = torch.optim.SGD(step.model.parameters(), lr=0.1)
    losses = []
    for number in range(steps):
        every = ranks * passes
        shards = [
            [part.chunk(cut)[k] for part in batch((number * every) // cut + i)]
            for i in range(every // cut)
            for k in range(cut)
        ]
        of_passes = [loss_of(step, tuple(shard)) for shard in shards]
        losses.append(torch.stack(of_passes[:passes]).mean().item())
        sgd.zero_grad()
        torch.autograd.backward(torch.stack(of_passes).mean())
        sgd.step()
    return losses


def loss_of(step: Workload, inputs: Any) -> Tensor:
    given = Workload.of(step.model, inputs, step.loss)
    output = step.model(*given.model_inputs, **given.keywords)
    return output if step.loss is None else step.loss(output, given.inputs[-1])
