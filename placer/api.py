"""Public functions that search placements, compare devices and train policies.

See :mod:`placer.applying` for running and exporting a placement.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from envs.byte_size import parse_bytes
from envs.cluster import Cluster
from envs.discover import discover
from envs.op_costs import load_devices
from envs.placement import Placement
from envs.replicas.spec import Replication
from graphs.extract import AUTO, Step
from graphs.optimizer import Optimizer
from graphs.precision import FULL
from placer.given import given_from
from placer.outcome import Optimization
from placer.pipeline import Options, optimize_step
from placer.placers import DEFAULT, asks_policy, placer_named
from placer.placers.placer import Placer
from placer.policies import GENERALIST, Policy, load
from placer.replicate.plan import plan_step
from placer.report.progress import Progress, progress_for
from placer.search.budget import Budget
from placer.tradeoff import Tradeoff
from placer.weighing import weigh_step


def optimize(
    model: nn.Module,
    example_inputs: Any,
    *,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    training: bool = True,
    optimizer: str | Optimizer | None = None,
    dtype: str = FULL,
    devices: str | Path | Cluster = "auto",
    memory: Mapping[str, int | str] | None = None,
    budget: str = "20s",
    seed: int = 0,
    policy: str | None = GENERALIST,
    placer: str | Placer = DEFAULT,
    measure: bool = True,
    keep_together: Sequence[str] = (),
    pin: Mapping[str, str] | None = None,
    groups: int | None = None,
    fresh: bool = False,
    extractor: str = AUTO,
    overlap: bool = False,
    start_from: Placement | Mapping[str, int | str] | str | Path | None = None,
    replicas: int | str | Replication | None = None,
    progress: bool = True,
) -> Optimization:
    """Find the placement of a model's ops that minimizes the step time.

    Args:
        model: the model; it is not changed.
        example_inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments.
            The placement holds for steps with these shapes.
        loss: called with the model's output and the target, returns a scalar. The target is the
            last input; in a dict, the one entry that the model does not take. Without a loss, a
            model in training must return its own.
        training: True places forward and backward, False inference.
        optimizer: the parameter update in the step: ``"sgd"``, ``"momentum"``, ``"adam"``,
            ``"adamw"`` or a :class:`placer.Optimizer`; None leaves it out.
        dtype: ``"bf16"`` for a step under ``torch.autocast``, ``"fp32"`` for the model as it is.
        devices: ``"auto"``, names such as ``"cuda:0,cpu"`` or ``"core:0,core:1"``, a cluster file
            (``"cluster.toml"``) or a Cluster. With devices that are not on this machine, nothing is
            run and the simulated step time counts.
        memory: {device name: bytes, or a size such as ``"8GiB"``} that the model may use, by
            default the free memory. Not allowed with a cluster, which has its own limits.
        budget: search budget: wall time, ``"60s"``, or evaluations, ``"4000e"``. Extracting,
            measuring op costs and running the best candidates come on top.
        seed: seed of the search.
        policy: name of a trained policy, None to search without one; only for placers that use one.
        placer: search algorithm: a name that ``placer placers`` lists, or your own
            :class:`placer.placers.placer.Placer`. Single devices and classic heuristics are always
            among the candidates.
        measure: run the best candidates and choose by measured step time; False chooses by the
            simulated one.
        keep_together: op ids, module paths or globs such as ``"layers.3.*"``; all ops that match
            the same pattern share a device.
        pin: {op id, module path or glob: device name} for ops with a fixed device.
        groups: merge ops into at most this many groups and place the groups, for large graphs.
        fresh: measure devices and ops again and ignore the cache.
        extractor: how the graph is extracted: ``"export"``, ``"dispatch"`` or ``"modules"``;
            ``"auto"`` takes the first of these that succeeds.
        overlap: run candidates with copies that overlap compute: on CUDA devices a tensor is sent
            as soon as it is computed. Only for models that can be exported.
        start_from: warm start: a placement, a Hugging Face device map, or a file of either. It is
            an additional candidate and is always run.
        replicas: train this many replicas of a placement, each on its own devices; ``"auto"``
            chooses the number; see :class:`placer.Replication` for more options. The result is the
            placement of one replica; its ``replication`` holds all alternatives. Nothing is run.
        progress: show progress on stderr.

    Returns:
        The placement and the candidates it was compared with. After Ctrl-C, the best so far.

    Raises:
        ExtractionError: no extractor accepts the model, or the requested one does not, or the model
            is on the meta device.
        ValueError: a device, budget, policy, placer, optimizer, dtype or extractor does not exist,
            the placer lacks a requirement, uses no policy or rejects the graph, ``pin`` or
            ``keep_together`` matches nothing, or there are fewer devices than replicas.
        PlacementError: no placement that fits was found, or no candidate could be run.
        KeyboardInterrupt: stopped before there was any placement.
    """
    proposer = _proposer(policy, placer)
    options = Options(
        budget=Budget.parse(budget),
        seed=seed,
        policy=proposer,
        placer=placer_named(placer, proposer) if isinstance(placer, str) else placer,
        measure=measure,
        keep_together=tuple(keep_together),
        pins=dict(pin or {}),
        fresh=fresh,
        extractor=extractor,
        overlap=overlap,
        groups=groups,
        start_from=None if start_from is None else given_from(start_from),
    )
    wanted = None if replicas is None else Replication.of(replicas)
    cluster = _cluster(devices, memory or {})
    step = Step.of(
        model,
        example_inputs,
        loss,
        training=training,
        optimizer=Optimizer.of(optimizer),
        dtype=dtype,
    )

    def found(shown: Progress | None = None) -> Optimization:
        if wanted is None:
            return optimize_step(step, cluster, options, shown)
        return plan_step(step, cluster, options, wanted, shown).found

    if not progress:
        return found()
    with progress_for(sys.stderr.isatty()) as shown:
        return found(shown)


def weigh_devices(
    model: nn.Module,
    example_inputs: Any,
    devices: Cluster,
    *,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    training: bool = True,
    optimizer: str | Optimizer | None = None,
    dtype: str = FULL,
    budget: str = "20s",
    seed: int = 0,
    policy: str | None = GENERALIST,
    placer: str = DEFAULT,
    keep_together: Sequence[str] = (),
    pin: Mapping[str, str] | None = None,
    groups: int | None = None,
    fresh: bool = False,
    extractor: str = AUTO,
    progress: bool = True,
) -> Tradeoff:
    """Compare step time and price of every sub-cluster, to decide which devices to rent.

    Placements are simulated and not run. ``.fastest.found`` and ``.cheapest.found`` are what
    :func:`optimize` would return, ``.front`` is the Pareto front.

    Args:
        model: as for :func:`optimize`.
        example_inputs: as for :func:`optimize`.
        devices: the devices to choose from. Those without a ``price_per_hour`` are free; devices
            that are alike are interchangeable.
        loss: as for :func:`optimize`.
        training: as for :func:`optimize`.
        optimizer: as for :func:`optimize`.
        dtype: as for :func:`optimize`.
        budget: search budget of all searches together, ``"60s"`` or ``"4000e"``.
        seed: seed of the searches.
        policy: as for :func:`optimize`.
        placer: as for :func:`optimize`.
        keep_together: as for :func:`optimize`.
        pin: as for :func:`optimize`.
        groups: as for :func:`optimize`.
        fresh: as for :func:`optimize`.
        extractor: as for :func:`optimize`.
        progress: show progress on stderr.

    Raises:
        ExtractionError: as for :func:`optimize`.
        ValueError: as for :func:`optimize`; or no device has a price, or the devices form more
            than 64 different sub-clusters.
        PlacementError: no placement that fits was found.
        KeyboardInterrupt: stopped before there was any placement.
    """
    proposer = _proposer(policy, placer)
    options = Options(
        budget=Budget.parse(budget),
        seed=seed,
        policy=proposer,
        placer=placer_named(placer, proposer),
        measure=False,
        keep_together=tuple(keep_together),
        pins=dict(pin or {}),
        fresh=fresh,
        extractor=extractor,
        groups=groups,
    )
    step = Step.of(
        model,
        example_inputs,
        loss,
        training=training,
        optimizer=Optimizer.of(optimizer),
        dtype=dtype,
    )
    if not progress:
        return weigh_step(step, devices, options)
    with progress_for(sys.stderr.isatty()) as shown:
        return weigh_step(step, devices, options, shown)


def _proposer(policy: str | None, placer: str | Placer) -> Policy | None:
    if policy is None:
        return None
    if isinstance(placer, str) and asks_policy(placer):
        return load(policy)
    if policy != GENERALIST:
        name = placer if isinstance(placer, str) else type(placer).__name__
        raise ValueError(f"placer {name!r} asks no policy: leave policy={policy!r} out")
    return None


def _cluster(devices: str | Path | Cluster, memory: Mapping[str, int | str]) -> Cluster:
    if isinstance(devices, str) and not devices.endswith(".toml"):
        sizes = {k: parse_bytes(v) if isinstance(v, str) else v for k, v in memory.items()}
        return discover(devices, sizes)
    if memory:
        raise ValueError("a cluster says how much memory its devices have: leave memory out")
    return devices if isinstance(devices, Cluster) else load_devices(Path(devices))


def train(
    out: str | Path,
    config: str | Path | None = None,
    *,
    seconds: float | None = None,
    seeds: int | None = None,
    families: Sequence[str] | None = None,
    fresh: bool = False,
) -> Policy:
    """Train a policy with PPO on generated graphs and keep the best seed.

    An interrupted training resumes from ``out``.checkpoint when it is called again.

    Args:
        out: path of the policy, without suffix: ``out``.safetensors and its card ``out``.json are
            written; the last part is the policy's name.
        config: training configuration, see :mod:`placer.policies.training.config`; the arguments
            below override it.
        seconds: CPU time of each seed, instead of a number of decodes.
        seeds: number of seeds.
        families: families of :mod:`graphs.synthetic` to train on, or "reference"; by default all
            but chains.
        fresh: start from scratch even if there is a checkpoint.

    Raises:
        ValueError: a family does not exist, seconds or seeds is not above 0, the file is not a
            valid configuration, or the checkpoint belongs to another one.
        OSError: a file cannot be read or written.
    """
    from placer.policies.training import TrainingConfig, load_config
    from placer.policies.training import train as train_policy
    from placer.policies.training.config import Length

    chosen = TrainingConfig() if config is None else load_config(Path(config))
    if chosen.algorithm != "ppo":
        raise ValueError("what chooses devices op by op proposes no weights: use placer train")
    if seconds is not None:
        chosen = replace(chosen, length=Length(seconds=seconds))
    if families is not None:
        stages = tuple(replace(stage, families=tuple(families)) for stage in chosen.stage)
        chosen = replace(chosen, stage=stages)
    train_policy(Path(out), chosen if seeds is None else replace(chosen, seeds=seeds), fresh=fresh)
    return load(str(out))
