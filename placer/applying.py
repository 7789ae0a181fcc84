"""The Python doors to what is done with a placement: run a model by it, hand it to others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from envs.cluster import Cluster
from envs.discover import present
from envs.executor.hooked_module import HookedModule
from envs.executor.lists import priority_order
from envs.executor.placed import PlacedModel
from envs.executor.placed_module import PlacedModule
from envs.host_names import is_core
from envs.overlap import check_overlap
from envs.placement import Placement
from envs.torch_devices import torch_device
from graphs.extract import AUTO, Extraction, Step, extract
from graphs.extract.fake import check_has_memory
from graphs.extract.module_map import ModuleMap, placeable
from graphs.graph import GraphArrays
from graphs.optimizer import Optimizer
from graphs.precision import FULL
from placer.export import format_named
from placer.export.format import Exported
from placer.export.placed_modules import PlacedModules
from placer.export.price import price_of
from placer.outcome import Optimization


def apply(
    model: nn.Module,
    placement: Optimization | Placement | str | Path,
    example_inputs: Any = None,
    *,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    training: bool = True,
    optimizer: str | Optimizer | None = None,
    dtype: str = FULL,
    extractor: str = AUTO,
    overlap: bool = False,
) -> Any:
    """Make a model run as placed.

    On pinned cores that is a :class:`envs.executor.placed.PlacedModel`, whose workers run
    ``placed.step(batch)``; close it, or use it as a context manager. On devices of torch it is a
    :class:`envs.executor.placed_module.PlacedModule`, to be called like the model itself (with the
    target, if there is a loss): ``placed(*inputs).backward()``. It has ``placed.step(batch)``, too,
    and between epochs ``placed.eval()(*inputs)`` is what the model returns in eval mode. Where the
    placement is of a graph of modules it is a :class:`envs.executor.hooked_module.HookedModule`,
    which runs the model's own code, on any data.

    Args:
        model: the model that was placed, or one with the same architecture.
        placement: what :func:`optimize` returned, or a placement (file) made before.
        example_inputs: as for :func:`optimize`; needed with a placement (file).
        loss: as for :func:`optimize`.
        training: as for :func:`optimize`.
        optimizer: lets the placed step update the parameters, too; the placement must have been
            searched with an optimizer of this kind. Without it any optimizer of torch can be used
            beside the step, also where the search had one.
        dtype: as for :func:`optimize`; needed with a placement (file).
        extractor: as for :func:`optimize`; with what it returned, its own counts.
        overlap: as for :func:`optimize`; give both the same, and what was timed is what runs.

    Raises:
        ExtractionError: the model cannot be extracted, or is on the meta device, or what was
            extracted holds for the example inputs only, or is a graph of modules, which pinned
            cores cannot run.
        ValueError: the placement is of another graph, its devices are not here, the example inputs
            are missing, or copies cannot overlap there.
        WorkerError: the workers do not come up.
    """
    if isinstance(placement, Optimization) and placement.extraction is not None:
        made_for = placement.extraction
        step = replace(made_for.step, model=model, optimizer=Optimizer.of(optimizer))
        same = made_for.step.model is model and made_for.step.optimizer == step.optimizer
        extraction = made_for if same else extract(step, made_for.extractor)
    elif example_inputs is None:
        raise ValueError(
            "a placement from a file knows its ops but not the model's inputs: give "
            "example_inputs (and loss) as for optimize"
        )
    else:
        step = Step.of(
            model,
            example_inputs,
            loss,
            training=training,
            optimizer=Optimizer.of(optimizer),
            dtype=dtype,
        )
        extraction = extract(step, extractor)
    return apply_extracted(extraction, _map_of(placement), overlap=overlap)


def apply_extracted(
    extraction: Extraction, placement: Placement, *, overlap: bool = False
) -> PlacedModel | PlacedModule | HookedModule:
    """The model of an extraction, running as a placement of its graph says.

    Raises:
        ExtractionError: as for :func:`apply`.
        ValueError: the placement is of another graph, its devices are not here, or copies cannot
            overlap there.
        WorkerError: the workers do not come up.
    """
    if placement.micro_batches != 1:
        raise ValueError(
            f"the placement splits a step into {placement.micro_batches} micro-batches, which "
            "cannot be run yet"
        )
    check_has_memory(extraction.step)
    cluster = present(placement.device_names)
    if not is_core(cluster.names[0]):
        return _placed_module(extraction, placement, cluster, overlap)
    if overlap:
        check_overlap(cluster.names, None)
    fitting = placement.aligned(GraphArrays.from_graph(extraction.graph), cluster)
    order = priority_order(extraction.program, fitting.priority)
    return PlacedModel(extraction, cluster, fitting.devices, order)


def _placed_module(
    extraction: Extraction, placement: Placement, cluster: Cluster, overlap: bool
) -> PlacedModule | HookedModule:
    calls = placeable(extraction)
    if overlap:
        check_overlap(cluster.names, calls)
    graph = GraphArrays.from_graph(calls.graph)
    fitting = placement.aligned(graph, cluster)
    devices = [torch_device(cluster.names[d]) for d in fitting.devices]
    if isinstance(calls, ModuleMap):
        return HookedModule(extraction, calls.devices_of_calls(devices))
    return PlacedModule(
        extraction,
        calls.devices_of_calls(devices),
        calls.launch_order(fitting.priority),
        overlap=overlap,
    )


def export_placement(
    model: nn.Module,
    placement: Optimization | Placement | str | Path,
    format: str,
    example_inputs: Any = None,
    *,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    training: bool = True,
    dtype: str = FULL,
    extractor: str = AUTO,
    renamed: Mapping[str, str] | None = None,
    main_device: str | None = None,
) -> Exported:
    """A placement in the terms of another runtime: ``.content``, and ``.remarks`` on what it costs.

    Of what :func:`optimize` returned the remarks tell the predicted step as exported, too.

    Args:
        model: the model that was placed.
        placement: what :func:`optimize` returned, or a placement (file) made before.
        format: ``"device-map"``, ``"pipeline"``, ``"layer-counts"`` or ``"override-regex"``; see
            :mod:`placer.export`.
        example_inputs: as for :func:`optimize`; needed with a placement (file).
        loss: as for :func:`optimize`.
        training: as for :func:`optimize`.
        dtype: as for :func:`optimize`.
        extractor: as for :func:`optimize`.
        renamed: {device of the placement: device to write}, as in ``{"core:0": "cuda:0"}``.
        main_device: where a model with a device map will be fed, by default the first accelerator.

    Raises:
        ExportError: the runtime cannot run such a placement; says which module is in the way.
        ExtractionError: the model cannot be extracted.
        ValueError: the placement is of another graph, there is no such format, or the example
            inputs are missing.
    """
    write = format_named(format)
    if isinstance(placement, Optimization) and placement.extraction is not None:
        extraction = placement.extraction
    elif example_inputs is None:
        raise ValueError(
            "a placement from a file does not hold the model's inputs: example_inputs are needed "
            "(and loss), as for optimize"
        )
    else:
        step = Step.of(model, example_inputs, loss, training=training, dtype=dtype)
        extraction = extract(step, extractor)
    found = _map_of(placement)
    price = None
    if isinstance(placement, Optimization) and found.graph == placement.problem.graph.hash:
        price = price_of(placement.problem, found, extraction, renamed or {})
    return write(
        PlacedModules.of(extraction, found, renamed=renamed, main_device=main_device, price=price)
    )


def _map_of(placement: Optimization | Placement | str | Path) -> Placement:
    found = placement.placement if isinstance(placement, Optimization) else placement
    return found if isinstance(found, Placement) else Placement.load(Path(found))
