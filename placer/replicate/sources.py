"""Sources of a step with its whole batch or a part of it: a graph file or a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import networkx as nx

from envs.hardware.cluster import Cluster
from graphs.costs import with_part_of_batch
from placer.costed_step import costed_step
from placer.job import Job
from placer.progress import Progress

if TYPE_CHECKING:
    import torch

    from graphs.extract import Extraction, Workload


class StepSource(Protocol):
    """Provides a step with its whole batch or a part of it."""

    cluster: Cluster
    extraction: Extraction | None
    makers: Mapping[str, Sequence[str]]  # {op with parameters: ops that compute their gradients}

    def graph(self, parts: int) -> nx.DiGraph[str]:
        """Return the graph with costs for one of ``parts`` equal parts of the batch.

        Raises:
            ValueError: the batch cannot be divided so.
        """
        ...


class GraphSource:
    """Scales the costs of a graph file."""

    extraction: Extraction | None = None
    makers: Mapping[str, Sequence[str]] = MappingProxyType({})

    def __init__(self, whole: nx.DiGraph[str], cluster: Cluster) -> None:
        self.whole = whole
        self.cluster = cluster

    def graph(self, parts: int) -> nx.DiGraph[str]:
        """Return the scaled graph; see :func:`graphs.costs.with_part_of_batch`."""
        return with_part_of_batch(self.whole, parts)


class ModelSource:
    """Extracts a model again for each part of its batch."""

    def __init__(self, job: Job, hear: Progress) -> None:
        from graphs.extract import Workload

        assert isinstance(job.source, Workload)
        self.step = job.source
        self.samples = batch_size(job.source)
        self.job = job
        self.hear = hear
        known = costed_step(job, hear)
        self.extraction: Extraction | None = known.extraction
        assert known.runtime is not None  # of a model
        self.makers: Mapping[str, Sequence[str]] = known.runtime.gradient_makers()
        self.cluster = known.cluster
        self.whole = known.graph

    def graph(self, parts: int) -> nx.DiGraph[str]:
        """Return the graph with costs for one of ``parts`` equal parts of the inputs.

        Raises:
            ValueError: the inputs cannot be divided so, or the smaller step cannot be extracted.
        """
        from graphs.extract import ExtractionError

        if parts == 1:
            return self.whole
        smaller = with_part_of_inputs(self.step, parts)
        if smaller is None:
            raise ValueError(
                f"The tensors among the inputs have no first dimension in common that is {parts} "
                "equal parts."
            )
        try:
            return costed_step(replace(self.job, source=smaller), self.hear).graph
        except ExtractionError as error:
            raise ValueError(
                f"The step cannot be extracted with one of {parts} parts of its batch: {error}"
            ) from error


def batch_size(step: Workload) -> int | None:
    """Return the first dimension that all input tensors share, None if they differ."""
    sizes: set[int] = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        sizes.update(tensor.shape[:1])
        return tensor

    _mapped((step.inputs, dict(step.keywords)), note)
    return sizes.pop() if len(sizes) == 1 else None


def with_part_of_inputs(step: Workload, parts: int) -> Workload | None:
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


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [_mapped(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
