"""One model: extracted as it is given, placed at random on two cores, compared with eager.

What has no ops that can be placed on any data is placed module by module.

The only changes to a model are that dropout is off, since results could not be compared, and that
it is small.
"""

from __future__ import annotations

import os
import random
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks.coverage.case import Case
from benchmarks.coverage.models import cases_of
from envs.core_runtime import CoreRuntime
from envs.executors.cores.placed_model import PlacedModel
from envs.executors.unplaced import UnplacedModel
from envs.hardware.discover import discover
from envs.placement import Placement
from graphs.extract import Extraction, ExtractionError, Workload, extract
from graphs.graph import GraphArrays
from graphs.workload import LossModule

BATCHES: Final = 2
MOST_CHARACTERS: Final = 1000
CHECKOUT: Final = Path(__file__).parents[2]
IN_PACKAGES: Final = re.compile(rf'File "(?:[^"]*site-packages|{re.escape(str(CHECKOUT))})/')
"""Where a package is installed, which says nothing about it."""
RELATIVE: Final = 1e-3
"""Largest difference between placed and eager, as a share of the largest number of a tensor."""
OF_ALL: Final = 1e-5
"""The same as a share of the largest number of all tensors: some gradients are sums that cancel."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """What became of one step of a model.

    ``extractor`` is "" if the step was refused, and ``reason`` says why it was refused or does not
    run on cores, or which result differs from eager.
    """

    name: str
    training: bool
    extractor: str = ""
    depends_on_data: bool = False
    ran: bool = False
    equal: bool | None = None  # None if it was not compared: it did not run, or it is random
    failed: bool = False  # by an error that is no refusal
    reason: str = ""
    seconds: float = 0.0


def main(package: str, name: str, results: Connection) -> None:
    """Try training and inference of a model, and send what became of each; a process's function."""
    _without_output()
    for training in (True, False):
        results.send(tried(name, cases_of(package)[name], training=training))
    results.close()


def tried(name: str, case: Case, *, training: bool) -> Attempt:
    """Extract one step of a model and run it on cores, twice, with other inputs the second time."""
    began = time.perf_counter()
    found = Attempt(name, training)
    try:
        found = _run(found, case)
    except ExtractionError as error:
        found = replace(found, reason=str(error))
    except Exception as error:  # noqa: BLE001 - whatever a foreign model raises is a result
        found = replace(found, failed=True, reason=f"{type(error).__name__}: {error}")
    reason = IN_PACKAGES.sub('File "', found.reason)[:MOST_CHARACTERS]
    return replace(found, reason=reason, seconds=time.perf_counter() - began)


def _run(found: Attempt, case: Case) -> Attempt:
    batches = [_batch(case, found.training, seed) for seed in range(BATCHES)]
    step = _step(case, *batches[0], training=found.training)
    extraction = extract(step, needs="any data")
    found = replace(
        found,
        extractor=extraction.extractor,
        depends_on_data=bool(extraction.depends_on_data),
        reason=extraction.core_refusal,
    )
    if extraction.core_refusal:
        return found
    try:
        wrong = _wrong(case, extraction, batches, training=found.training)
    except Exception as error:  # noqa: BLE001
        return replace(found, failed=True, reason=f"{type(error).__name__}: {error}")
    if not wrong:
        return replace(found, ran=True, equal=True)
    if _is_random(case, batches[0], training=found.training):
        return replace(found, ran=True, reason="random, also without dropout: not compared")
    if _is_equal_in_double(case, batches, training=found.training):
        return replace(found, ran=True, equal=True, reason="compared in float64")
    return replace(found, ran=True, equal=False, reason="; ".join(wrong))


def _wrong(
    case: Case,
    extraction: Extraction,
    batches: Sequence[tuple[Any, Tensor | None]],
    *,
    training: bool,
    dtype: torch.dtype = torch.float32,
) -> list[str]:
    """Run a placed step and the model on all batches, and return what differs."""
    with on_two_cores(extraction) as placed:
        outputs = [
            placed.step(inputs, **({} if target is None else {"target": target}))
            for inputs, target in batches
        ]
        state = _state(extraction.step.model)
    eager = _step(case, *batches[0], training=training, dtype=dtype)
    expected = [_eager(eager, *batch) for batch in batches]
    pairs = {
        f"output of step {i}": pair for i, pair in enumerate(zip(outputs, expected, strict=True))
    }
    # A buffer that the first call makes is a cache, which the placed model does without.
    there = {name: tensor for name, tensor in _state(eager.model).items() if name in state}
    pairs["state"] = state, there
    return differences(pairs)


def _is_equal_in_double(
    case: Case, batches: Sequence[tuple[Any, Tensor | None]], *, training: bool
) -> bool:
    """Return whether results agree in float64: what differs in float32 is rounding, then.

    Normalizations over a few numbers, as of images as small as these, magnify it without a limit.
    """
    double = torch.float64
    wide: list[tuple[Any, Tensor | None]] = tree_map(
        lambda x: x.to(double) if isinstance(x, Tensor) and x.is_floating_point() else x, batches
    )
    try:
        step = _step(case, *wide[0], training=training, dtype=double)
        extraction = extract(step, needs="any data")
        return not _wrong(case, extraction, wide, training=training, dtype=double)
    except Exception:  # noqa: BLE001 - such as a model that makes tensors in float32
        return False


