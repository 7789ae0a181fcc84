"""PowerSGD from torch: gradient matrices are sent as products of two low-rank factors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from placer.parallel.methods.reductions import HookReduction
from placer.parallel.methods.registry import WARMUP_STEPS

RANK: Final = 2
_KEPT: Final = ("error_dict", "p_memory_dict", "q_memory_dict")


class PowerSgd(HookReduction):
    """PowerSGD with error feedback (Vogels, Karimireddy and Jaggi, NeurIPS 2019)."""

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        approximation_rank: int = RANK,
        warmup_steps: int = WARMUP_STEPS,
    ) -> None:
        """Set the rank of the approximation and the number of initial plain all-reduce steps."""
        if warmup_steps < 2:  # torch requires buckets that no longer change
            raise ValueError(f"PowerSGD begins after 2 steps at the earliest, not {warmup_steps}")
        state = PowerSGDState(
            process_group=group if group is not None else dist.group.WORLD,
            matrix_approximation_rank=approximation_rank,
            start_powerSGD_iter=warmup_steps,
        )
        super().__init__(powerSGD_hook, state)

    def state_dict(self) -> dict[str, Any]:
        """Return the steps so far, the residuals, the factors and the random generator's state."""
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
        """Restore what :meth:`state_dict` returned on this rank."""
        for name in _KEPT:
            tensors = {int(index): tensor.clone() for index, tensor in state[name].items()}
            setattr(self.state, name, tensors)
        self.state.iter = state["iter"]
        random = state["random"]
        keys = random["keys"].numpy().astype(np.uint32)
        self.state.rng.set_state((random["kind"], keys, *random["rest"]))
