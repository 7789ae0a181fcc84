"""Train and eval mode of a model that runs by its own code."""

from __future__ import annotations

from torch import nn

from graphs.extract import Workload


class Modes:
    """Switches the model and the loss of a step, which is in the step's mode to begin with.

    Modules that are in eval mode within a model in train mode return to it.
    """

    def __init__(self, step: Workload) -> None:
        self._step = step
        self._in_training = self._now()

    def check(self, *, training: bool) -> None:
        """Raise ValueError if a training step's model was switched, but not its placed model."""
        if self._step.training and self._step.model.training is not training:
            mode, own = ("train", "eval") if training else ("eval", "train")
            raise ValueError(
                f"the model is in {own} mode, and its placed model in {mode} mode: switch both by "
                "train() or eval() of the placed model"
            )

    def switch(self, *, training: bool) -> None:
        """Set the mode of all modules that the model has now."""
        now = self._now()
        if self._step.model.training and not training:
            self._in_training = now
        for module in now:
            module.training = training and self._in_training.get(module, True)

    def _now(self) -> dict[nn.Module, bool]:
        owners = (self._step.model, self._step.loss)
        roots = [owner for owner in owners if isinstance(owner, nn.Module)]
        return {module: module.training for root in roots for module in root.modules()}
