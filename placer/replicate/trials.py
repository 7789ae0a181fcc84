"""Splits that are run by ranks: which ones, what is learned from them, and which one wins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from envs.hardware.discover import available_memory_bytes, cores_in_use, is_core
from envs.measurement import Measurement, tied
from envs.replication import Replication
from envs.runtime import runtime_for
from placer.interrupt import Interrupt
from placer.parallel.methods.registry import method_named
from placer.parallel.plan import planned_method
from placer.progress import Progress, counter
from placer.replicate.fitting import Factors, FittedFactors
from placer.replicate.result import ReplicaPlan, Split

if TYPE_CHECKING:
    from graphs.extract import Extraction
    from placer.parallel.trials import Runs
    from placer.sources.target import Target

MOST_PLACED: Final = 3
"""Number of placed splits to run, besides the unplaced ones."""
MEMORY_SHARE: Final = 0.8
"""Share of the host's free memory that all ranks may take together, as all are started at once."""
RANK_BYTES: Final = 1 << 30
"""Memory of a new process besides its tensors, on its GPU and on the host: CUDA, libraries, NCCL.

Assumed, not measured.
"""
NO_ROOM: Final = "its ranks do not fit into memory beside those of the other plans"
HOST: Final = "cpu"


def can_be_tried(extraction: Extraction | None, replication: Replication) -> bool:
    """Return whether ``placer.run`` trains so, with steps that are all alike after a warm-up."""
    if extraction is None:
        return False
    return method_named(planned_method(replication)[0]).family == "reduction"


def with_trials(
    plan: ReplicaPlan,
    extractions: Mapping[int, Extraction | None],
    path: Path,
    progress: Progress,
    target: Target | None = None,
) -> ReplicaPlan:
    """Run the best splits of a plan, and return it with the fastest as its best.

    What is learned about the predictions is added to the factors in the file ``path``, unless other
    processes used the cores. ``extractions`` are those of a replica, by parts of the batch. Ranks
    load the ``target``, or without one they are forks of this process.
    """
    from placer.parallel.collectives import contended, transport_of
    from placer.parallel.trials import Runs, Trial, copied, loaded, run_trials

    def held_bytes(split: Split) -> Mapping[str, int]:
        extraction = extractions[plan.requested.parts(split.replicas)]
        return ranks_bytes(split, extraction, forked=target is None)

    chosen, no_room = worth_trying(plan, free_memory_bytes(plan), held_bytes)
    parts = [plan.requested.parts(split.replicas) for split in chosen]
    make: dict[int, Callable[[], Extraction]] = {}
    for each in set(parts):
        extraction = extractions[each]
        assert extraction is not None, "what is tried has a model"
        if target is not None:
            make[each] = partial(loaded, target, each, extraction.extractor)
        else:
            make[each] = partial(copied, _without_optimizer(extraction))
    trials, transport = [], transport_of(plan.problem.cluster.names)
    for split, number in zip(chosen, parts, strict=True):
        assert split.result is not None, "what is tried has a placement"
        trial = Trial(
            make=make[number],
            placement=replace(split.result.placement, replicas=plan.replication_of(split)),
            optimizer=plan.optimizer,
            transport=replace(transport, forked=target is None),
        )
        trials.append(trial)
    progress.stage("Running the best for real")
    cores = cores_in_use(plan.problem.cluster.names)
    with Interrupt():
        is_busy = contended(cores)
        runs = run_trials(trials, counter(progress))
        is_busy |= contended(cores)
    if not is_busy:
        factors = FittedFactors.load(path)
        for split, own in zip(chosen, runs, strict=True):
            factors = with_factors(factors, split, own)
        factors.save(path)
    runs += [Runs(failure=NO_ROOM) for _ in no_room]
    measured = {
        id(split): _measured(own) for split, own in zip([*chosen, *no_room], runs, strict=True)
    }
    splits = [replace(each, measurement=measured.get(id(each))) for each in plan.splits]
    return replace(plan, splits=ranked(splits), is_busy=is_busy)


def worth_trying(
    plan: ReplicaPlan,
    memory_bytes: Mapping[str, float],
    held_bytes: Callable[[Split], Mapping[str, int]],
) -> tuple[list[Split], list[Split]]:
    """Return the splits to run: the fastest placed ones by prediction, and the unplaced ones.

    Those that do not fit into the memory together are left out, the slowest placed ones first, and
    returned as well. ``held_bytes`` is what all ranks of a split take of each device's memory.
    """
    feasible = [split for split in plan.splits if split.step is not None]
    placed = sorted((s for s in feasible if not s.joined), key=lambda s: -s.samples_per_s)
    best = [split for split in placed if split is plan.best]
    others = [split for split in placed if split is not plan.best][: MOST_PLACED - 1]
    chosen, no_room, left_bytes = [], [], dict(memory_bytes)
    for split in [*best, *(s for s in feasible if s.joined), *others]:
        held = held_bytes(split)
        if any(size > left_bytes[name] for name, size in held.items()):
            no_room.append(split)
            continue
        chosen.append(split)
        for name, size in held.items():
            left_bytes[name] -= size
    return chosen, no_room


