"""The optimizer of a training step and its hyperparameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from graphs.text import suggestion

STATE: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "sgd": (),
        "momentum": ("momentum_buffer",),
        "adam": ("exp_avg", "exp_avg_sq"),
        "adamw": ("exp_avg", "exp_avg_sq"),
    }
)
"""State tensors that each kind keeps per parameter, of its size, under torch's names."""
NONE: Final = "none"
ADAMW_DECAY: Final = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """A torch optimizer with torch's defaults, all parameters in one group.

    ``momentum`` (torch's default is 0) is for the kind of that name, ``betas`` and ``epsilon`` are
    for adam and adamw. ``weight_decay`` None is torch's default: 0.01 for adamw, else 0.
    """

    kind: str
    learning_rate: float = 1e-3
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in STATE:
            hint = suggestion(self.kind, STATE)
            raise ValueError(f"optimizer {self.kind!r} is not one of {', '.join(STATE)}{hint}")
        numbers = {
            "learning_rate": self.learning_rate,
            "momentum": self.momentum,
            "epsilon": self.epsilon,
            "weight_decay": self.decay,
        }
        for name, value in numbers.items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} of the optimizer is {value}, not a number >= 0")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas of the optimizer are {self.betas}, not within 0 .. 1")

    @classmethod
    def of(cls, optimizer: str | Optimizer | None) -> Optimizer | None:
        """Return the optimizer of a kind, or an optimizer as it is; None for None and "none".

        Raises:
            ValueError: there is no such kind.
        """
        if optimizer is None or optimizer == NONE:
            return None
        return optimizer if isinstance(optimizer, Optimizer) else cls(kind=optimizer)

    @property
    def decay(self) -> float:
        """The effective weight decay."""
        if self.weight_decay is not None:
            return self.weight_decay
        return ADAMW_DECAY if self.kind == "adamw" else 0.0

    @property
    def kernel(self) -> tuple[str, dict[str, Any]]:
        """Name of torch's fused kernel, and its arguments besides the learning rate.

        The momentum buffer starts at 0, so that the first step needs no rule of its own: without
        dampening the buffer becomes the gradient.
        """
        if self.counts_steps:
            return f"_fused_{self.kind}_", {
                "beta1": self.betas[0],
                "beta2": self.betas[1],
                "weight_decay": self.decay,
                "eps": self.epsilon,
                "amsgrad": False,
                "maximize": False,
            }
        return "_fused_sgd_", {
            "weight_decay": self.decay,
            "momentum": self.momentum if STATE[self.kind] else 0.0,
            "dampening": 0.0,
            "nesterov": False,
            "maximize": False,
            "is_first_step": False,
        }

    @property
    def counts_steps(self) -> bool:
        """Return whether an update depends on the number of updates before it."""
        return self.kind in ("adam", "adamw")
