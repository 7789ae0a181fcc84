"""PowerSGD, as torch has it: matrices of a gradient are sent as products of two thin ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from placer.parallel.options import WARMUP_STEPS
from placer.parallel.reductions import HookReduction

RANK: Final = 2
_KEPT: Final = ("error_dict", "p_memory_dict", "q_memory_dict")


class PowerSgd(HookReduction):
    """Vogels, Karimireddy and Jaggi, "PowerSGD", NeurIPS 2019, with error feedback."""

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        rank: int = RANK,
        warmup_steps: int = WARMUP_STEPS,
    ) -> None:
        """Set the rank of the approximation, and how many steps plain all-reduce comes before.

        Raises:
            ValueError: warmup_steps is below 2: torch wants buckets that stay.
        """
        if warmup_steps < 2:
            raise ValueError(f"PowerSGD begins after 2 steps at the earliest, not {warmup_steps}")
        state = PowerSGDState(
            process_group=group if group is not None else dist.group.WORLD,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=warmup_steps,
        )
        super().__init__(powerSGD_hook, state)

    def state_dict(self) -> dict[str, Any]:
        """Steps so far, residuals, factors, and the state of the generator of random factors."""
        kind, keys, *rest = self.state.rng.get_state()
        kept = {
            name: {
                str(index): tensor.clone() for index, tensor in getattr(self.state, name).items()
            }
            for name in _KEPT
        }
        random = {"kind": kind, "keys": torch.from_numpy(keys.astype(np.int64)), "rest": rest}
        return {**kept, "iter": self.state.iter, "random": random}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave on this rank."""
        for name in _KEPT:
            own = {int(index): tensor.clone() for index, tensor in state[name].items()}
            setattr(self.state, name, own)
        self.state.iter = state["iter"]
        random = state["random"]
        keys = random["keys"].numpy().astype(np.uint32)
        self.state.rng.set_state((random["kind"], keys, *random["rest"]))
