"""Train and eval mode of a model that runs by its own code."""

from __future__ import annotations

from torch import nn

from graphs.extract import Workload


class Modes:
    """Switches the model and the loss of a step, which is in the step's mode to begin with.

    Modules that were in eval mode within a model in train mode, when it was placed or last
    switched, return to it.
    """

    def __init__(self, step: Workload) -> None:
        self._step = step
        self._in_training = self._now()
        self._training = step.model.training

    def check(self) -> None:
        """Raise ValueError if the model was switched, but not its placed model."""
        if self.are_switched():
            mode, own = ("train", "eval") if self._training else ("eval", "train")
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
        self._training = self._step.model.training

    def are_switched(self) -> bool:
        """Return whether the model is in another mode than it was placed or last switched to."""
        return self._step.model.training is not self._training

    def _now(self) -> dict[nn.Module, bool]:
        owners = (self._step.model, self._step.loss)
        roots = [owner for owner in owners if isinstance(owner, nn.Module)]
        return {module: module.training for root in roots for module in root.modules()}
