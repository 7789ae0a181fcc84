"""Overhead of running a model as a placed module, in multiples of the plain model.

    python -m benchmarks.placed_module [--out FILE]

All calls are on one device: the GPU if there is one, else the CPU. The step is forward and
backward, of the plain and the placed model in turn; with ``--out`` all these pairs go to a JSON
file. Placing again is timed with the weights already in place, after a random placement on the
devices.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import Record, quartiles
from envs.executor.placed_module import PlacedModule
from graphs.extract import Extraction, Step, extract
from placer.target import load_step

FOLDER = Path(__file__).parents[1] / "examples"
TARGETS = (
    f"{FOLDER}/inception.py:build",
    f"{FOLDER}/resnet.py:build",
    "hf:bert?batch=1&sequence=64&num_hidden_layers=4",
    "hf:gpt2?batch=1&sequence=64&n_layer=4",
)
ROUNDS = 9


def main(targets: Sequence[str] = TARGETS, out: Path | None = None) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record = Record(out, math.inf)
    print(f"{'training step on ' + device.type:40}{'calls':>7}{'placed':>10}{'placing again':>16}")
    for target in targets:
        name = target.rpartition("/")[2]
        record.part(name, partial(line, name, target, device))


def line(name: str, target: str, device: torch.device, found: dict[str, Any]) -> None:
    extraction = extract(load_step(target, training=True))
    calls = [call.key for call in extraction.forward.placed_calls]
    plain = moved(copy.deepcopy(extraction.step), device)
    on_one = dict.fromkeys(calls, device)
    placed = PlacedModule(extraction, on_one, keep_copies=True)
    inputs, keywords = plain.inputs, plain.keywords
    eager_s: list[float] = []
    placed_s: list[float] = []
    for _ in range(ROUNDS):  # in turn, so that other load affects both
        eager_s.append(seconds(lambda: backward(loss_of(plain))))
        placed_s.append(seconds(lambda: backward(placed(*inputs, **keywords))))
    ratio = statistics.median(p / e for p, e in zip(placed_s, eager_s, strict=True))
    found.update(device=str(device), calls=len(calls), placed_over_eager=ratio)
    found.update(eager=quartiles(eager_s), placed=quartiles(placed_s))
    apart = anywhere(extraction, device)
    placed.place(apart)
    again_s = [seconds(lambda: placed.place(apart)) for _ in range(ROUNDS)]
    found["placing_again"] = quartiles(again_s)
    again_ms = statistics.median(again_s) * 1e3
    print(f"{name[:39]:40}{len(calls):7}{ratio:9.2f}x{again_ms:13.0f} ms", flush=True)


def anywhere(extraction: Extraction, device: torch.device) -> dict[str, torch.device]:
    """Return a random placement on the CPU and the device that keeps colocated calls together."""
    randomly = random.Random(0)
    cpu = torch.device("cpu")
    placement = {
        call.key: randomly.choice((cpu, device)) for call in extraction.forward.placed_calls
    }
    for keys in extraction.forward.together():
        placement |= dict.fromkeys(keys, device)
    return placement


def moved(step: Step, device: torch.device) -> Step:
    inputs = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), step.inputs)
    keywords = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in step.keywords.items()
    }
    return Step(step.model.to(device), inputs, keywords, step.loss, step.training)


def loss_of(step: Step) -> torch.Tensor:
    output = step.model(*step.model_inputs, **step.keywords)
    if step.loss is not None:
        return step.loss(output, step.inputs[-1])
    loss: torch.Tensor = getattr(output, "loss", output)
    return loss


def backward(loss: torch.Tensor) -> None:
    torch.autograd.backward(loss)


def seconds(run: Callable[[], object]) -> float:
    synchronize()
    start_s = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start_s


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the results go (JSON)")
    main(out=parser.parse_args().out)
