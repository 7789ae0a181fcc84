"""Public functions that find and evaluate placements, extract graphs and train policies.

See :mod:`placer.applying` for running and exporting a placement.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import networkx as nx

from envs.costs.roofline import cluster_of
from envs.runtime import start_ahead
from graphs.extract import AUTO
from placer.costed_step import costed_step
from placer.evaluation import (
    Evaluation,
    check_backend,
    evaluate_job,
    evaluate_result,
    evaluation_job,
)
from placer.job import Constraints, Job, SearchConfig, Source
from placer.pipeline import optimize_job
from placer.policies import Policy, load
from placer.progress import Progress, progress_for
from placer.replicate.plan import plan_job
from placer.result import Result
from placer.sources.target import Target

if TYPE_CHECKING:
    import torch
    from torch import nn

    from envs.backend import Backend
    from envs.hardware.cluster import Cluster
    from envs.placement import Placement
    from envs.replication import Replication
    from graphs.extract import Extraction, Workload

Devices = TypeVar("Devices", "str | Path | Cluster", "str | Path | Cluster | None")


def optimize(
    model: nn.Module | Workload | nx.DiGraph[str] | str | Path,
    example_inputs: Any = None,
    *,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    target: Any = None,
    training: bool = True,
    devices: str | Path | Cluster = "auto",
    budget: str | None = None,
    search: SearchConfig | None = None,
    constraints: Constraints | None = None,
    replicas: int | str | Replication | None = None,
    extractor: str = AUTO,
    progress: bool = True,
) -> Result:
    """Find the placement that minimizes the step time of a model or graph.

    ::

        placer.optimize(model, inputs, loss=loss, devices="cuda:0,cpu")
        placer.optimize(placer.Workload.of(model, inputs, loss, optimizer="adam"), cluster)
        placer.optimize("graph.json", "cluster.toml")

    Args:
        model: the model, which is not changed; a workload; a graph with known costs, a
            networkx.DiGraph with the attributes of graph.json, of which only ``cost_s`` is
            required; or a file of such a graph, or another target of ``placer optimize``.
        example_inputs: of a model: a tensor, a tuple of arguments, a dict of keywords, or
            ``(args, kwargs)``; the placement holds for steps with these shapes. Of anything else:
            the devices.
        loss: called with the model's output and the target, returns a scalar. Without a loss, a
            model in training must return its own.
        target: the target of the loss. It may also be among the inputs: the last argument, or the
            one keyword that the model does not take.
        training: True places forward and backward, False inference.
        devices: ``"auto"``, names such as ``"cuda:0,cpu"`` or ``"core:0,core:1"``, a cluster file
            (``"cluster.toml"``) or a Cluster. With devices that are not on this machine, nothing is
            run and the simulated step time counts.
        budget: search budget, ``"60s"`` or ``"4000e"``, by default ``"20s"``; short for
            ``search=placer.SearchConfig(budget=...)``.
        search: how placements are searched, see :class:`placer.SearchConfig`.
        constraints: pins, ops kept together and memory limits, see :class:`placer.Constraints`.
        replicas: train this many replicas of a placement, each on its own devices; ``"auto"``
            chooses the number; see :class:`placer.Replication` for more options. On several cores
            of this machine the best plans are run, and on its GPUs those of a target, elsewhere
            nothing is. The result is the placement of one replica, a
            :class:`placer.ReplicatedResult`, whose ``replication`` holds all alternatives.
        extractor: how the graph of a model is extracted: ``"export"``, ``"dispatch"`` or
            ``"modules"``; ``"auto"`` takes the first of these that succeeds.
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
    source, devices = _source(model, example_inputs, devices, loss, target, training=training)
    job = Job.of(
        source,
        devices,
        search=search,
        constraints=constraints,
        replicas=replicas,
        extractor=extractor,
    )
    with progress_for(sys.stderr if progress else None) as shown:
        return run_job(job, shown)


def run_job(job: Job, progress: Progress) -> Result:
    """Load what a job places, and place it."""
    if job.search.measure and not job.has_costs:
        start_ahead(job.cluster)
    if job.replicas is not None:
        return plan_job(job, progress).result
    return optimize_job(job.loaded(progress), progress)


def extract(
    model: nn.Module | Workload | str | Path,
    example_inputs: Any = None,
    *,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    target: Any = None,
    training: bool = True,
    devices: str | Path | Cluster | None = "auto",
    extractor: str = AUTO,
    progress: bool = True,
) -> nx.DiGraph[str]:
    """Return the graph of one step of a model, with the costs of its ops.

    ::

        graph = placer.extract(model, inputs, loss=loss, devices="core:0")
        graph = placer.extract(workload, "cluster.toml")
        result = placer.optimize(graph, "cluster.toml")

    Costs are measured on one device of each kind that is on this machine, and modelled by a
    roofline for devices elsewhere.

    Args:
        model: the model, a workload, or a target of ``placer extract``.
        example_inputs: as for :func:`optimize`.
        loss: as for :func:`optimize`.
        target: as for :func:`optimize`.
        training: as for :func:`optimize`.
        devices: as for :func:`optimize`; None extracts without costs.
        extractor: as for :func:`optimize`.
        progress: show progress on stderr.

    Returns:
        The graph, with the attributes of graph.json.

    Raises:
        ExtractionError: no extractor accepts the model, or it is on the meta device.
        ValueError: an argument is invalid, or a device is neither on this machine nor described.
        OSError: a file cannot be read.
    """
    source, devices = _source(model, example_inputs, devices, loss, target, training=training)
    with progress_for(sys.stderr if progress else None) as shown:
        return extract_source(source, devices, shown, extractor=extractor)[0]


