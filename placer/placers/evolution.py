"""Evolution of the list scheduler's weights."""

from __future__ import annotations

from typing import ClassVar, Final

import numpy as np

from placer.placers.sampling import Sampling
from placer.search.candidate import Kind
from placer.search.decoder import HEFT, decode
from placer.search.evolution import Evolution
from placer.search.portfolio import POPULATION, SIGMA
from placer.search.tally import Tally

SETTLED: Final = 1e-3
"""Below this standard deviation samples decode alike: evolution restarts with twice the
population."""


class Evolved(Sampling):
    """CMA-ES on the 21 weights of the decoder, starting from those of HEFT."""

    kind: ClassVar[Kind] = Kind.EVOLUTION

    def sample(self, tally: Tally, seed: int) -> None:
        """Evaluate HEFT, then one population after the other."""
        outline = tally.judge.outline
        tally.judged(*decode(outline, HEFT))
        restarts = 0
        evolution = Evolution(HEFT, sigma=SIGMA, seed=seed, population=POPULATION)
        while not tally.over():
            if evolution.sigma < SETTLED:
                restarts += 1
                evolution = Evolution(
                    HEFT, sigma=SIGMA, seed=seed + restarts, population=POPULATION << restarts
                )
            rows = evolution.ask()
            costs = []
            for row in rows:
                if tally.over():
                    return
                costs.append(tally.judged(*decode(outline, row)))
            evolution.tell(rows, np.array(costs))
