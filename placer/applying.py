"""Public functions that run or export a placement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn

from envs.executors.checks import matched_leaves
from envs.executors.cores.placed_model import PlacedModel
from envs.executors.device_workers.placed_step import PlacedStep
from envs.executors.hooks.hooked_module import HookedModule
from envs.executors.torch.placed_module import PlacedModule
from envs.executors.unplaced import UnplacedModel
from envs.hardware.cluster import Cluster
from envs.hardware.discover import present
from envs.hardware.host import Host
from envs.placement import Placement
from envs.runtime import extraction_for, runtime_for
from graphs.arguments import TARGET
from graphs.extract import AUTO, Extraction, Workload, extract
from graphs.extract.eager import check_has_memory
from graphs.inputs import PLAIN
from graphs.optimizer import Optimizer
from graphs.precision import FULL
from placer.exports import format_named
from placer.exports.format import Exported, export_extracted
from placer.result import Result


def apply(
    model: nn.Module | Workload,
    placement: Result | Placement | str | Path,
    example_inputs: Any = None,
    *,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    target: Any = None,
    training: bool | None = None,
    optimizer: str | Optimizer | None = None,
    dtype: str = FULL,
    extractor: str = AUTO,
    overlap: bool = False,
) -> Any:
    """Return the model, ready to run as placed.

    On pinned cores the result is a :class:`envs.executors.cores.placed_model.PlacedModel`: its
    workers run ``placed.step(batch)``; close it, or use it as a context manager. On torch devices
    it is a :class:`envs.executors.torch.placed_module.PlacedModule`, called like the model itself
    (with the target, if there is a loss): ``placed(*inputs).backward()``. It has
    ``placed.step(batch)`` as well, and ``placed.eval()(*inputs)`` returns what the model returns in
    eval mode. For a placement of a module graph it is a
    :class:`envs.executors.hooks.hooked_module.HookedModule`, which runs the model's own code on any
    inputs; on pinned cores a :class:`envs.executors.modules_on_cores.ModulesOnCores`, which does so
    without workers. For a result on a cluster with a ``[[host]]`` for each device it is a
    :class:`envs.executors.device_workers.placed_step.PlacedStep`, whose processes, one per device,
    run ``placed.step(batch)``; a placement file does not name hosts, so it runs in this process.
    Where the result is to leave the model unplaced, it is a
    :class:`envs.executors.unplaced.UnplacedModel`, which has both interfaces. Like a graph of
    modules it is the model's own code and takes all inputs that the model takes; all other placed
    models take inputs with the shapes and dtypes of the example only.

    Args:
        model: the model that was placed, or one with the same architecture; or a workload, which
            has its own inputs, loss, optimizer and dtype.
        placement: the result of :func:`optimize`, or a placement (file).
        example_inputs: as for :func:`optimize`; required with a model and a placement (file). A
            result of it has its own inputs, loss, dtype and extractor: leave them out.
        loss: as for :func:`optimize`.
        target: as for :func:`optimize`.
        training: as for :func:`optimize`; may be left out, since the placement tells it.
        optimizer: makes the placed step update the parameters; the placement must have been
            searched with an optimizer of this kind. Without it, any torch optimizer can be used
            beside the step, even if the search included one.
        dtype: "bf16" for a step under ``torch.autocast``.
        extractor: as for :func:`optimize`.
        overlap: as for :class:`placer.SearchConfig`; use the same value to run what was measured.

    Raises:
        ExtractionError: the model cannot be extracted, is on the meta device, or is placed on
            pinned cores although its extraction holds for the example inputs only; unplaced it runs
            there, too.
        ValueError: the placement belongs to another graph, or is of inference instead of training
            or the other way round, its devices are not on this machine, the example inputs are
            missing, an argument is not what the result has, or copies cannot overlap on these
            devices.
        WorkerError: the workers do not start.
    """
    own = _placement_of(placement)
    _check_mode(own, training, loss)
    _check_workload(own, model, example_inputs, loss, target, training, optimizer, dtype)
    check_can_run(own)
    hosts: tuple[Host, ...] = ()
    if isinstance(placement, Result) and not own.unplaced:
        hosts = placement.problem.cluster.hosts
    if isinstance(placement, Result) and placement.extraction is not None:
        made_for = placement.extraction
        _check_own(made_for, model, example_inputs, loss, target, dtype, extractor)
        if isinstance(model, Workload):
            optimizer = model.optimizer
            model = model.model
        extraction = _extraction_of(made_for, model, Optimizer.of(optimizer))
    else:
        extraction = _extracted(
            model, example_inputs, loss, target, optimizer, dtype, extractor, own
        )
    return _applied(extraction, own, hosts, overlap=overlap)


def check_can_run(placement: Placement) -> Cluster:
    """Return the devices of a placement; raise ValueError if this machine cannot run it.

    Whether it belongs to a model is known once that is extracted.
    """
    if placement.micro_batches != 1:
        raise ValueError(
            f"the placement splits a step into {placement.micro_batches} micro-batches, which "
            "cannot be run yet"
        )
    return present(placement.device_names)


def apply_extracted(
    extraction: Extraction, placement: Placement, *, overlap: bool = False
) -> PlacedModel | PlacedModule | HookedModule | UnplacedModel:
    """Return the model of an extraction, ready to run as placed; torch devices in this process."""
    placed = _applied(extraction, placement, (), overlap=overlap)
    assert not isinstance(placed, PlacedStep)
    return placed


def _applied(
    extraction: Extraction, placement: Placement, hosts: Sequence[Host], *, overlap: bool
) -> PlacedModel | PlacedModule | PlacedStep | HookedModule | UnplacedModel:
    """Return the model of an extraction, whose ops the threads of some hosts issue."""
    cluster = check_can_run(placement)
    check_has_memory(extraction.step)
    of_devices = (host.among({*cluster.names}) for host in hosts)
    cluster = replace(cluster, hosts=tuple(filter(None, of_devices)))
    return runtime_for(extraction, cluster, overlap=overlap).apply(placement)


def export(
    placement: Result | Placement | str | Path,
    format: str,
    model: nn.Module | Workload | None = None,
    example_inputs: Any = None,
    *,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    target: Any = None,
    training: bool | None = None,
    optimizer: str | Optimizer | None = None,
    dtype: str = FULL,
    extractor: str = AUTO,
    renamed: Mapping[str, str] | None = None,
    main_device: str | None = None,
) -> Exported:
    """Convert a placement to the format of another runtime and compare both.

    The result has ``.content``, ``.moved_op_count`` and, for a result of :func:`optimize`, the
    predicted step as placed and as exported (``.placed_step``, ``.exported_step``).

    Args:
        placement: the result of :func:`optimize`, or a placement (file).
        format: ``"device-map"``, ``"pipeline"``, ``"layer-counts"`` or ``"override-regex"``; see
            :mod:`placer.exports`.
        model: the model that was placed, or its workload; required with a placement (file).
        example_inputs: as for :func:`apply`.
        loss: as for :func:`optimize`.
        target: as for :func:`optimize`.
        training: as for :func:`apply`.
        optimizer: as for :class:`placer.Workload`.
        dtype: as for :func:`apply`.
        extractor: as for :func:`optimize`.
        renamed: {device of the placement: device to write}, as in ``{"core:0": "cuda:0"}``. A
            set of cores that is not renamed itself is written as its first core is.
        main_device: device of the inputs of a model with a device map, by default the first
            accelerator: one that the placement is written on, or ``cpu``.

    Raises:
        ExportError: the runtime cannot run this placement; the message names the module.
        ExtractionError: the model cannot be extracted.
        ValueError: the placement belongs to another graph, the format does not exist, the model
            or example inputs are missing, or an argument is not what the result has.
    """
    write, own = format_named(format), _placement_of(placement)
    _check_mode(own, training, loss)
    _check_workload(own, model, example_inputs, loss, target, training, optimizer, dtype)
    if isinstance(placement, Result) and placement.extraction is not None:
        extraction = placement.extraction
        _check_own(extraction, model, example_inputs, loss, target, dtype, extractor)
        own_model = model.model if isinstance(model, Workload) else model
        if own_model is not None:
            extraction = _extraction_of(extraction, own_model, extraction.step.optimizer)
    else:
        extraction = _extracted(
            model, example_inputs, loss, target, optimizer, dtype, extractor, own
        )
    problem = None
    if isinstance(placement, Result) and own.graph == placement.problem.graph.hash:
        problem = placement.problem
    return export_extracted(
        write, extraction, own, problem=problem, renamed=renamed, main_device=main_device
    )


def _extraction_of(
    made_for: Extraction, model: nn.Module, optimizer: Optimizer | None
) -> Extraction:
    """Return the extraction of a result, made again for another model or optimizer."""
    step = replace(made_for.step, model=model, optimizer=optimizer)
    same = made_for.step.model is model and made_for.step.optimizer == optimizer
    return made_for if same else extract(step, made_for.extractor)


def _extracted(
    model: nn.Module | Workload | None,
    example_inputs: Any,
    loss: Callable[[Any, Any], torch.Tensor] | None,
    target: Any,
    optimizer: str | Optimizer | None,
    dtype: str,
    extractor: str,
    placement: Placement,
) -> Extraction:
    if isinstance(model, Workload):
        return extraction_for(model, placement.device_names, extractor)
    if model is None or example_inputs is None:
        raise ValueError(
            "a placement holds neither the model nor its inputs: give model and example_inputs "
            "(and loss) as for optimize, or a workload"
        )
    step = Workload.of(
        model,
        example_inputs,
        loss,
        target=target,
        training=placement.is_training,
        optimizer=optimizer,
        dtype=dtype,
    )
    return extraction_for(step, placement.device_names, extractor)


def _check_mode(placement: Placement, training: bool | None, loss: object) -> None:
    """Raise ValueError if the arguments contradict what the placement was made for."""
    if training is None and loss is not None and not placement.is_training:
        raise ValueError(
            "the placement is of inference, which has no loss: leave loss out, or give "
            "training=False with it if the inputs have a target"
        )
    if training not in (None, placement.is_training):
        kind = "a training step" if placement.is_training else "inference"
        raise ValueError(f"the placement is of {kind}: leave training={training} out")


def _check_workload(
    placement: Placement,
    model: nn.Module | Workload | None,
    example_inputs: Any,
    loss: object,
    target: Any,
    training: bool | None,
    optimizer: object,
    dtype: str,
) -> None:
    """Raise ValueError if a workload is not of the placement's mode, or not all that is given."""
    if not isinstance(model, Workload):
        return
    model.check_complete(
        example_inputs=example_inputs,
        loss=loss,
        target=target,
        training=training,
        optimizer=optimizer,
        dtype=None if dtype == FULL else dtype,
    )
    if model.training != placement.is_training:
        kind = "a training step" if placement.is_training else "inference"
        raise ValueError(
            f"the placement is of {kind}: give a workload with training={placement.is_training}"
        )


