"""A placed model: the user's own model, its steps run by pinned workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch.utils._pytree import tree_map

from envs.cluster import Cluster
from envs.executor.lists import device_lists
from envs.executor.pool import WorkerError, WorkerPool
from envs.executor.state import leaves_by_path, load_batch, load_state
from graphs.extract import Extraction, Step
from graphs.extract.export import Position


class PlacedModel:
    """Runs steps of a model on the devices of a placement.

    Parameters and buffers of the model move into memory that the workers share, under the same
    names and as the same objects: any torch optimizer on ``model.parameters()`` works as before,
    and gradients appear in ``parameter.grad`` as ``backward()`` would leave them (added to what
    is there). A gradient lies in shared memory until the next step: clone what you keep longer.
    Use as a context manager, or call :meth:`close`, which gives the model its own memory back.
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
            ValueError: a device is not a set of cores of this machine.
            WorkerError: a worker did not come up.
        """
        self.model = extraction.step.model
        self.program = extraction.program
        self._outputs = extraction.outputs
        self._step = extraction.step
        self._state = extraction.step.named_state()
        self._pool = WorkerPool(
            self.program,
            cluster.devices,
            step_timeout_s=step_timeout_s,
            op_names=tuple(extraction.graph),
        )
        self._number = self._pool.load(device_lists(self.program, devices, order, len(cluster)))
        self._gradients = {
            result.name: self._pool.arena.result(index)
            for index, result in enumerate(self.program.results)
            if result.role == "gradient"
        }
        self._share()
        self._shared = True

    def __enter__(self) -> PlacedModel:
        """The placed model itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    def step(self, *batch: Any, **keywords: Any) -> Any:
        """Run one step on a batch shaped as the example inputs.

        A training step returns the loss (detached) and adds to the parameters' gradients; an
        inference step returns what the model returns. ``step((x, y))`` is ``step(x, y)``, and a
        single mapping is taken as keywords (unless the example inputs were one such argument), so
        that a data loader's batch can be given as it is.

        Raises:
            ValueError: the batch does not fit the example inputs.
            WorkerError: a worker died, hung, or could not run an op.
        """
        if self._pool.closed:
            raise WorkerError("the workers of this placed model have ended; place it again")
        load_batch(self._pool.arena, self._step, *_unpacked(self._step, batch, keywords))
        self._keep_gradients()
        self._pool.run(self._number, give=True)
        return self._take_results()

    def close(self) -> None:
        """End the workers; the model keeps its values, in memory of its own."""
        if not self._shared:
            return
        self._shared = False
        self._keep_gradients()
        for name, tensor in self._state.items():
            if name not in self.program.ties:
                tensor.data = tensor.detach().clone()
        self._gradients.clear()
        self._pool.close()

    def _share(self) -> None:
        arena = self._pool.arena
        load_state(arena, self._step)
        with torch.no_grad():
            for source in self.program.sources:
                if source.role in ("parameter", "buffer"):
                    self._state[source.name].data = arena.value(source.value)

    def _keep_gradients(self) -> None:
        """Gradients that still lie in the arena would be overwritten by the next step."""
        for name, shared in self._gradients.items():
            parameter = self._state[name]
            if parameter.grad is not None and parameter.grad.data_ptr() == shared.data_ptr():
                parameter.grad = parameter.grad.clone()

    @torch.no_grad()
    def _take_results(self) -> Any:
        outputs: dict[int, torch.Tensor] = {}
        for index, result in enumerate(self.program.results):
            shared = self._pool.arena.result(index)
            match result.role:
                case "output":
                    outputs[int(result.name)] = shared.clone()
                case "state":
                    self._state[result.name].copy_(shared)
                case "gradient":
                    parameter = self._state[result.name]
                    if parameter.grad is None:
                        parameter.grad = shared
                    else:
                        parameter.grad.add_(shared)
        return tree_map(
            lambda leaf: outputs[leaf.number] if isinstance(leaf, Position) else leaf,
            self._outputs,
        )


def _unpacked(
    step: Step, batch: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Arguments and keywords, also of a batch that came as one tuple, list or mapping."""
    expected = leaves_by_path(step.step_inputs, step.keywords).keys()
    if len(batch) == 1 and not keywords and leaves_by_path(batch, {}).keys() != expected:
        only = batch[0]
        if isinstance(only, tuple | list):
            return only, {}
        if isinstance(only, Mapping):
            return (), only
    return batch, keywords
