"""Write your own placer and compare it with the default: ``python examples/own_placer.py``.

An object that implements the protocol :class:`placer.search.request.Placer` can be passed to
:class:`placer.SearchConfig`; ``placer.register_placer`` gives its class a name. To use it as
``placer optimize --placer hill-climbing``, name it in the entry points of a package, group
``placer.placers``; :mod:`placer.search.contract` holds contract tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

import placer
from placer.search.grouping import units
from placer.search.sampling import BudgetedEvaluator, Sampling

BUDGET = "500e"


class HillClimbing(Sampling):
    """Moves one op or co-location group at a time and keeps the move if it is not slower."""

    name: ClassVar[str] = "hill climbing"

    def sample(self, budgeted: BudgetedEvaluator, seed: int) -> None:
        """Evaluate placements until the search budget is spent; ``budgeted`` keeps the best."""
        random = np.random.default_rng(seed)
        groups = units(budgeted.evaluator.problem)  # single ops and co-location groups
        priority = budgeted.evaluator.scheduling.bottom_level  # upward rank
        best = groups.allowed.argmax(axis=1)  # the first device that is allowed
        lowest = budgeted.evaluate(groups.expand(best), priority)
        while not budgeted.over():
            group = random.integers(len(groups))
            moved = best.copy()
            moved[group] = random.choice(np.flatnonzero(groups.allowed[group]))
            cost = budgeted.evaluate(groups.expand(moved), priority)
            if cost <= lowest:
                best, lowest = moved, cost


class Cells(nn.Module):
    """Eight cells of three parallel branches."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList(
            nn.ModuleList(nn.Linear(512, 512) for _ in range(3)) for _ in range(8)
        )

    def forward(self, x: Tensor) -> Tensor:
        for cell in self.cells:
            assert isinstance(cell, nn.ModuleList)
            x = x + torch.stack([torch.relu(branch(x)) for branch in cell]).sum(dim=0)
        return x.pow(2).mean()


def main() -> None:
    torch.manual_seed(0)
    model, batch = Cells(), torch.randn(8192, 512)
    cluster = Path(__file__).parent / "mixed.toml"
    for searcher in (HillClimbing(), "portfolio"):
        found = placer.optimize(
            model,
            batch,
            devices=cluster,
            search=placer.SearchConfig(budget=BUDGET, placer=searcher),
            progress=False,
        )
        name = searcher if isinstance(searcher, str) else searcher.name
        print(f"{name}, {BUDGET}:")
        for candidate in found.candidates:
            if np.isfinite(candidate.predicted_s):
                print(f"  {candidate.name}: {candidate.predicted_s * 1e3:.3f} ms")
    print(f"lower bound: {found.lower_bound_s * 1e3:.3f} ms")


if __name__ == "__main__":
    main()