def differences(pairs: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """Return a sentence for each pair of results that differ."""
    found = []
    for name, (placed, eager) in pairs.items():
        ours, theirs = (dict(_tensors(each)) for each in (placed, eager))
        if ours.keys() != theirs.keys():
            odd = sorted(ours.keys() ^ theirs.keys())
            found.append(f"{name}: {odd[0]} and {len(odd) - 1} more are in one of both only")
            continue
        largest = max([_largest(tensor) for tensor in theirs.values()], default=0.0)
        off = {
            key: distance
            for key, tensor in theirs.items()
            if (distance := _distance(ours[key], tensor))
            > RELATIVE * _largest(tensor) + OF_ALL * largest
        }
        if off:
            worst = max(off, key=lambda key: off[key])
            found.append(
                f"{name}: {len(off)} of {len(theirs)} tensors differ, {worst} by {off[worst]:.2g} "
                f"of {_largest(theirs[worst]):.2g}"
            )
    return found


def on_two_cores(extraction: Extraction) -> PlacedModel | UnplacedModel:
    """Return the step with its ops or modules at random on two cores, co-located ones together."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    cluster = discover(",".join(f"core:{core}" for core in cores))
    runtime, randomly = CoreRuntime(extraction, cluster), random.Random(0)
    groups = [data["colocate"] or op for op, data in runtime.graph.nodes(data=True)]
    chosen = {group: randomly.randrange(len(cluster)) for group in dict.fromkeys(groups)}
    devices = np.array([chosen[group] for group in groups], np.int32)
    priority = np.array([randomly.random() for _ in groups])
    arrays = GraphArrays.from_graph(runtime.graph)
    return runtime.apply(Placement.of(arrays, cluster, devices, priority))


def without_dropout(model: nn.Module) -> nn.Module:
    """Set all probabilities of dropping something to 0, whatever a package calls them."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            named = "drop" in name or (name == "p" and "Stochastic" in type(module).__name__)
            if named and isinstance(value, float):
                setattr(module, name, 0.0)
    return model


def _batch(case: Case, training: bool, seed: int) -> tuple[Any, Tensor | None]:
    torch.manual_seed(1000 + seed)
    inputs = case.inputs(training)
    return inputs, case.target() if training and case.loss is not None else None


def _step(
    case: Case,
    inputs: Any,
    target: Tensor | None,
    *,
    training: bool,
    dtype: torch.dtype = torch.float32,
) -> Workload:
    torch.manual_seed(0)
    model = without_dropout(case.model()).train(training)
    if dtype == torch.float64:
        model = model.double()
    loss = case.loss if training else None
    return Workload.of(model, inputs, loss, target=target, training=training)


def _eager(step: Workload, inputs: Any, target: Tensor | None) -> Any:
    """Run one step of the model itself; in training, gradients are added to those it has."""
    one = Workload.of(step.model, inputs, step.loss, target=target, training=step.training)
    if not step.training:
        with torch.no_grad():
            return one.model(*one.inputs, **one.keywords)
    loss = LossModule(one)(*one.inputs, **one.keywords)
    loss.backward()
    return loss.detach()


def _is_random(case: Case, batch: tuple[Any, Tensor | None], *, training: bool) -> bool:
    """Return whether two runs of the same model give different results."""
    results = []
    for seed in range(2):
        step = _step(case, *batch, training=training)
        torch.manual_seed(seed)
        results.append((_eager(step, *batch), _state(step.model)))
    return bool(differences({"run": (results[0], results[1])}))


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of gradients and buffers; no gradient counts as zeros."""
    found = {f"buffer {name}": tensor.clone() for name, tensor in model.named_buffers()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            gradient = parameter.grad
            zeros = gradient is None
            found[f"gradient {name}"] = (
                torch.zeros_like(parameter) if zeros or gradient is None else gradient.clone()
            )
    return found


def _tensors(result: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(result, dict) and all(isinstance(each, Tensor) for each in result.values()):
        yield from ((str(name), tensor.detach()) for name, tensor in result.items())
        return
    for number, leaf in enumerate(tree_leaves(result)):
        if isinstance(leaf, Tensor):
            yield f"tensor {number}", leaf.detach()


def _distance(first: Tensor, second: Tensor) -> float:
    """Return the largest difference of two tensors, infinite if their kinds differ."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return float("inf")
    if not first.numel():
        return 0.0
    if not (first.is_floating_point() or first.is_complex()):
        return float((first != second).any())
    same = torch.isclose(first, second, rtol=0.0, atol=0.0, equal_nan=True)
    apart = (first - second).abs().masked_fill(same, 0.0).double()
    return float(apart.nan_to_num(nan=float("inf")).max())


def _largest(tensor: Tensor) -> float:
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    return float(tensor.abs().double().nan_to_num(0.0, 0.0, 0.0).max())


def _without_output() -> None:
    """Send what foreign models print nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    sys.stdout.flush()
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