def _check_own(
    made_for: Extraction,
    model: nn.Module | Workload | None,
    example_inputs: Any,
    loss: object,
    target: Any,
    dtype: str,
    extractor: str,
) -> None:
    """Raise ValueError if an argument beside a result is not that of the step that was placed."""
    own = made_for.step
    if isinstance(model, Workload):
        loss = model.loss
        if model.dtype != own.dtype:
            raise ValueError(
                f"the result is of a step in {own.dtype}, the workload is in {model.dtype}: search "
                "again"
            )
    others = {
        "loss": loss is not None and not _is_same_loss(loss, own.loss),
        "target": example_inputs is None and target is not None,
        "dtype": dtype not in (FULL, own.dtype),
        "extractor": extractor not in (AUTO, made_for.extractor),
    }
    if names := " and ".join(name for name, is_other in others.items() if is_other):
        raise ValueError(f"the result has its own {names}: leave {names} out, or search again")
    if example_inputs is not None:
        named = {} if target is None else {TARGET: target}
        matched_leaves(own, *own.unpacked((example_inputs,), named))


def _is_same_loss(one: object, other: object) -> bool:
    """Return whether two losses are one, or of the same code and state."""
    if isinstance(one, nn.Module) and type(one) is type(other):
        assert isinstance(other, nn.Module)
        if one.state_dict().keys() != other.state_dict().keys():
            return False
        states = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
        options = [vars(each).copy() for each in (one, other)]
        same = all(
            value is options[1].get(name)
            or (isinstance(value, PLAIN) and value == options[1].get(name))
            for name, value in options[0].items()
            if not (name.startswith("_") or name == "training")
        )
        return same and all(torch.equal(a, b) for a, b in states)
    if isinstance(one, FunctionType) and isinstance(other, FunctionType):
        cells = [
            [id(cell.cell_contents) for cell in each.__closure__ or ()] for each in (one, other)
        ]
        same_code = (one.__code__, one.__defaults__) == (other.__code__, other.__defaults__)
        return same_code and cells[0] == cells[1]
    return one is other


def _placement_of(placement: Result | Placement | str | Path) -> Placement:
    if isinstance(placement, Result):
        return placement.placement
    return placement if isinstance(placement, Placement) else Placement.load(Path(placement))
