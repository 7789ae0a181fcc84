"""The step of a job with its whole batch or a part of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import networkx as nx

from envs.collectives import MeasuredAllReduce
from envs.hardware.discover import is_core
from graphs.costs import with_part_of_batch
from graphs.gradients import Gradients, gradients_of, no_gradients
from graphs.graph import GraphArrays
from placer.costed_step import costed_step
from placer.job import Job
from placer.progress import Progress
from placer.sources.batches import with_part_of_inputs

if TYPE_CHECKING:
    from graphs.extract import Extraction


class StepSource:
    """Provides the costed graph of a step for parts of its batch.

    The costs of a graph with known costs are divided, a model is extracted again for each part.
    """

    def __init__(self, job: Job, progress: Progress) -> None:
        self.job = job
        self.progress = progress
        self.whole = costed_step(job, progress)
        self.steps = {1: self.whole}  # by parts of the batch
        self.uncalibrated = ""

    @property
    def trains(self) -> bool:
        """Return whether the step has gradients."""
        return self.whole.extraction is None or self.whole.extraction.step.training

    @property
    def gradient_makers(self) -> Mapping[str, Sequence[str]]:
        """Return {op with parameters: ops that compute their gradients}, as far as known."""
        return {} if self.whole.runtime is None else self.whole.runtime.gradient_makers()

    @property
    def may_run(self) -> bool:
        """Return whether replicas may be run: they train, and all devices are here."""
        return bool(self.job.search.measure) and self.trains and self.whole.can_run_placed

    @property
    def runs_on_cores(self) -> bool:
        """Return whether replicas may be run on several core sets of this machine."""
        names = self.whole.cluster.names
        return self.may_run and len(names) > 1 and all(map(is_core, names))

    @property
    def runs_on_gpus(self) -> bool:
        """Return whether replicas may be run on GPUs of this machine, and maybe its CPU."""
        names = {name.partition(":")[0] for name in self.whole.cluster.names}
        return self.may_run and "cuda" in names <= {"cuda", "cpu"}

    @property
    def has_cuda(self) -> bool:
        """Return whether there are GPUs: then forks of this process cannot use autograd."""
        import torch

        return torch.cuda.is_available()

    def gradients(self, graph: GraphArrays) -> Gradients:
        """Return the gradients of the step, none without training."""
        return gradients_of(graph, self.gradient_makers) if self.trains else no_gradients()

    def collectives(self, levels: Collection[tuple[int, ...]]) -> MeasuredAllReduce | None:
        """Return the all-reduces between ranks on the devices, measured or cached.

        Hierarchical ones are those of these levels. None where this machine cannot run ranks on
        several cores or GPUs of one kind, or ``uncalibrated`` says why they failed.
        """
        names = self.whole.cluster.names
        if not self.runs_on_cores:
            names = self._gpus()
        if len(names) < 2:
            return None
        from placer.parallel.collectives import known_collectives, transport_of
        from placer.parallel.local_ranks import RankError

        self.progress.stage("Calibrating reductions")
        try:
            return known_collectives(names, levels)
        except (RankError, OSError) as error:
            backend = transport_of(names).name
            self.uncalibrated = f"reductions of {backend} could not be measured ({error})"
        return None

    def _gpus(self) -> tuple[str, ...]:
        """Return the GPUs if replicas train on GPUs of one kind of this machine."""
        if not self.may_run:
            return ()
        gpus = [each for each in self.whole.cluster.devices if each.name.startswith("cuda:")]
        return tuple(gpu.name for gpu in gpus) if len({gpu.kind for gpu in gpus}) == 1 else ()

    def extraction(self, parts: int) -> Extraction | None:
        """Return the extraction for a part of the batch whose graph was made; None for a graph."""
        return None if self.whole.extraction is None else self.steps[parts].extraction

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
            self.steps[parts] = costed_step(replace(self.job, source=smaller), self.progress)
            return self.steps[parts].graph
        except ExtractionError as error:
            raise ValueError(
                f"The step cannot be extracted with one of {parts} parts of its batch: {error}"
            ) from error
