"""Overhead of running a model as placed, in multiples of the plain model.

    python -m benchmarks overhead

A training step, forward and backward, of the plain and the placed model in turn, so that other load
affects both. ``module`` runs all calls on the CPU in this process, as placements on torch devices
do; ``workers`` runs all ops in the worker process of one core, against the plain model with one
thread on that core; ``answer`` runs what ``placer.optimize`` chooses for one core, which may be the
unplaced model; ``step`` compares ``placed.step`` in a training loop on two cores, with torch's
own optimizer, with what its workers alone take for the same placement.
"""

from __future__ import annotations

import copy
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

import placer
from benchmarks.record import Effort, Part, quartiles
from benchmarks.tables import Table, spread
from envs.executors.cores.arena import load_example
from envs.executors.cores.instruction_lists import device_lists
from envs.executors.cores.placed_model import PlacedModel
from envs.executors.cores.pool import WorkerPool
from envs.executors.process_settings import end_idle_threads
from envs.executors.torch.placed_module import PlacedModule
from envs.executors.unplaced import UnplacedModel
from envs.hardware.discover import discover
from graphs.extract import Workload, extract
from graphs.models.rnnlm import next_token_loss
from graphs.workload import LossModule, training_loss
from placer.sources.target import load_step

MODELS: Final = Path(__file__).parents[2] / "graphs" / "models"
IN_PROCESS: Final = {
    "Inception-V3": f"{MODELS}/inception.py:build",
    "ResNet": f"{MODELS}/resnet.py:build",
    "BERT": "hf:bert?batch=1&sequence=64&num_hidden_layers=4",
    "GPT-2": "hf:gpt2?batch=1&sequence=64&n_layer=4",
}
BY_WORKERS: Final = {
    "two towers": f"{MODELS}/two_towers.py:build",
    "Inception-V3": f"{MODELS}/inception.py:build",
    "LSTM": f"{__file__}:lstm",
    "LSTM, both directions": f"{__file__}:long_lstm",
    "GRU": f"{__file__}:gru",
    "GRU, both directions": f"{__file__}:long_gru",
}
ANSWERED: Final = {
    "LSTM": f"{__file__}:lstm",
    "small LSTM": f"{__file__}:small_lstm",
    "GRU": f"{__file__}:gru",
    "small GRU": f"{__file__}:small_gru",
}
IN_LOOP: Final = {
    "two towers": f"{MODELS}/two_towers.py:build",
    "translation with attention": f"{MODELS}/nmt.py:build",
    "NASNet": f"{MODELS}/nasnet.py:build",
}
QUICK_PARTS: Final = ("module, ResNet", "workers, two towers", "step, two towers")
Training: TypeAlias = tuple[nn.Module, tuple[Tensor, Tensor], Callable[..., Tensor]]
BAR: Final = 1.05
"""Largest ratio for calls in this process."""
TURN_S: Final = 0.05
"""Seconds of steps in a turn, at least two steps, the first of which does not count."""
NO_MEASURING: Final = placer.SearchConfig(budget="20e", measure=False)
MEASURING: Final = placer.SearchConfig(budget="2s")
BLOCKS: Final = 8
"""Blocks of ops that the two cores of ``step`` take in turn, so that tensors move between them."""


def parts(effort: Effort) -> dict[str, Part]:
    """Return a part for each model and way of running it."""
    pairs = effort.pick(quick=3, normal=9, full=9)
    found: dict[str, Part] = {}
    for name, target in IN_PROCESS.items():
        found[f"module, {name}"] = partial(in_process, name, target, pairs)
    for name, target in BY_WORKERS.items():
        found[f"workers, {name}"] = partial(
            on_one_core, f"{name}, by a worker", target, NO_MEASURING, pairs
        )
    for name, target in ANSWERED.items():
        found[f"answer, {name}"] = partial(
            on_one_core, f"{name}, the answer", target, MEASURING, 5 * pairs
        )
    for name, target in IN_LOOP.items():
        found[f"step, {name}"] = partial(in_loop, name, target, pairs)
    if effort.level == "quick":
        return {name: found[name] for name in QUICK_PARTS}
    return found


def in_process(name: str, target: str, pairs: int, found: dict[str, Any]) -> Table:
    """Compare the plain model with a placed module that has all calls on the CPU."""
    extraction = extract(load_step(target, training=True))
    step = extraction.step
    plain = LossModule(copy.deepcopy(step))
    calls = [call.key for call in extraction.forward.placed_calls]
    placed = PlacedModule(extraction, dict.fromkeys(calls, torch.device("cpu")))
    found["calls"] = len(calls)

    def run(module: nn.Module) -> float:
        return timed(module, lambda: module(*step.inputs, **step.keywords).backward())

    return compared(f"{name}, in process", lambda: run(plain), lambda: run(placed), pairs, found)


def on_one_core(
    name: str, target: str, search: placer.SearchConfig, pairs: int, found: dict[str, Any]
) -> Table:
    """Compare the plain model on one core with what a search chooses there.

    Without measuring it places all ops; if it measures, it may keep the unplaced model.
    """
    core = min(os.sched_getaffinity(0))
    step = load_step(target, training=True)
    result = placer.optimize(
        step.model,
        step.inputs,
        loss=step.loss,
        devices=f"core:{core}",
        search=search,
        progress=False,
    )
    with (
        placer.apply(step.model, result.placement, step.inputs, loss=step.loss) as placed,
        one_thread_on(core),
    ):
        found["kept"] = isinstance(placed, UnplacedModel)
        return compared(
            name,
            lambda: timed(step.model, partial(eager_step, step)),
            lambda: timed(step.model, partial(placed.step, *step.inputs)),
            pairs,
            found,
        )


