"""The unplaced model: its own code in this process, on some cores or on one device."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from envs.executors.checks import checked_rate, load_optimizer_state
from envs.executors.hooks.mixed_devices import sent
from envs.executors.modes import Modes
from envs.executors.process_settings import OnCores, keep_freed_memory
from envs.executors.state_devices import StateDevices, renew_recurrent, states_of
from envs.executors.torch.placed_module import SHARED
from envs.hardware.torch_devices import CPU
from graphs.extract import Extraction, Workload
from graphs.extract.autocast import autocast
from graphs.optimizer import STATE, Optimizer
from graphs.precision import FULL
from graphs.workload import check_inputs, training_loss


class UnplacedModel(nn.Module):
    """Runs steps of a model as it is, with the interface of a placed model.

    Forward and backward pass are those of torch, in this process; parameters and buffers are those
    of the model. A step with an optimizer updates them by torch's own, in its fused form, and
    leaves no gradients.

    It runs on ``device``: parameters and buffers are moved there, again if they were moved
    elsewhere since the last step, and so are the inputs of each step. The model must make its
    other tensors there. With ``cores`` it runs on these, with a thread of torch on each, and freed
    memory is kept, see :func:`keep_freed_memory`.

    ``eval()`` of a training step makes it return what the model returns in eval mode, without
    gradients; a target may be given or left out. ``train()`` switches back.
    """

    def __init__(
        self,
        extraction: Extraction,
        cores: Collection[int] | None = None,
        *,
        device: torch.device = CPU,
    ) -> None:
        super().__init__()
        if cores is not None:
            keep_freed_memory()
        step = extraction.step
        states = list(dict.fromkeys(states_of(step).values()))
        self._homes = StateDevices(states)
        self._homes.place([device] * len(states))
        self._owners = [module for state in states for module in state.modules]
        renew_recurrent(self._owners)
        vars(self).update({name: vars(step.model)[name] for name in SHARED})
        self._step = step
        self._cores = cores
        self._device = device
        self.training = step.training
        if step.model.training is not step.training:
            step.model.train(step.training)
        self._modes = Modes(step)
        self._optimizer = None if step.optimizer is None else _torch_optimizer(step, step.optimizer)
        if self._optimizer is not None:
            self._begin(extraction, self._optimizer)

    def __enter__(self) -> UnplacedModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Do nothing: no workers run, and the state is where it always was."""

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Run the forward pass: of a training step in train mode with the loss, else the model.

        Raises:
            Exception: as the model raises it.
        """
        positional, named = self._step.bound(inputs, keywords, training=self._is_training)
        with self._on_cores():
            return self._forward(positional, named)

    def step(self, *batch: Any, **keywords: Any) -> Any:
        """Run one step on a batch as a data loader gives it.

        A training step returns the loss (detached) and adds to the parameters' gradients, or with
        an optimizer updates the parameters; an inference step returns what the model returns.

        Raises:
            Exception: as the model raises it.
        """
        positional, named = self._step.unpacked(batch, keywords)
        if not self._is_training:
            return self(*positional, **named)
        with self._on_cores():
            loss: torch.Tensor = self._forward(positional, named)
            if self._optimizer is not None:
                self._optimizer.zero_grad()
            torch.autograd.backward(loss)
            if self._optimizer is not None:
                self._optimizer.step()
                self._optimizer.zero_grad()
        return loss.detach()

    @property
    def _is_training(self) -> bool:
        return self._step.training and self.training

    def _forward(self, positional: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Run the forward pass on bound inputs. Little else, since steps may take a millisecond."""
        check_inputs(positional, named)
        self._modes.check()
        if self._cores is None:
            positional, named = sent((positional, named), self._device)
            if self._homes.were_elsewhere():
                renew_recurrent(self._owners)
        if self._step.dtype == FULL:
            return self._run(positional, named)
        with autocast(self._step.dtype, [self._device.type]):
            return self._run(positional, named)

    def _run(self, positional: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        step = self._step
        if step.training and self.training:
            return training_loss(step.model, step.loss, positional, named)
        with torch.no_grad():
            return step.model(*positional, **named)

    def train(self, mode: bool = True) -> UnplacedModel:
        """Set the mode. Modules that were in eval mode within a training step return to it."""
        if mode is not self.training or self._modes.are_switched():
            self._modes.switch(training=mode)
            self.training = mode
        return self

    @property
    def learning_rate(self) -> float:
        """Learning rate of the step's optimizer; a new value is used from the next step on.

        Raises:
            ValueError: the step has no optimizer, or the rate is negative or not finite.
        """
        return float(self._group()["lr"])

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        self._group()["lr"] = checked_rate(rate)

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """Return a copy of the optimizer's state, such as ``exp_avg.<parameter>``; {} without one.

        ``step.<parameter>`` counts the updates of adam and adamw.
        """
        return {name: tensor.clone() for name, tensor in self._optimizer_state().items()}

    def load_optimizer_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the state from :meth:`optimizer_state`.

        Raises:
            ValueError: it is the state of another optimizer or model.
        """
        load_optimizer_state(self._optimizer_state(), state)

    def _on_cores(self) -> AbstractContextManager[None]:
        return nullcontext() if self._cores is None else OnCores(self._cores)

    def _begin(self, extraction: Extraction, optimizer: torch.optim.Optimizer) -> None:
        """Set the optimizer's state to that before the first step, for the updated parameters."""
        state = self._step.named_state()
        for source in extraction.program.sources:
            if source.role == "optimizer":
                slot, _, name = source.name.partition(".")
                optimizer.state[state[name]][slot] = torch.zeros_like(state[name])
            elif source.role == "step_count":
                parameter = state[source.name]
                optimizer.state[parameter]["step"] = torch.zeros((), device=parameter.device)
        self._updated = [
            source.name if source.role == "optimizer" else f"step.{source.name}"
            for source in extraction.program.sources
            if source.role in ("optimizer", "step_count")
        ]

    def _optimizer_state(self) -> dict[str, torch.Tensor]:
        if self._optimizer is None:
            return {}
        state = self._step.named_state()
        slots = ((name, *name.partition(".")[::2]) for name in self._updated)
        return {name: self._optimizer.state[state[owner]][slot] for name, slot, owner in slots}

    def _group(self) -> dict[str, Any]:
        if self._optimizer is None:
            raise ValueError('the placed step has no optimizer: give apply one, such as "adamw"')
        group: dict[str, Any] = self._optimizer.param_groups[0]
        return group


def _torch_optimizer(step: Workload, optimizer: Optimizer) -> torch.optim.Optimizer:
    """Return torch's fused optimizer of this kind for the parameters of a step."""
    trained = {id(t): t for t in step.named_state().values() if t.requires_grad}
    parameters, rate, decay = list(trained.values()), optimizer.learning_rate, optimizer.decay
    if not optimizer.counts_steps:
        momentum = optimizer.momentum if STATE[optimizer.kind] else 0.0
        return torch.optim.SGD(
            parameters, lr=rate, momentum=momentum, weight_decay=decay, fused=True
        )
    kind = torch.optim.AdamW if optimizer.kind == "adamw" else torch.optim.Adam
    return kind(
        parameters,
        lr=rate,
        betas=optimizer.betas,
        eps=optimizer.epsilon,
        weight_decay=decay,
        fused=True,
    )