def extract_source(
    source: Source,
    devices: str | Path | Cluster | None,
    progress: Progress,
    *,
    extractor: str = AUTO,
) -> tuple[nx.DiGraph[str], Extraction | None]:
    """Return the graph of a source, with costs if there are devices, and its extraction."""
    if isinstance(source, nx.DiGraph) or (isinstance(source, Target) and source.is_graph):
        raise ValueError("a graph is extracted already: give a model")
    if devices is not None:
        job = Job.of(source, devices, search=SearchConfig(policy=None), extractor=extractor)
        step = costed_step(job.loaded(progress), progress, simulates=False)
        return step.graph, step.extraction
    from graphs.extract import extract as extract_workload

    if isinstance(source, Target):
        progress.stage("Loading the model")
        source = source.load(weights=False)
    progress.stage("Extracting the graph")
    extraction = extract_workload(source, extractor)
    return extraction.graph, extraction


def evaluate(
    placement: Result | Placement | Mapping[str, int | str] | str | Path,
    model: nn.Module | Workload | nx.DiGraph[str] | str | Path | None = None,
    example_inputs: Any = None,
    *,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    target: Any = None,
    training: bool = True,
    devices: str | Path | Cluster | None = None,
    backend: str | Backend = "simulated",
    overlap: bool = False,
    extractor: str = AUTO,
    progress: bool = True,
) -> Evaluation:
    """Return the step time of an existing placement, simulated or measured.

    ::

        placer.evaluate("placement.json", "graph.json", "cluster.toml").step_s
        placer.evaluate("device_map.json", model, inputs, loss=loss, backend="measured")
        placer.evaluate(result, backend="measured")

    Args:
        placement: a result of :func:`optimize`, a placement, a Hugging Face device map, or a file
            of the latter two.
        model: what was placed, as for :func:`optimize`; may be left out with a result, and the
            inputs, loss, devices and extractor with it.
        example_inputs: as for :func:`optimize`.
        loss: as for :func:`optimize`.
        target: as for :func:`optimize`.
        training: as for :func:`optimize`.
        devices: as for :func:`optimize`, by default those of the placement.
        backend: ``"simulated"``, ``"measured"``, which runs the model on devices of this machine as
            :func:`optimize` runs candidates, or your own :class:`placer.Backend`.
        overlap: as for :class:`placer.SearchConfig`.
        extractor: as for :func:`optimize`.
        progress: show progress on stderr.

    Raises:
        ExtractionError: the model cannot be extracted, or its extraction cannot be run.
        ValueError: an argument is invalid, the placement belongs to another model, graph or
            cluster, or there is no model or device to measure.
        OSError: a file cannot be read.
        WorkerError: the workers do not start.
    """
    check_backend(backend)
    with progress_for(sys.stderr if progress else None) as shown:
        if model is None:
            if not isinstance(placement, Result):
                raise ValueError("a placement alone has no ops to evaluate: give model or graph")
            _check_alone(
                example_inputs=example_inputs,
                loss=loss,
                target=target,
                training=None if training or not placement.placement.is_training else False,
                devices=devices,
                extractor=None if extractor == AUTO else extractor,
            )
            return evaluate_result(placement, backend, shown, overlap=overlap)
        source, devices = _source(model, example_inputs, devices, loss, target, training=training)
        job = evaluation_job(
            placement.placement if isinstance(placement, Result) else placement,
            source,
            devices,
            overlap=overlap,
            extractor=extractor,
        )
        return evaluate_job(job, backend, shown)


def _check_alone(**others: Any) -> None:
    """Raise ValueError if an argument that goes with a model is given with a result alone."""
    if names := " and ".join(name for name, value in others.items() if value is not None):
        raise ValueError(f"the result has its own {names}: leave {names} out, or give model, too")


def _source(
    model: nn.Module | Workload | nx.DiGraph[str] | str | Path,
    second: Any,
    devices: Devices,
    loss: Callable[[Any, Any], torch.Tensor] | None,
    target: Any,
    *,
    training: bool,
) -> tuple[Source, Devices]:
    """Return what is placed, and the devices, from the arguments of a public function."""
    source: Source
    if isinstance(model, nx.DiGraph):
        source = model
    elif isinstance(model, str | Path):
        source = Target(name=str(model), training=training)
    else:
        from graphs.extract import Workload

        if not isinstance(model, Workload):
            return Workload.of(model, second, loss, target=target, training=training), devices
        model.check_complete(loss=loss, target=target, training=None if training else False)
        source = model
    if not (loss is None and target is None and (training or isinstance(source, Target))):
        raise ValueError("loss, target and training are for a model: a graph or target has none")
    if second is None:
        return source, devices
    if devices not in ("auto", None):
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
    measured = None if workload is None else (workload, cluster_of(devices))
    train_policy(Path(out), chosen, measured=measured, fresh=fresh)
    return load(str(out))
