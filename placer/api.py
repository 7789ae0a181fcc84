"""The Python doors to searches: placements, devices to rent, policies; see also applying.py."""

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
from graphs.extract import AUTO, Step
from graphs.optimizer import Optimizer
from graphs.precision import FULL
from placer.given import given_from
from placer.outcome import Optimization
from placer.pipeline import Options, optimize_step
from placer.placers import DEFAULT, asks_policy, placer_named
from placer.placers.placer import Placer
from placer.policies import GENERALIST, Policy, load
from placer.replica_plan import Replication
from placer.replication import plan_step
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
    """Find which op of a model should run on which device so that a step takes the least time.

    Args:
        model: the model; it is not changed.
        example_inputs: a tensor, a tuple of arguments or a dict of keywords. Shapes count: the
            placement is for steps of these shapes.
        loss: called with the model's output and the target, gives a scalar. The target is the last
            of the inputs, in a dict the one entry that the model does not take. Without a loss
            a training step needs a model that returns its own.
        training: a step is forward and backward; with False the model's inference.
        optimizer: what updates the parameters in the step: ``"sgd"``, ``"momentum"``, ``"adam"``,
            ``"adamw"`` or a :class:`placer.Optimizer`; None leaves it out.
        dtype: ``"bf16"`` for a step under ``torch.autocast``, ``"fp32"`` for the model as it is.
        devices: ``"auto"``, names such as ``"cuda:0,cpu"`` or ``"core:0,core:1"``, a cluster file
            (``"cluster.toml"``), or a Cluster. With devices that are not on this machine it ends
            with the simulator's answer.
        memory: {device name: bytes, or a size such as ``"8GiB"``} that the model may use there, by
            default what is free. A cluster says so itself.
        budget: of the search: ``"60s"``, or evaluations, ``"4000e"``. Extraction, measuring op
            costs and running the best candidates come on top.
        seed: of everything random in the search.
        policy: name of a trained policy, None to search without one; for placers that ask one.
        placer: who searches, by its name; ``placer placers`` lists them. Or one of your own, a
            :class:`placer.placers.placer.Placer`. Whatever it finds, trivial placements and classic
            heuristics are compared with it.
        measure: run the best candidates for real; without it the simulator's answer counts.
        keep_together: op ids, module paths or globs such as ``"layers.3.*"``; all ops that match
            one of them share a device.
        pin: {op id, module path or glob: device name}; what matches runs there.
        groups: merge ops into at most so many groups and place those, for large graphs.
        fresh: measure devices and ops anew, whatever the cache knows of them.
        extractor: how the graph is extracted: ``"export"``, ``"dispatch"`` or ``"modules"``;
            ``"auto"`` is the first of these that takes the model.
        overlap: run candidates with copies that overlap with compute: on CUDA devices a tensor is
            sent as soon as it is made. Of models that can be exported.
        start_from: what you have already: a placement, a Hugging Face device map, or a file of
            either. It is one more candidate, and always run.
        replicas: train so many replicas of a placement, each on devices of its own, or ``"auto"``,
            as many as are best; a :class:`placer.Replication` says more. What is returned is the
            placement of one; its ``replication`` has all that it was chosen from. Nothing is run.
        progress: show on stderr what is going on.

    Returns:
        The placement and what it was compared with. Stopped by Ctrl-C it is the best so far.

    Raises:
        ExtractionError: no extractor takes the model, or not the one asked for, or the model is on
            the meta device; says why.
        ValueError: a device, budget, policy, placer, optimizer, dtype or extractor does not exist,
            the placer lacks something, asks no policy or refuses the graph, ``pin`` or
            ``keep_together`` matches nothing, or there are fewer devices than replicas.
        PlacementError: no placement was found that fits, or no candidate could be run.
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
    """Find which devices are worth renting: the step against the price, on every sub-cluster.

    Plans are simulated and not run. ``.fastest.found`` and ``.cheapest.found`` are what
    :func:`optimize` would return, ``.front`` are the offers that no other beats.

    Args:
        model: as for :func:`optimize`.
        example_inputs: as for :func:`optimize`.
        devices: the devices to choose from. Those without a ``price_per_hour`` count as free;
            those that are alike are exchangeable.
        loss: as for :func:`optimize`.
        training: as for :func:`optimize`.
        optimizer: as for :func:`optimize`.
        dtype: as for :func:`optimize`.
        budget: of all searches together, ``"60s"`` or ``"4000e"``.
        seed: of everything random in the searches.
        policy: as for :func:`optimize`.
        placer: as for :func:`optimize`.
        keep_together: as for :func:`optimize`.
        pin: as for :func:`optimize`.
        groups: as for :func:`optimize`.
        fresh: as for :func:`optimize`.
        extractor: as for :func:`optimize`.
        progress: show on stderr what is going on.

    Raises:
        ExtractionError: as for :func:`optimize`.
        ValueError: as for :func:`optimize`; or no device has a price, or the devices make more
            than 64 different sub-clusters.
        PlacementError: no placement was found that fits.
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
    """The policy that the placer asks; the default is left aside where it asks none."""
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
    """Train a policy by PPO on generated graphs and keep the best seed.

    Stopped or killed it goes on from ``out``.checkpoint when it is called again.

    Args:
        out: where ``out``.safetensors and its card ``out``.json go; the last part is the name.
        config: a file that says what to train on and how, see
            :mod:`placer.policies.training.config`; what follows goes before what it says.
        seconds: of processor time for each seed, instead of so many decodes.
        seeds: how many.
        families: of :mod:`graphs.synthetic` to train on, or "reference"; by default all but chains.
        fresh: begin anew, whatever checkpoint there is.

    Raises:
        ValueError: a family does not exist, seconds or seeds is not above 0, the file is no such
            configuration, or the checkpoint is of another.
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
