"""A placed model whose steps are run by pinned workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from envs.executors.checks import AsPlaced, checked_rate, load_optimizer_state
from envs.executors.cores.arena import begin_updates
from envs.executors.cores.errors import WorkerError
from envs.executors.cores.hand_over import HandOver
from envs.executors.cores.instruction_lists import device_lists
from envs.executors.cores.pool import WorkerPool
from envs.hardware.cluster import Cluster
from graphs.extract import Extraction


class PlacedModel:
    """Runs steps of a model on the devices of a placement.

    Parameters and buffers of the model move into memory that the workers share, under the same
    names and as the same objects: any torch optimizer on ``model.parameters()`` works as before,
    and gradients appear in ``parameter.grad`` as ``backward()`` would leave them (accumulated). A
    gradient lies in shared memory until the next step: clone it to keep it longer. State that was
    moved elsewhere (``model.to``, ``load_state_dict(assign=True)``, another placed model on the
    same one) is copied back by the next step; taking turns costs that copy each time. Processes
    forked from this one share the memory, too: what they write into parameters is written here (a
    spawned process has its own copy).

    A step that was extracted with an optimizer also updates the parameters, with ``learning_rate``,
    and consumes the gradients: ``parameter.grad`` is not touched.

    Use as a context manager, or call :meth:`close`, which gives the model its own memory back.
    Without either the workers end when the placed model is garbage-collected.
    """

    def __init__(
        self,
        extraction: Extraction,
        cluster: Cluster,
        devices: Sequence[int],
        order: Sequence[int],
        *,
        step_timeout_s: float = 600.0,
    ) -> None:
        """Start the workers and load the placement.

        Args:
            extraction: the step that was placed.
            cluster: its devices, all of them core sets of this machine.
            devices: device index of every op, (N,).
            order: all ops, each after those it reads from.
            step_timeout_s: a step that takes longer counts as hung.

        Raises:
            ExtractionError: the step is valid for its example inputs only, or has no program.
            ValueError: a device is not a set of cores of this machine, or the order is invalid.
            WorkerError: a worker did not start.
            OSError: there is too little memory, or too many processes or open files.
        """
        extraction.check_any_data()
        self.model = extraction.step.model
        self.program = extraction.program
        self._extraction = extraction
        self._step = extraction.step
        self._as_placed = AsPlaced(extraction.step)
        self._handed: HandOver | None = None
        lists = device_lists(self.program, devices, order, len(cluster))
        self._pool = WorkerPool(
            self.program,
            cluster.devices,
            step_timeout_s=step_timeout_s,
            op_names=tuple(extraction.graph),
        )
        try:
            self._number = self._pool.load(lists)
            if self._step.optimizer is not None:
                begin_updates(self._pool.arena, self._step.optimizer.learning_rate)
            with torch.inference_mode(mode=False):  # the model trains on its memory
                self._handed = HandOver(self._pool.arena, self._step, extraction.outputs)
            self._handed.share()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> PlacedModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, *_: object, **__: object) -> Any:
        """Raise TypeError, which says what runs a step."""
        raise TypeError(
            "on cores whole steps are placed: call placed.step(batch), which also runs the "
            "backward pass, and model(x) for the model alone"
        )

    def step(self, *batch: Any, **keywords: Any) -> Any:
        """Run one step on a batch shaped like the example inputs.

        A training step returns the loss (detached) and adds to the parameters' gradients, or with
        an optimizer updates the parameters; an inference step returns what the model returns.
        The batch has any of the forms of example inputs: ``step(x, y)`` is ``step((x, y))``,
        ``step(x, target=y)`` or ``step({"x": x, "target": y})``.

        Raises:
            ValueError: the batch does not match the example inputs, a parameter or buffer has
                another shape, dtype or device than when the model was placed, what the step holds
                of the model or the inputs has changed, or a model in training is in eval mode or
                trains other parameters.
            WorkerError: a worker died, hung, or could not run an op.
        """
        if self._pool.closed or self._handed is None:
            raise WorkerError("the workers of this placed model have ended; place it again")
        self._as_placed.check()
        self._extraction.check_constants()
        outputs, _ = self._handed.step(lambda: self._pool.run(self._number), batch, keywords)
        return outputs

    def peak_memory_bytes(self) -> dict[str, int]:
        """Return the peak of the memory of each device's worker so far.

        See :meth:`WorkerPool.peak_memory_bytes` for what it includes.

        Raises:
            WorkerError: the workers have ended.
        """
        return self._pool.peak_memory_bytes()

    def random_state(self) -> list[torch.Tensor]:
        """Return the states of the workers' random number generators, in the order of devices.

        Raises:
            WorkerError: the workers have ended.
        """
        return self._pool.random_state()

    def load_random_state(self, states: Sequence[torch.Tensor]) -> None:
        """Load the states from :meth:`random_state`: dropout drops the same again.

        Raises:
            ValueError: the number of devices differs.
            WorkerError: the workers have ended.
        """
        self._pool.load_random_state(states)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the step's optimizer; a new value is used from the next step on.

        Raises:
            ValueError: the step has no optimizer, or the rate is negative or not finite.
            WorkerError: the workers have ended.
        """
        return float(self._rate())

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        self._rate().fill_(checked_rate(rate))

    def _rate(self) -> torch.Tensor:
        self._pool.check_open()
        for source in self.program.sources:
            if source.role == "learning_rate":
                return self._pool.arena.value(source.value)
        raise ValueError('the placed step has no optimizer: give apply one, such as "adamw"')

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """Return a copy of the optimizer's state, such as ``exp_avg.<parameter>``; {} without one.

        ``step.<parameter>`` counts the updates of adam and adamw.

        Raises:
            WorkerError: the workers have ended, and the state with them.
        """
        return {name: tensor.clone() for name, tensor in self._optimizer_state().items()}

    def load_optimizer_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the state from :meth:`optimizer_state`.

        Raises:
            ValueError: it is the state of another optimizer or model.
            WorkerError: the workers have ended.
        """
        load_optimizer_state(self._optimizer_state(), state)

    def _optimizer_state(self) -> dict[str, torch.Tensor]:
        self._pool.check_open()
        value = self._pool.arena.value
        return {
            f"step.{s.name}" if s.role == "step_count" else s.name: value(s.value)
            for s in self.program.sources
            if s.role in ("optimizer", "step_count")
        }

    def close(self) -> None:
        """End the workers; the model keeps its values, in memory of its own."""
        try:
            if self._handed is not None:
                self._handed.close()
        finally:
            self._handed = None
            self._pool.close()
