"""Steps of a model with a part of its batch, for micro-batches and replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import networkx as nx
import torch

from envs.cluster import Cluster
from graphs.extract import Extraction, ExtractionError, Step
from graphs.extract.call_graph import CallGraph
from graphs.extract.gradient_makers import gradient_makers
from placer.pipeline import Options, costed_step
from placer.report.progress import Progress
from placer.rigs import TorchDevices


class ModelSource:
    """Extracts a model again for each part of its batch."""

    def __init__(self, step: Step, cluster: Cluster, options: Options, hear: Progress) -> None:
        self.step = step
        self.options = options
        self.hear = hear
        self.given = cluster
        known = costed_step(step, cluster, options, hear)
        self.extraction: Extraction | None = known.extraction
        calls = known.rig.calls if isinstance(known.rig, TorchDevices) else None
        self.makers: Mapping[str, Sequence[str]] = gradient_makers(
            known.extraction, calls if isinstance(calls, CallGraph) else None
        )
        self.cluster = known.cluster
        self.whole = known.graph
        self.notes: dict[str, None] = {}

    def graph(self, parts: int) -> nx.DiGraph[str]:
        """Return the graph with costs for one of ``parts`` equal parts of the inputs.

        Raises:
            ValueError: the inputs cannot be divided so, or the smaller step cannot be extracted.
        """
        if parts == 1:
            return self.whole
        smaller = with_part_of_inputs(self.step, parts)
        if smaller is None:
            raise ValueError(
                f"The tensors among the inputs have no first dimension in common that is {parts} "
                "equal parts."
            )
        try:
            return costed_step(smaller, self.given, self.options, self.hear).graph
        except ExtractionError as error:
            raise ValueError(
                f"The step cannot be extracted with one of {parts} parts of its batch: {error}"
            ) from error


def batch_size(step: Step) -> int | None:
    """Return the first dimension that all input tensors share, None if they differ."""
    sizes: set[int] = set()
    _mapped((step.inputs, dict(step.keywords)), lambda tensor: _noted(tensor, sizes))
    return sizes.pop() if len(sizes) == 1 else None


def with_part_of_inputs(step: Step, parts: int) -> Step | None:
    """Return the step on the first of ``parts`` equal parts of its batch; None if not divisible.

    The batch is the first dimension of all inputs, see :func:`batch_size`.
    """
    size = batch_size(step)
    if size is None or size % parts:
        return None

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.ndim == 0 else tensor[: size // parts]

    inputs, keywords = _mapped((step.inputs, dict(step.keywords)), cut)
    return replace(step, inputs=inputs, keywords=keywords)


def _noted(tensor: torch.Tensor, sizes: set[int]) -> torch.Tensor:
    if tensor.ndim:
        sizes.add(tensor.shape[0])
    return tensor


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [_mapped(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
