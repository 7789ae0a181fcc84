"""Trials of replicas on cores or GPUs: ranks of several plans train in turns, in the same rounds.

A rank does what a rank of ``placer.run`` does in a step: it zeroes gradients, computes them,
reduces them and updates the parameters, on the example batch, with a learning rate of 0 and
without the warm-up steps of its method. Ranks of the unplaced model do so under torch's
DistributedDataParallel. The ranks of all plans are started first; in each round every plan trains
for a moment, while the ranks of the others sleep. Ranks on cores are forked and have the model; on
GPUs they are new processes, which load it from its target as those of ``placer.run`` do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from envs.executors.cores.pool import spread_seed
from envs.executors.process_settings import end_idle_threads
from envs.executors.unplaced import UnplacedModel
from envs.hardware.torch_devices import cuda_devices, synchronize
from envs.measured import FEWEST_ROUNDS
from envs.placement import Placement
from envs.runtime import tensor_device
from graphs.extract import Extraction, extract
from graphs.workload import step_copy
from placer.applying import apply_extracted
from placer.parallel.collectives import GLOO, Transport, seat_of
from placer.parallel.data import Batch
from placer.parallel.local_ranks import Handler, LocalRanks, RankError
from placer.parallel.methods.registry import method_named
from placer.parallel.methods.sync import MakeOptimizer
from placer.parallel.plan import OPTIMIZERS, run_plan
from placer.parallel.rank_devices import as_seen, on_own_group
from placer.parallel.run import occupy, optimizer_of, synced, use_first_gpu
from placer.parallel.training import Replica
from placer.sources.batches import with_part_of_inputs
from placer.sources.target import Target

TURN_S: Final = 0.15
TRIALS_S: Final = 20.0
MOST_ROUNDS: Final = 9
MOST_STEPS: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Replicas to run: a placement with their groups, and what makes the step of one of them.

    Every rank calls ``make``, which can be pickled unless the ``transport`` has forks. It updates
    with an ``optimizer`` of this kind beside the step, which has none.
    """

    make: Callable[[], Extraction]
    placement: Placement
    optimizer: str = OPTIMIZERS[0]
    transport: Transport = GLOO


@dataclass(slots=True, kw_only=True)
class Runs:
    """Steps of one trial, the median of each turn; or why it could not be run.

    ``pass_s`` is the part of a step until the gradients of rank 0 are computed, and under DDP also
    reduced.
    """

    step_s: list[float] = field(default_factory=list)
    pass_s: list[float] = field(default_factory=list)
    failure: str = ""


def copied(extraction: Extraction) -> Extraction:
    """Return an extraction with a copy of its step, for a rank that this process forks."""
    return replace(extraction, step=step_copy(extraction.step))


def loaded(target: Target, parts: int, extractor: str) -> Extraction:
    """Load and extract a target with one of ``parts`` equal parts of its batch, in a new process.

    Its step has no optimizer.
    """
    torch.manual_seed(0)  # the same model on all ranks
    step = with_part_of_inputs(replace(target, optimizer=None).load(), parts)
    if step is None:
        raise ValueError(f"the batch of {target.name} cannot be cut into {parts} equal parts")
    return extract(step, extractor)