def free_memory_bytes(plan: ReplicaPlan) -> dict[str, float]:
    """Return the memory that ranks may take of the host and of each GPU of a plan."""
    from envs.hardware.torch_devices import free_bytes, release, torch_device

    free: dict[str, float] = {HOST: available_memory_bytes() * MEMORY_SHARE}
    for name in plan.problem.cluster.names:
        if name.startswith("cuda:"):
            device = torch_device(name)
            release(device)  # what this process keeps is not free for others
            free[name] = free_bytes(device) or 0
    return free


def ranks_bytes(split: Split, extraction: Extraction | None, *, forked: bool) -> dict[str, int]:
    """Return the predicted memory of all ranks of a split, of the host and of each GPU.

    New processes, which are not ``forked``, load the whole model on the host.
    """
    assert split.result is not None, "it is feasible"
    held = Counter({HOST: 0 if forked else split.replicas * (RANK_BYTES + model_bytes(extraction))})
    if all(map(is_core, split.groups[0])):
        held[HOST] += core_ranks_bytes(split, extraction)
        return dict(held)
    peaks_bytes = split.result.best.peak_memory_bytes
    for group in split.groups:
        for planned, name in zip(split.groups[0], group, strict=True):
            own_bytes = RANK_BYTES if name.startswith("cuda:") else 0
            held[name] += peaks_bytes.get(planned, 0) + own_bytes
    return dict(held)


def model_bytes(extraction: Extraction | None) -> int:
    """Return the memory of the parameters and buffers of a model; 0 without one."""
    state = {} if extraction is None else extraction.step.named_state()
    return sum({id(tensor): tensor.nbytes for tensor in state.values()}.values())


def core_ranks_bytes(split: Split, extraction: Extraction | None) -> int:
    """Return the predicted memory of all ranks on cores: of their workers, where they have some.

    The tensors of a step stand for what a rank without workers takes.
    """
    assert split.result is not None, "it is feasible"
    placement, peaks = split.result.placement, None
    if extraction is not None:
        runtime = runtime_for(extraction, split.result.problem.cluster)
        order = np.argsort(-placement.arrays()[1], kind="stable")
        peaks = runtime.peak_memory_bytes(placement, order.tolist())
    peaks = peaks or split.result.best.peak_memory_bytes
    return split.replicas * sum(peaks.values())


def _without_optimizer(extraction: Extraction) -> Extraction:
    """Return the step that ranks run: they update after it, when gradients are reduced."""
    if extraction.step.optimizer is None:
        return extraction
    from graphs.extract import extract

    return extract(replace(extraction.step, optimizer=None), extraction.extractor)


def with_factors(factors: FittedFactors, split: Split, runs: Runs) -> FittedFactors:
    """Return the factors, and those with which the prediction of a split is what was measured."""
    if runs.failure or not runs.step_s or split.step is None or split.result is None:
        return factors
    step_s, pass_s = float(np.median(runs.step_s)), float(np.median(runs.pass_s))
    if split.joined:  # DDP reduces within the pass: its parts are as they were predicted
        pass_s = step_s * split.step.alone_s / split.step.step_s
    fitted = Factors.fitted(step_s, pass_s, split.step.step_s, split.step.alone_s)
    return factors.with_trial(split.kind, split.result.problem.graph.hash, fitted)


def ranked(splits: Sequence[Split]) -> tuple[Split, ...]:
    """Return the splits, the best first: the simplest of the fastest that were requested and run.

    Where none was run these are the placed ones in their order, those that failed last, and
    unplaced ones that were not run are left out.
    """
    kept = [split for split in splits if not split.joined or split.measurement is not None]
    ran = [split for split in kept if split.was_run and not split.is_baseline]
    if not ran:
        return tuple(sorted(kept, key=_order_without_runs))
    fastest = min(ran, key=lambda split: per_sample(split).median_s)
    level = [split for split in ran if tied(per_sample(split), per_sample(fastest))]
    best = min(
        [fastest, *level],
        key=lambda split: (not split.joined, split.replicas, split.devices_each),
    )
    return best, *(split for split in kept if split is not best)


def _order_without_runs(split: Split) -> tuple[bool, ...]:
    runs = split.measurement
    has_failed = runs is not None and runs.failure not in ("", NO_ROOM)
    return split.joined > 0, split.is_baseline, split.step is None, has_failed


def per_sample(split: Split) -> Measurement:
    """Return the measured seconds per sample."""
    assert split.measurement is not None, "it was run"
    seconds = split.measurement.wall_s / split.samples
    return replace(split.measurement, wall_s=seconds, cpu_clock_s=seconds)


def _measured(runs: Runs) -> Measurement | None:
    step_s = np.array(runs.step_s)
    measurement = Measurement(wall_s=step_s, cpu_clock_s=step_s, failure=runs.failure)
    return measurement if measurement.counts else None
