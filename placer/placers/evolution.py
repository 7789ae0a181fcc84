"""Evolution of the list scheduler's weights."""

from __future__ import annotations

from typing import ClassVar, Final

import numpy as np

from placer.placers.sampling import Sampling
from placer.search.candidate import Kind
from placer.search.evaluator import BudgetedEvaluator
from placer.search.evolution import Evolution
from placer.search.list_scheduler.decoder import HEFT, decode
from placer.search.portfolio import POPULATION, SIGMA

SETTLED: Final = 1e-3
"""Below this standard deviation samples decode alike: evolution restarts with twice the
population."""


class Evolved(Sampling):
    """CMA-ES on the 21 weights of the decoder, starting from those of HEFT."""

    kind: ClassVar[Kind] = Kind.EVOLUTION

    def sample(self, budgeted: BudgetedEvaluator, seed: int) -> None:
        """Evaluate HEFT, then one population after the other."""
        scheduling = budgeted.evaluator.scheduling
        budgeted.evaluate(*decode(scheduling, HEFT))
        restarts = 0
        evolution = Evolution(HEFT, sigma=SIGMA, seed=seed, population=POPULATION)
        while not budgeted.over():
            if evolution.sigma < SETTLED:
                restarts += 1
                evolution = Evolution(
                    HEFT, sigma=SIGMA, seed=seed + restarts, population=POPULATION << restarts
                )
            rows = evolution.ask()
            costs = []
            for row in rows:
                if budgeted.over():
                    return
                costs.append(budgeted.evaluate(*decode(scheduling, row)))
            evolution.tell(rows, np.array(costs))