def lstm() -> Training:
    """Return a language model of two LSTM layers for ``load_step``."""
    return _recurrent(nn.LSTM)


def gru() -> Training:
    """Return a language model of two GRU layers for ``load_step``."""
    return _recurrent(nn.GRU)


def small_lstm() -> Training:
    """Return an LSTM of width 32 on four texts for ``load_step``."""
    return _recurrent(nn.LSTM, width=32, texts=4)


def small_gru() -> Training:
    """Return a GRU of width 32 on four texts for ``load_step``."""
    return _recurrent(nn.GRU, width=32, texts=4)


def long_lstm() -> Training:
    """Return a tagger of two LSTM layers in both directions for ``load_step``."""
    return _recurrent(nn.LSTM, width=128, length=40, bidirectional=True)


def long_gru() -> Training:
    """Return a tagger of two GRU layers in both directions for ``load_step``."""
    return _recurrent(nn.GRU, width=128, length=40, bidirectional=True)


def _recurrent(
    kind: type[nn.LSTM | nn.GRU],
    *,
    width: int = 64,
    length: int = 20,
    texts: int = 32,
    bidirectional: bool = False,
) -> Training:
    """Return the model, (tokens, next tokens) of texts of ``length`` words, and the loss."""
    torch.manual_seed(0)
    layers = kind(width, width, 2, batch_first=True, bidirectional=bidirectional)
    directions = 2 if bidirectional else 1
    model = RecurrentModel(nn.Embedding(1000, width), layers, nn.Linear(directions * width, 1000))
    text = torch.randint(1000, (texts, length + 1))
    return model, (text[:, :-1].contiguous(), text[:, 1:].contiguous()), next_token_loss


class RecurrentModel(nn.Sequential):
    """An embedding, recurrent layers of torch, and a projection."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (B, T) to logits (B, T, vocabulary)."""
        embed, layers, project = self
        logits: Tensor = project(layers(embed(tokens))[0])
        return logits


def in_loop(name: str, target: str, pairs: int, found: dict[str, Any]) -> Table:
    """Compare ``placed.step`` between updates with the workers' part of the same placement."""
    extraction = extract(load_step(target, training=True))
    step, program = extraction.step, extraction.program
    cores = sorted(os.sched_getaffinity(0))[:2]
    cluster = discover(",".join(f"core:{core}" for core in cores))
    groups = [data["colocate"] or op for op, data in extraction.graph.nodes(data=True)]
    blocks = {
        group: op * BLOCKS // len(groups) % len(cluster)
        for op, group in reversed(list(enumerate(groups)))
    }
    devices, order = [blocks[group] for group in groups], range(program.op_count)
    optimizer = torch.optim.SGD(step.model.parameters(), lr=1e-6)

    with (
        PlacedModel(extraction, cluster, devices, order) as placed,
        WorkerPool(program, cluster.devices) as pool,
    ):
        load_example(pool.arena, step)
        number = pool.load(device_lists(program, devices, order, len(cluster)))

        def measured() -> float:
            end_idle_threads()
            return pool.run(number).wall_s

        def trained() -> float:
            seconds = timed(step.model, partial(placed.step, *step.inputs))
            optimizer.step()
            return seconds

        return compared(f"{name}, placed.step / workers", measured, trained, pairs, found)


def compared(
    name: str,
    plain: Callable[[], float],
    placed: Callable[[], float],
    pairs: int,
    found: dict[str, Any],
) -> Table:
    """Run both in turn and return their ratios; the first pair only warms up.

    Of each turn the median counts, without the first step, which finds the caches as the other
    left them.
    """

    def of_turn(step: Callable[[], float]) -> float:
        seconds = [step(), step()]
        while sum(seconds) < TURN_S:
            seconds.append(step())
        return statistics.median(seconds[1:])

    seconds = [(of_turn(plain), of_turn(placed)) for _ in range(pairs + 1)][1:]
    ratios = [placed_s / plain_s for plain_s, placed_s in seconds]
    found["plain"], found["placed"] = (quartiles(own) for own in zip(*seconds, strict=True))
    found["placed_over_plain"] = statistics.median(ratios)
    return Table(
        "Overhead",
        "a training step with everything on one device, in multiples of the plain model (calls in "
        f"process: at most {BAR}), or placed.step in multiples of its workers' part",
        ("model", "placed / plain"),
        ((name, spread(ratios, ".2f")),),
    )


def timed(module: nn.Module, work: Callable[[], object]) -> float:
    """Return the seconds of a step; gradients are cleared before it, untimed."""
    module.zero_grad(set_to_none=True)
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def eager_step(step: Workload) -> None:
    """Run forward and backward of the plain model."""
    torch.autograd.backward(training_loss(step.model, step.loss, step.inputs, step.keywords))


@contextmanager
def one_thread_on(core: int) -> Iterator[None]:
    """Run this process with one thread on one core."""
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        torch.set_num_threads(threads)