def run_trials(
    trials: Sequence[Trial],
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    rounds: int | None = None,
    turn_s: float = TURN_S,
) -> list[Runs]:
    """Run all trials in turn, so often that they take about ``TRIALS_S`` if ``rounds`` is None.

    A trial that cannot be run is recorded as a failure, and the others continue. Ctrl-C ends the
    trials early: incomplete rounds do not count.
    """
    runs = [Runs() for _ in trials]
    try:
        with ExitStack() as started:
            takers = [_Taker(trial, own, started) for trial, own in zip(trials, runs, strict=True)]
            steps = [max(min(round(turn_s / taker.step_s), MOST_STEPS), 1) for taker in takers]
            turns_s = [taker.step_s * (n + 1) for taker, n in zip(takers, steps, strict=True)]
            if rounds is None:
                fitting = round(TRIALS_S / max(sum(turns_s), 1e-3))
                rounds = min(max(fitting, FEWEST_ROUNDS), MOST_ROUNDS)
            for done in range(rounds * len(takers)):
                number = (done % len(takers) + done // len(takers)) % len(takers)
                takers[number].take_turn(steps[number])
                progress(done + 1, rounds * len(takers))
    except KeyboardInterrupt:
        pass
    complete = min((len(each.step_s) for each in runs if not each.failure), default=0)
    for each in runs:
        del each.step_s[complete:], each.pass_s[complete:]
    return runs


class _Taker:
    """The ranks of one trial, which take turns."""

    def __init__(self, trial: Trial, runs: Runs, started: ExitStack) -> None:
        self.runs = runs
        self.step_s = TURN_S
        replicas, transport = trial.placement.replicas, trial.transport
        assert replicas is not None, "trials are of replicas"
        try:
            ranks = LocalRanks(
                [seat_of(*group) for group in replicas.groups],
                partial(_trainer, trial),
                backend=transport.backend,
                forked=transport.forked,
            )
            self._ranks = started.enter_context(ranks)
            [(self.step_s, _), *_] = self._ranks.ask(1)
        except (RankError, OSError, ValueError) as error:
            runs.failure = str(error)

    def take_turn(self, steps: int) -> None:
        if self.runs.failure:
            return
        try:
            [(step_s, pass_s), *_] = self._ranks.ask(steps)
        except RankError as error:
            self.runs.failure = str(error)
            return
        self.runs.step_s.append(step_s)
        self.runs.pass_s.append(pass_s)


class RankStep(NamedTuple):
    """The parts of a step of one rank."""

    zero_grad: Callable[[], Any]
    backward: Callable[[Sequence[Batch]], Any]
    update: Callable[[], Any]


def _trainer(trial: Trial) -> Handler:
    """Return what trains for some steps on this rank, and returns median seconds."""
    rank, extraction = dist.get_rank(), trial.make()
    plan = run_plan(trial.placement, ranks=dist.get_world_size())
    local = on_own_group(trial.placement, rank, 0, dist.get_world_size())
    local = replace(local, device_names=as_seen(local.device_names, len(cuda_devices())))
    devices = [tensor_device(name) for name in local.device_names]
    torch.manual_seed(spread_seed(0, rank))
    occupy(local)
    use_first_gpu(local)
    placed = apply_extracted(extraction, local)
    example: Batch = extraction.step.step_inputs, dict(extraction.step.keywords)

    def optimizer(own: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return optimizer_of(trial.optimizer, own, lr=0.0)

    if isinstance(placed, UnplacedModel):
        trained = under_ddp(placed, optimizer, example)
    else:
        replica = Replica(placed)
        config = plan.sync
        if "warmup_steps" in method_named(config.method).options:
            config = replace(config, warmup_steps=0)
        sync = synced(replica, local, optimizer, config)
        trained = RankStep(sync.zero_grad, replica.backward, sync.step)

    def train(steps: int) -> tuple[float, float]:
        whole_s, pass_s = [], []
        for _ in range(1 + steps):
            passes = [_copied(example) for _ in range(plan.sync.accumulate)]
            began = time.perf_counter()
            trained.zero_grad()
            trained.backward(passes)
            computed = time.perf_counter()
            trained.update()
            for device in devices:
                synchronize(device)
            whole_s.append(time.perf_counter() - began)
            pass_s.append(computed - began)
        end_idle_threads()
        return statistics.median(whole_s[1:]), statistics.median(pass_s[1:])

    train(1)
    return train


def under_ddp(model: UnplacedModel, make_optimizer: MakeOptimizer, example: Batch) -> RankStep:
    """Train the unplaced model on this rank as users do: by DDP with torch's defaults.

    Gradients are reduced in the last pass of a step. DDP looks for unused parameters only if the
    model leaves some without a gradient, since else it could not train. A single rank needs no DDP.
    """
    optimizer, alone = make_optimizer(model.parameters()), Replica(model)
    alone.backward([_copied(example)])
    unused = any(each.requires_grad and each.grad is None for each in model.parameters())
    optimizer.zero_grad()
    if dist.get_world_size() == 1:
        return RankStep(optimizer.zero_grad, alone.backward, optimizer.step)
    ddp = DistributedDataParallel(model, find_unused_parameters=unused)
    replica = Replica(ddp)

    def backward(passes: Sequence[Batch]) -> None:
        *before, last = passes
        with ddp.no_sync():
            replica.backward(before)
        replica.backward([last])

    return RankStep(optimizer.zero_grad, backward, optimizer.step)


def _copied(batch: Batch) -> Batch:
    """Return a batch in containers of its own, since a model may modify those that it gets."""
    copied: Batch = tree_map(lambda leaf: leaf, batch)
    return copied
