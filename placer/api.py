"""Public functions that search placements and train policies.

See :mod:`placer.applying` for running and exporting a placement.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import networkx as nx

from graphs.extract import AUTO
from placer.job import Constraints, Job, SearchConfig, Source
from placer.pipeline import optimize_job
from placer.policies import Policy, load
from placer.progress import Progress, Silent, progress_for
from placer.replicate.plan import plan_job
from placer.sources.target import Target

if TYPE_CHECKING:
    import torch
    from torch import nn

    from envs.hardware.cluster import Cluster
    from envs.replication import Replication
    from graphs.extract import Workload
    from placer.result import Result


def optimize(
    model: nn.Module | Workload | nx.DiGraph[str] | str | Path,
    example_inputs: Any = None,
    *,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    training: bool = True,
    devices: str | Path | Cluster = "auto",
    budget: str | None = None,
    search: SearchConfig | None = None,
    constraints: Constraints | None = None,
    replicas: int | str | Replication | None = None,
    extractor: str = AUTO,
    fresh: bool = False,
    progress: bool = True,
) -> Result:
    """Find the placement that minimizes the step time of a model or graph.

    ::

        placer.optimize(model, inputs, loss=loss, devices="cuda:0,cpu")
        placer.optimize(placer.Workload.of(model, inputs, loss, optimizer="adam"), cluster)
        placer.optimize("graph.json", "cluster.toml")

    Args:
        model: the model, which is not changed; a workload; a graph with known costs; or a file of
            such a graph, or another target of ``placer optimize``.
        example_inputs: of a model: a tensor, a tuple of positional arguments or a dict of keyword
            arguments; the placement holds for steps with these shapes. Of anything else: the
            devices.
        loss: called with the model's output and the target, returns a scalar. The target is the
            last input; in a dict, the one entry that the model does not take. Without a loss, a
            model in training must return its own.
        training: True places forward and backward, False inference.
        devices: ``"auto"``, names such as ``"cuda:0,cpu"`` or ``"core:0,core:1"``, a cluster file
            (``"cluster.toml"``) or a Cluster. With devices that are not on this machine, nothing is
            run and the simulated step time counts.
        budget: search budget, ``"60s"`` or ``"4000e"``, by default ``"20s"``; short for
            ``search=placer.SearchConfig(budget=...)``.
        search: how placements are searched, see :class:`placer.SearchConfig`.
        constraints: pins, ops kept together and memory limits, see :class:`placer.Constraints`.
        replicas: train this many replicas of a placement, each on its own devices; ``"auto"``
            chooses the number; see :class:`placer.Replication` for more options. Nothing is run.
            The result is the placement of one replica, a :class:`placer.ReplicatedResult`, whose
            ``replication`` holds all alternatives.
        extractor: how the graph of a model is extracted: ``"export"``, ``"dispatch"`` or
            ``"modules"``; ``"auto"`` takes the first of these that succeeds.
        fresh: measure devices and ops again and ignore the cache.
        progress: show progress on stderr.

    Returns:
        The placement and the candidates it was compared with. After Ctrl-C, the best so far.

    Raises:
        ExtractionError: no extractor accepts the model, or the requested one does not, or the model
            is on the meta device.
        ValueError: an argument is invalid, names something that does not exist, or contradicts
            another.
        OSError: a file cannot be read.
        PlacementError: no placement that fits was found, or no candidate could be run.
        KeyboardInterrupt: stopped before there was any placement.
    """
    if budget is not None:
        if search is not None:
            raise ValueError("a search configuration has its own budget: leave budget out")
        search = SearchConfig(budget=budget)
    source, devices = _source(model, example_inputs, devices, loss, training=training)
    job = Job.of(
        source,
        devices,
        search=search,
        constraints=constraints,
        replicas=replicas,
        extractor=extractor,
        fresh=fresh,
    )
    if not progress:
        return run_job(job)
    with progress_for(sys.stderr.isatty()) as shown:
        return run_job(job, shown)


def run_job(job: Job, progress: Progress | None = None) -> Result:
    """Load what a job places, and place it.

    Raises:
        TargetError: the target cannot be loaded.
        ExtractionError: as for :func:`optimize`.
        ValueError: as for :func:`optimize`.
        PlacementError: as for :func:`optimize`.
        KeyboardInterrupt: stopped before there was any placement.
    """
    hear = progress or Silent()
    job = job.loaded(hear)
    return optimize_job(job, hear) if job.replicas is None else plan_job(job, hear).found


def _source(
    model: nn.Module | Workload | nx.DiGraph[str] | str | Path,
    second: Any,
    devices: str | Path | Cluster,
    loss: Callable[[Any, Any], torch.Tensor] | None,
    *,
    training: bool,
) -> tuple[Source, str | Path | Cluster]:
    """Return what is placed, and the devices, from the arguments of :func:`optimize`."""
    source: Source
    if isinstance(model, nx.DiGraph):
        source = model
    elif isinstance(model, str | Path):
        source = Target(name=str(model), training=training)
    else:
        from graphs.extract import Workload

        if not isinstance(model, Workload):
            return Workload.of(model, second, loss, training=training), devices
        source = model
    if loss is not None or not (training or isinstance(source, Target)):
        raise ValueError("loss and training are for a model alone: a workload has its own")
    if second is None:
        return source, devices
    if devices != "auto":
        raise ValueError("the devices are given twice, by position and by name")
    return source, second


def train(
    out: str | Path,
    config: str | Path | None = None,
    *,
    backend: str | None = None,
    workload: Workload | None = None,
    devices: str | Path | Cluster = "auto",
    start: str | None = None,
    seconds: float | None = None,
    seeds: int | None = None,
    families: Sequence[str] | None = None,
    fresh: bool = False,
) -> Policy:
    """Train a policy with PPO and keep the best seed.

    An interrupted training resumes from ``out``.checkpoint when it is called again.

    Args:
        out: path of the policy, without suffix: ``out``.safetensors and its card ``out``.json are
            written; the last part is the policy's name.
        config: training configuration, see :mod:`placer.policies.training.config`; the arguments
            below override it.
        backend: ``"simulated"`` rewards simulated steps of generated graphs, ``"measured"`` those
            of ``workload``, run on ``devices``.
        workload: the model to train on, with backend "measured".
        devices: devices of this machine to run it on: names, a cluster file or a Cluster.
        start: policy to begin with, by name or path.
        seconds: length of each seed instead of a number of decodes: CPU time, or wall time with
            worker processes or measured steps.
        seeds: number of seeds.
        families: families of :mod:`graphs.synthetic.families` to train on, or "reference"; by
            default all but chains.
        fresh: start from scratch even if there is a checkpoint.

    Raises:
        ExtractionError: the model cannot be extracted or run.
        ValueError: a family, device or policy does not exist, seconds or seeds is not above 0, the
            file is not a valid configuration, the checkpoint belongs to another one, or there is a
            workload with simulated reward or none with measured reward.
        WorkerError: the devices cannot run the model.
        OSError: a file cannot be read or written.
    """
    from envs.placement_env import devices_of
    from placer.policies.training import Length, config_of
    from placer.policies.training import train as train_policy

    chosen = config_of(
        None if config is None else Path(config),
        length=None if seconds is None else Length(seconds=seconds),
        families=families,
        backend=backend,
        start=start,
        seeds=seeds,
    )
    if chosen.algorithm != "ppo":
        raise ValueError("a policy that chooses devices op by op cannot propose: use placer train")
    measured = None if workload is None else (workload, devices_of(devices))
    train_policy(Path(out), chosen, measured=measured, fresh=fresh)
    return load(str(out))
