"""The step of a job with its whole batch or a part of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import networkx as nx

from graphs.costs import with_part_of_batch
from placer.evaluation import costed_step
from placer.job import Job
from placer.progress import Progress

if TYPE_CHECKING:
    import torch

    from graphs.extract import Workload


class StepSource:
    """Provides the costed graph of a step for parts of its batch.

    The costs of a graph with known costs are divided, a model is extracted again for each part.
    """

    def __init__(self, job: Job, progress: Progress) -> None:
        self.job = job
        self.progress = progress
        self.whole = costed_step(job, progress)

    @property
    def trains(self) -> bool:
        """Return whether the step has gradients."""
        return self.whole.extraction is None or self.whole.extraction.step.training

    @property
    def gradient_makers(self) -> Mapping[str, Sequence[str]]:
        """Return {op with parameters: ops that compute their gradients}, as far as known."""
        return {} if self.whole.runtime is None else self.whole.runtime.gradient_makers()

    def graph(self, parts: int) -> nx.DiGraph[str]:
        """Return the graph for one of ``parts`` equal parts of the batch."""
        if parts == 1:
            return self.whole.graph
        if self.whole.extraction is None:
            return with_part_of_batch(self.whole.graph, parts)
        from graphs.extract import ExtractionError

        smaller = with_part_of_inputs(self.whole.extraction.step, parts)
        if smaller is None:
            raise ValueError(
                f"The tensors among the inputs have no first dimension in common that is {parts} "
                "equal parts."
            )
        try:
            return costed_step(replace(self.job, source=smaller), self.progress).graph
        except ExtractionError as error:
            raise ValueError(
                f"The step cannot be extracted with one of {parts} parts of its batch: {error}"
            ) from error


def batch_size(step: Workload) -> int | None:
    """Return the first dimension that all input tensors share, None if they differ."""
    sizes: set[int] = set()

    def add(tensor: torch.Tensor) -> torch.Tensor:
        sizes.update(tensor.shape[:1])
        return tensor

    _mapped((step.inputs, dict(step.keywords)), add)
    return sizes.pop() if len(sizes) == 1 else None


def with_part_of_inputs(step: Workload, parts: int) -> Workload | None:
    """Return the step on the first of ``parts`` equal parts of its batch; None if not divisible.

    The batch is the first dimension of all inputs, see :func:`batch_size`.
    """
    size = batch_size(step)
    if size is None or size % parts:
        return None
    inputs, keywords = part_of_batch((step.inputs, dict(step.keywords)), parts)
    return replace(step, inputs=inputs, keywords=keywords)


def part_of_batch(values: Any, parts: int, index: int = 0) -> Any:
    """Return one of equal parts of all tensors in nested values, along their first dimension.

    Tensors without dimensions are the same in every part.
    """

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.ndim:
            return tensor
        size, rest = divmod(len(tensor), parts)
        if rest or not size:
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} in a batch cannot be cut into {parts} "
                "equal parts"
            )
        return tensor[index * size : (index + 1) * size]

    return _mapped(values, cut)


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    from torch import Tensor
    from torch.utils._pytree import tree_map_only

    return tree_map_only(Tensor, change, value)
