"""Hand-over of a step between a model and the workers: batch and state in, results out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map

from envs.executors.checks import ExampleForm
from envs.executors.cores.arena import Arena, count_update, load_batch
from envs.executors.process_settings import end_idle_threads, keep_freed_memory, with_threads
from envs.executors.state_devices import STATE_ROLES
from graphs.extract import Workload
from graphs.extract.export.trace import Position

Ran = TypeVar("Ran")


class HandOver:
    """The part of a step in the model's process, before and after the workers run.

    In a step this process computes on one thread, and its other threads have ended: they would
    wait for more work on the cores of the workers.
    """

    def __init__(self, arena: Arena, step: Workload, outputs: Any) -> None:
        """Find the places of the model's state and of the results.

        Args:
            arena: the memory that the workers share.
            step: the step of the model.
            outputs: what the model returns, with a Position for every tensor.
        """
        keep_freed_memory()  # of outputs
        self.program = arena.program
        self._arena = arena
        self._step = step
        self._outputs = outputs
        self._slots = {
            source.name: arena.value(source.value)
            for source in self.program.sources
            if source.role in STATE_ROLES
        }
        results = [(r, arena.result(i)) for i, r in enumerate(self.program.results)]
        self._gradients = {r.name: shared for r, shared in results if r.role == "gradient"}
        self._changed = {r.name: shared for r, shared in results if r.role == "state"}
        self._returned = {int(r.name): shared for r, shared in results if r.role == "output"}
        self._new_gradients: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._form = ExampleForm.of(step)
        self._state: dict[str, torch.Tensor] = {}

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def share(self) -> None:
        """Move parameters and buffers into the arena, as the same objects: new ones are copied.

        Raises:
            ValueError: a parameter or buffer is gone, or has another shape, dtype or device than
                when the model was placed.
        """
        state = self._step.named_state()
        for name, first in self.program.ties.items():
            if state.get(name) is not state.get(first):
                raise ValueError(f"{name} and {first} are no longer one tensor: place it again")
        for name, slot in self._slots.items():
            tensor = state.get(name)
            if tensor is None:
                raise ValueError(f"the model no longer has {name}: place it again")
            if tensor.data_ptr() == slot.data_ptr() and tensor.stride() == slot.stride():
                continue
            now, then = _form(tensor), _form(slot)
            if now != then:
                raise ValueError(f"{name} is now {now}, the placement was made for {then}")
            slot.copy_(tensor.clone())  # it may be another view of the slot's own memory
            tensor.data = slot
        self._state = state

    def step(
        self, run: Callable[[], Ran], batch: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> tuple[Any, Ran]:
        """Hand over a batch and the state, call ``run``, and take state, gradients and outputs.

        Returns the outputs, and what ``run`` returned.

        Raises:
            ValueError: the batch does not match the example inputs, or as for :meth:`share`.
        """
        end_idle_threads()
        with with_threads(1):
            self._begin(batch, keywords)
            ran = run()
            return self._end(), ran

    def _begin(self, batch: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        load_batch(self._arena, self._form.leaves(batch, keywords))
        self.share()
        self._keep_gradients(self._state)
        # New objects, as the caller may replace the .data of those of the last step. They are made
        # here because Python is slow after a step, which leaves nothing of it in the caches.
        self._new_gradients = [
            (self._state[name], shared.detach()) for name, shared in self._gradients.items()
        ]
        count_update(self._arena)

    @torch.no_grad()
    def _end(self) -> Any:
        for parameter, gradient in self._new_gradients:
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)
        self._new_gradients.clear()
        if self._changed:
            names, new = self._changed.keys(), list(self._changed.values())
            torch._foreach_copy_([self._state[name] for name in names], new)
        outputs = {number: shared.clone() for number, shared in self._returned.items()}
        return tree_map(
            lambda leaf: outputs[leaf.number] if isinstance(leaf, Position) else leaf,
            self._outputs,
        )

    @torch.inference_mode(mode=False)
    def close(self) -> None:
        """Give the model memory of its own again; safe to call twice."""
        state = self._step.named_state()
        self._keep_gradients(state)
        for name, slot in self._slots.items():
            tensor = state.get(name)
            if tensor is not None and tensor.data_ptr() == slot.data_ptr():
                tensor.data = tensor.detach().clone()
        self._state = {}
        self._slots.clear()
        self._new_gradients.clear()
        for shared in (self._gradients, self._changed, self._returned):
            shared.clear()

    def _keep_gradients(self, state: Mapping[str, torch.Tensor]) -> None:
        """Clone gradients that still lie in the arena; the next step would overwrite them."""
        for name, shared in self._gradients.items():
            gradient = state[name].grad if name in state else None
            if gradient is not None and gradient.data_ptr() == shared.data_ptr():
                state[name].grad = gradient.clone()


def _form(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
